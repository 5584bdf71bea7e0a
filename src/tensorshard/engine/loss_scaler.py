"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018)."""

from dataclasses import dataclass

_SMALLEST = 1.0


@dataclass
class LossScaler:
    """Keeps the largest power of two that gradients can be multiplied by without overflowing.

    A step whose gradients overflowed on any rank is skipped on all of them and halves the scale; `growth_interval`
    steps without one double it.
    """

    scale: float = 2.0**16
    growth_interval: int = 2000
    steps_since_overflow: int = 0

    @property
    def is_smallest(self) -> bool:
        """Whether the scale is as small as it gets: gradients that overflow would do so without scaling, too."""
        return self.scale <= _SMALLEST

    def update(self, overflowed: bool) -> None:
        """Adapts the scale after a step."""
        if overflowed:
            self.scale = max(_SMALLEST, self.scale / 2)
            self.steps_since_overflow = 0
            return
        self.steps_since_overflow += 1
        if self.steps_since_overflow >= self.growth_interval:
            self.scale *= 2
            self.steps_since_overflow = 0

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "steps_since_overflow": self.steps_since_overflow}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale = float(state["scale"])
        self.steps_since_overflow = int(state["steps_since_overflow"])
