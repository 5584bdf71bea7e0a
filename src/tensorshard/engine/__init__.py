"""One optimizer step under any plan."""

from tensorshard.engine.engine import Engine, NonFiniteLossError

__all__ = ["Engine", "NonFiniteLossError"]
