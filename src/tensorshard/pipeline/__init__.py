"""Pipelines: cutting any model into stages, and running them by torch's schedules."""

from tensorshard.pipeline.capture import Tracer
from tensorshard.pipeline.cut import Cut, cut_model
from tensorshard.pipeline.draw import Timeline, timeline
from tensorshard.pipeline.obstacles import Limits
from tensorshard.pipeline.runner import PipelineRunner
from tensorshard.pipeline.schedules import SCHEDULES, check_schedule, find_schedule
from tensorshard.pipeline.shapes import Shapes
from tensorshard.pipeline.stage import StageModule
from tensorshard.pipeline.torch_stage import StageHooks

__all__ = [
    "SCHEDULES",
    "Cut",
    "Limits",
    "PipelineRunner",
    "Shapes",
    "StageHooks",
    "StageModule",
    "Timeline",
    "Tracer",
    "check_schedule",
    "cut_model",
    "find_schedule",
    "timeline",
]
