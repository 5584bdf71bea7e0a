"""One optimizer step under any plan."""

from tensorshard.engine.engine import Engine, NonFiniteLossError
from tensorshard.engine.guards.replay import ReplayMismatchError

__all__ = ["Engine", "NonFiniteLossError", "ReplayMismatchError"]
