"""The frame of a chart: its scale, and the values that are written beside it."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

LEFT, TOP, WIDE, HIGH, BELOW = 74, 10, 600, 190, 30
"""Sizes of a chart, in its own units: the frame's place and size, and the room below it for steps."""

_MOST_TICKS = 6
_ZEROS = re.compile(r"\.0+(?!\d)")  # of "20.0 GiB"


@dataclass(frozen=True)
class Scale:
    """Maps values to heights in a chart.

    Args:
        low, high: the values at the bottom and the top, `low` below `high`.
        logarithmic: whether equal factors are equal heights; both ends are above 0 then.
        in_bytes: whether values are bytes. Then round values are those that are round in KiB, MiB and so on.
    """

    low: float
    high: float
    logarithmic: bool = False
    in_bytes: bool = False

    def y(self, value: float) -> float:
        """The y coordinate of `value`."""
        low, high, value = (math.log(v) if self.logarithmic else v for v in (self.low, self.high, value))
        return TOP + HIGH * (1 - (value - low) / (high - low))

    def ticks(self) -> list[float]:
        """Round values to write beside the scale."""
        if not self.logarithmic:
            unit = 1024 ** max(0, int(math.log(self.high, 1024))) if self.in_bytes and self.high > 0 else 1
            return [unit * value for value in round_values(self.low / unit, self.high / unit)]
        ends = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        every = max(1, (ends[1] - ends[0]) // _MOST_TICKS)
        powers = [10.0**power for power in range(ends[0], ends[1] + 1, every)]
        return [value for value in powers if self.low <= value <= self.high]


def scale_of(low: float, high: float, median: float, *, from_zero: bool = False, in_bytes: bool = False) -> Scale:
    """A scale for values from `low` to `high`. It is logarithmic if a few of them are far above all others.

    Args:
        median: the median of the values.
        from_zero: whether it begins at 0, so that heights can be compared.
        in_bytes: as for :class:`Scale`.
    """
    if low > 0 and high > 30 * median and not from_zero:
        return Scale(low / 1.2, high * 1.2, True)
    low = min(0.0, low) if from_zero else low
    room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return Scale(low if from_zero and low == 0 else low - room, high + room, in_bytes=in_bytes)


def round_values(low: float, high: float) -> list[float]:
    """A few round values between `low` and `high`."""
    least = (high - low) / _MOST_TICKS
    unit = 10.0 ** math.floor(math.log10(least))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= least * 0.999)
    return [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def frame(scale: Scale, spell: Callable[[float], str]) -> list[str]:
    """Lines across a chart at round values, and the values, as SVG."""
    parts = []
    for value in scale.ticks():
        y = scale.y(value)
        parts.append(f'<path d="M{LEFT} {y:.1f}h{WIDE}" class="grid"/>')
        words = _ZEROS.sub("", spell(value))
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" class="end">{words}</text>')
    return parts
