"""What is done beside training, one small class each."""

from tensorshard.trainer.hooks.metrics import ExpectationHook, LoggingHook, MemoryHook, StepWork, TimerHook
from tensorshard.trainer.hooks.profiling import MemoryProfileHook, OutOfMemoryHook, ProfileHook
from tensorshard.trainer.hooks.schedule import CheckpointHook, EvaluationHook, OptimizerOptionsHook, ScheduleHook
from tensorshard.trainer.trainer import Hook

__all__ = [
    "CheckpointHook",
    "EvaluationHook",
    "ExpectationHook",
    "Hook",
    "LoggingHook",
    "MemoryHook",
    "MemoryProfileHook",
    "OptimizerOptionsHook",
    "OutOfMemoryHook",
    "ProfileHook",
    "ScheduleHook",
    "StepWork",
    "TimerHook",
]
