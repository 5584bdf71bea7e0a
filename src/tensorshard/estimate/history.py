"""How memory changes over steps, by what it is for, in few enough moments to draw."""

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
    """The fullest moment of each stretch of `events`, of about 300 stretches; a phase's end begins a new one.

    Args:
        category_of: that of each storage, by its number.
        categories: all that there are.
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
            found[-1] = moment  # one thing after the other: what is there when the steps begin
        elif in_stretch >= length or found[-1].phase != event.phase:
            found.append(moment)
            in_stretch = 0
        elif moment.total > found[-1].total:
            found[-1] = moment
        in_stretch += 1
    return found
