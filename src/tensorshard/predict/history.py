"""How memory changes over steps, by category, in few enough moments to draw."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

_MOST = 320  # moments


class Change(Protocol):
    """Storage `number` grows or shrinks by `nbytes`."""

    @property
    def number(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def phase(self) -> str: ...


@dataclass(frozen=True)
class Moment:
    """What is held at one moment.

    Args:
        phase: "initialization", "forward", "backward" or "update".
        held: bytes by category, in the order in which categories were given.
    """

    phase: str
    held: tuple[int, ...]

    @property
    def total(self) -> int:
        """Bytes of all categories."""
        return sum(self.held)


def moments(events: Sequence[Change], category_of: Sequence[str], categories: Iterable[str]) -> list[Moment]:
    """Cuts `events` into about 300 stretches, and at the ends of phases, and returns the fullest moment of each.

    Args:
        category_of: the category of each storage, by its number.
        categories: all categories.
    """
    place = {name: index for index, name in enumerate(categories)}
    held = [0] * len(place)
    length = max(1, len(events) // _MOST)
    found: list[Moment] = []
    in_stretch = length
    for event in events:
        held[place[category_of[event.number]]] += event.nbytes
        moment = Moment(event.phase, tuple(held))
        if found and found[-1].phase == event.phase == "initialization":
            found[-1] = moment  # of the initialization only its end counts: what is there when the steps begin
        elif in_stretch >= length or found[-1].phase != event.phase:
            found.append(moment)
            in_stretch = 0
        elif moment.total > found[-1].total:
            found[-1] = moment
        in_stretch += 1
    return found
