"""Somewhere to write measurements."""

from collections.abc import Mapping


class Logger:
    """Takes the measurements of training steps. Lives on the rank that writes, usually rank 0 alone."""

    def start(self, step: int, max_steps: int) -> None:
        """Training begins after `step` steps, of `max_steps` in all."""

    def step_done(self, step: int) -> None:
        """Step `step` is done; called for every step, also for those that are not logged."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the measurements of step `step`, by name."""

    def failed(self, error: Exception) -> None:
        """Training ended with `error`; :meth:`close` comes next."""

    def close(self) -> None:
        """Nothing more will come."""
