"""Pipelines: tracing a model, cutting it into stages, running them by a schedule."""

from typing import TYPE_CHECKING

from tensorshard.common.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from tensorshard.pipeline.cut import Cut, cut_model
    from tensorshard.pipeline.run.cut_cache import CutCache, Shapes
    from tensorshard.pipeline.run.schedule_runner import PipelineRunner
    from tensorshard.pipeline.run.stage_module import StageModule
    from tensorshard.pipeline.trace.tracer import Tracer
    from tensorshard.plan.schedules import find_schedule

__all__ = ["Cut", "CutCache", "PipelineRunner", "Shapes", "StageModule", "Tracer", "cut_model", "find_schedule"]

# Imported on first use, so that importing one part of this package does not import the others.
__getattr__ = lazy_imports(
    __name__,
    {
        "Cut": "tensorshard.pipeline.cut",
        "PipelineRunner": "tensorshard.pipeline.run.schedule_runner",
        "CutCache": "tensorshard.pipeline.run.cut_cache",
        "Shapes": "tensorshard.pipeline.run.cut_cache",
        "StageModule": "tensorshard.pipeline.run.stage_module",
        "Tracer": "tensorshard.pipeline.trace.tracer",
        "cut_model": "tensorshard.pipeline.cut",
        "find_schedule": "tensorshard.plan.schedules",
    },
)
