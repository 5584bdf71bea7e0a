"""What is done beside training, one small class each."""

from tensorshard.trainer.hooks.hook import Hook
from tensorshard.trainer.hooks.metrics import ExpectationHook, LoggingHook, MemoryHook, TimerHook
from tensorshard.trainer.hooks.out_of_memory import OutOfMemoryHook
from tensorshard.trainer.hooks.profiling import MemoryProfileHook, ProfileHook
from tensorshard.trainer.hooks.schedule import CheckpointHook, EvaluationHook, OptimizerOptionsHook, ScheduleHook

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
    "TimerHook",
]
