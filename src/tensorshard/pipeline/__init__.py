"""Pipelines: cutting any model into stages, and running them by torch's schedules."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

# Imported on first use, so that a Plan, which asks for schedules alone, stays quick to make.
_MODULES = {
    "SCHEDULES": "schedules",
    "Cut": "cut",
    "Limits": "obstacles",
    "PipelineRunner": "runner",
    "Shapes": "shapes",
    "StageHooks": "torch_stage",
    "StageModule": "stage",
    "Timeline": "draw",
    "Tracer": "capture",
    "check_schedule": "schedules",
    "cut_model": "cut",
    "find_schedule": "schedules",
    "timeline": "draw",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
