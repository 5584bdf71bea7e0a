"""What is done beside training, one small class each."""

from tensorshard.trainer.hooks.checkpoint_hook import CheckpointHook
from tensorshard.trainer.hooks.evaluation_hook import EvaluationHook
from tensorshard.trainer.hooks.expectation_hook import ExpectationHook
from tensorshard.trainer.hooks.hook import Hook
from tensorshard.trainer.hooks.logging_hook import LoggingHook
from tensorshard.trainer.hooks.memory_hook import MemoryHook
from tensorshard.trainer.hooks.memory_profile_hook import MemoryProfileHook
from tensorshard.trainer.hooks.optimizer_options_hook import OptimizerOptionsHook
from tensorshard.trainer.hooks.profile_hook import ProfileHook
from tensorshard.trainer.hooks.schedule_hook import ScheduleHook
from tensorshard.trainer.hooks.timer_hook import TimerHook

__all__ = [
    "CheckpointHook",
    "EvaluationHook",
    "ExpectationHook",
    "Hook",
    "LoggingHook",
    "MemoryHook",
    "MemoryProfileHook",
    "OptimizerOptionsHook",
    "ProfileHook",
    "ScheduleHook",
    "TimerHook",
]
