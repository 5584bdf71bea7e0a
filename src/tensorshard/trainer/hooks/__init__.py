"""What is done beside training, one small class each."""

from tensorshard.trainer.hooks.base import Hook
from tensorshard.trainer.hooks.checkpoint import CheckpointHook
from tensorshard.trainer.hooks.evaluation import EvaluationHook
from tensorshard.trainer.hooks.logging import LoggingHook
from tensorshard.trainer.hooks.memory import MemoryHook
from tensorshard.trainer.hooks.options import OptimizerOptionsHook
from tensorshard.trainer.hooks.schedule import ScheduleHook
from tensorshard.trainer.hooks.timer import TimerHook

__all__ = [
    "CheckpointHook",
    "EvaluationHook",
    "Hook",
    "LoggingHook",
    "MemoryHook",
    "OptimizerOptionsHook",
    "ScheduleHook",
    "TimerHook",
]
