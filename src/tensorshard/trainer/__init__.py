"""Training runs on top of an engine: the loop, its hooks, evaluators, schedules and loggers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorshard.trainer.evaluators import Evaluator, LossEvaluator, MetricEvaluator
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
    from tensorshard.trainer.interruption import StopRequest
    from tensorshard.trainer.memory import PeakMemory
    from tensorshard.trainer.run_directory import RunDirectory
    from tensorshard.trainer.schedulers import constant, warmup_cosine, warmup_linear
    from tensorshard.trainer.trainer import Trainer

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
    "warmup_linear",
]

# Where names come from on their first use, so that a report of a run does not wait for torch.
_MODULES = {
    "Evaluator": "evaluators",
    "LossEvaluator": "evaluators",
    "MetricEvaluator": "evaluators",
    "PeakMemory": "memory",
    "RunDirectory": "run_directory",
    "StopRequest": "interruption",
    "Trainer": "trainer",
    "constant": "schedulers",
    "warmup_cosine": "schedulers",
    "warmup_linear": "schedulers",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'tensorshard.trainer' has no attribute {name!r}")
    return getattr(import_module(f"tensorshard.trainer.{_MODULES.get(name, 'hooks')}"), name)
