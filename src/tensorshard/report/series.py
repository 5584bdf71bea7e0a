"""One measurement over the steps of a run, and its summary for a chart with fewer columns than steps."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Series:
    """Numbers by step.

    Args:
        steps: [n], ascending.
        values: [n], all finite.
        dropped: how many further values were not finite.
    """

    steps: np.ndarray
    values: np.ndarray
    dropped: int = 0

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def first(self) -> float:
        return float(self.values[0])

    @property
    def last(self) -> float:
        return float(self.values[-1])

    @property
    def median(self) -> float:
        """The median of all values but the first, which belongs to a step that allocates, and perhaps compiles."""
        return float(np.median(self.values[1:] if len(self) > 1 else self.values))

    def lowest(self) -> tuple[int, float]:
        """The step of the lowest value, and the value."""
        at = int(self.values.argmin())
        return int(self.steps[at]), float(self.values[at])

    def highest(self) -> tuple[int, float]:
        """The step of the highest value, and the value."""
        at = int(self.values.argmax())
        return int(self.steps[at]), float(self.values[at])


@dataclass(frozen=True)
class Columns:
    """The values of a series in each column of a chart. Columns without values are left out.

    Args:
        places: [n], the number of each column.
        lows, means, highs: [n], the lowest, the mean and the highest value there.
    """

    places: np.ndarray
    lows: np.ndarray
    means: np.ndarray
    highs: np.ndarray


def columns(series: Series, count: int, first: int, last: int) -> Columns:
    """`series` in `count` columns, which are the same for every series of a chart.

    No minimum and no maximum is lost, however many steps there are.

    Args:
        first, last: the steps at the left and the right end.
    """
    places = (series.steps - first) * count // (max(last - first, 0) + 1)
    starts = np.flatnonzero(np.diff(places, prepend=-1))
    sizes = np.diff(starts, append=len(series))
    return Columns(
        places[starts],
        np.minimum.reduceat(series.values, starts),
        np.add.reduceat(series.values, starts) / sizes,
        np.maximum.reduceat(series.values, starts),
    )
