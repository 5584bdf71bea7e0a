"""Where measurements are written: a terminal, ``metrics.jsonl``, TensorBoard, wandb, MLflow, a log file a rank."""

from tensorshard.trainer.loggers.console import AS_IT_IS, ConsoleHandler, PlainLogger, ProgressBarLogger, console_logger
from tensorshard.trainer.loggers.files import JsonLinesLogger, Logger, RankLog, read_metrics
from tensorshard.trainer.loggers.services import (
    MlflowLogger,
    TensorBoardLogger,
    WandbLogger,
    chosen_services,
    service_logger,
)

__all__ = [
    "AS_IT_IS",
    "ConsoleHandler",
    "JsonLinesLogger",
    "Logger",
    "MlflowLogger",
    "PlainLogger",
    "ProgressBarLogger",
    "RankLog",
    "TensorBoardLogger",
    "WandbLogger",
    "chosen_services",
    "console_logger",
    "read_metrics",
    "service_logger",
]
