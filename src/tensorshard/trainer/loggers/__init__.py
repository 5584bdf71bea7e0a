"""Where measurements are written: a terminal, ``metrics.jsonl``, TensorBoard, a log file a rank."""

from tensorshard.trainer.loggers.console import AS_IT_IS, ConsoleHandler, PlainLogger, ProgressBarLogger, console_logger
from tensorshard.trainer.loggers.jsonl import JsonLinesLogger, read_metrics
from tensorshard.trainer.loggers.logger import Logger
from tensorshard.trainer.loggers.rank_log import RankLog
from tensorshard.trainer.loggers.tensorboard import TensorBoardLogger, tensorboard_is_installed

__all__ = [
    "ConsoleHandler",
    "JsonLinesLogger",
    "Logger",
    "AS_IT_IS",
    "PlainLogger",
    "ProgressBarLogger",
    "RankLog",
    "TensorBoardLogger",
    "console_logger",
    "read_metrics",
    "tensorboard_is_installed",
]
