"""Training runs on top of an engine: the loop, its hooks, evaluators, schedules and loggers."""

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
