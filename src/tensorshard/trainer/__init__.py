"""Training runs on top of an engine: the loop, its hooks, evaluators, schedules and loggers."""

from typing import TYPE_CHECKING

from tensorshard.common.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from tensorshard.trainer.hooks import (
        CheckpointHook,
        EvaluationHook,
        Hook,
        LoggingHook,
        MemoryHook,
        OptimizerOptionsHook,
        ProfileHook,
        ScheduleHook,
        TimerHook,
    )
    from tensorshard.trainer.hooks.schedule import Evaluator, LossEvaluator, MetricEvaluator
    from tensorshard.trainer.memory import PeakMemory
    from tensorshard.trainer.run_directory import RunDirectory
    from tensorshard.trainer.schedulers import constant, warmup_cosine, warmup_decay, warmup_linear
    from tensorshard.trainer.trainer import StopRequest, Trainer

__all__ = [
    "CheckpointHook",
    "EvaluationHook",
    "Evaluator",
    "Hook",
    "LoggingHook",
    "LossEvaluator",
    "MemoryHook",
    "MetricEvaluator",
    "OptimizerOptionsHook",
    "PeakMemory",
    "ProfileHook",
    "RunDirectory",
    "ScheduleHook",
    "StopRequest",
    "TimerHook",
    "Trainer",
    "constant",
    "warmup_cosine",
    "warmup_decay",
    "warmup_linear",
]

# Imported on first use, so that a report of a run does not wait for torch.
__getattr__ = lazy_imports(
    __name__,
    {
        "CheckpointHook": "tensorshard.trainer.hooks",
        "EvaluationHook": "tensorshard.trainer.hooks",
        "Evaluator": "tensorshard.trainer.hooks.schedule",
        "Hook": "tensorshard.trainer.hooks",
        "LoggingHook": "tensorshard.trainer.hooks",
        "LossEvaluator": "tensorshard.trainer.hooks.schedule",
        "MemoryHook": "tensorshard.trainer.hooks",
        "MetricEvaluator": "tensorshard.trainer.hooks.schedule",
        "OptimizerOptionsHook": "tensorshard.trainer.hooks",
        "PeakMemory": "tensorshard.trainer.memory",
        "ProfileHook": "tensorshard.trainer.hooks",
        "RunDirectory": "tensorshard.trainer.run_directory",
        "ScheduleHook": "tensorshard.trainer.hooks",
        "StopRequest": "tensorshard.trainer.trainer",
        "TimerHook": "tensorshard.trainer.hooks",
        "Trainer": "tensorshard.trainer.trainer",
        "constant": "tensorshard.trainer.schedulers",
        "warmup_cosine": "tensorshard.trainer.schedulers",
        "warmup_decay": "tensorshard.trainer.schedulers",
        "warmup_linear": "tensorshard.trainer.schedulers",
    },
)
