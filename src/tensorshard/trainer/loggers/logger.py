"""Somewhere to write measurements."""

from collections.abc import Mapping


class Logger:
    """Takes the measurements of training steps. It exists on the rank that writes, usually rank 0 alone."""

    def start(self, step: int, max_steps: int) -> None:
        """Called when training begins, after `step` of `max_steps` steps."""

    def step_done(self, step: int) -> None:
        """Called after every step, also after those that are not logged."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the measurements of step `step`, by name."""

    def failed(self, error: Exception) -> None:
        """Called if training ends with `error`, before :meth:`close`."""

    def close(self) -> None:
        """Called last."""
