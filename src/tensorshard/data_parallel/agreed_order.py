"""In which order the ranks gather a model's units, the same on all of them whatever each one calls."""

from collections.abc import Sequence
from itertools import chain

_LONGEST = 2048  # a longer sequence is not learned


class AgreedOrder:
    """In which order the ranks gather a model's units, if not all ranks call the same ones.

    All ranks gather along one sequence of units, which is the same everywhere. A rank that calls a unit first takes
    part in the gathers of those that come before it in the sequence and that it did not call; at the end of its
    forward, in those that are left. This needs no messages. If a rank calls a unit that is not in the rest of the
    sequence, the ranks would have to go through it once more. In the first forwards, and whenever the ranks have
    differed before, they ask each other for this at the end of the sequence, and then agree on one that has all calls
    in it.

    Args:
        units: how many there are, in the order of the modules.

    Attributes:
        sequence: numbers of units. A unit that is called several times is in it several times.
        needed: for each of them, whether a backward follows on any rank.
    """

    def __init__(self, units: int) -> None:
        self.sequence = list(range(units))
        self.needed = [True] * units
        self._units = units

    def find(self, unit: int, start: int) -> int | None:
        """The next place of `unit` in the sequence; None if there is none."""
        try:
            return self.sequence.index(unit, start)
        except ValueError:
            return None

    def learn(self, calls: Sequence[Sequence[int]]) -> bool:
        """Takes the shortest sequence that has the calls of all ranks in their order. False: the present one has."""
        merged: list[int] = []
        for one in calls:
            merged = shortest_supersequence(merged, list(one))
            if len(merged) > _LONGEST:
                return False
        present = set(merged)
        for unit in range(self._units):  # not called by any rank yet: after the one before it
            if unit not in present:
                place = merged.index(unit - 1) + 1 if unit - 1 in present else 0
                merged.insert(place, unit)
                present.add(unit)
        if merged == self.sequence:
            return False
        self.sequence, self.needed = merged, [True] * len(merged)
        return True


def shortest_supersequence(one: list[int], other: list[int]) -> list[int]:
    """The shortest sequence that contains both in their order."""
    if not one or not other or one == other:
        return one or other
    lengths = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for i in range(len(one) - 1, -1, -1):
        for j in range(len(other) - 1, -1, -1):
            same = one[i] == other[j]
            lengths[i][j] = lengths[i + 1][j + 1] + 1 if same else max(lengths[i + 1][j], lengths[i][j + 1])
    merged: list[int] = []
    i = j = 0
    while i < len(one) and j < len(other):
        if one[i] == other[j]:
            merged.append(one[i])
            i, j = i + 1, j + 1
        elif lengths[i + 1][j] >= lengths[i][j + 1]:
            merged.append(one[i])
            i += 1
        else:
            merged.append(other[j])
            j += 1
    return list(chain(merged, one[i:], other[j:]))
