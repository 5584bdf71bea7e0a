"""Draws a schedule as text and as a picture, by playing its list of actions through."""

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tensorshard.pipeline.run.schedule_runner import Action, actions
from tensorshard.plan.schedules import find_schedule

DURATIONS: Mapping[str, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""A backward takes as long as two forwards: one for the inputs' gradients, one for the parameters'."""

_COLOURS = {"F": "#6baed6", "B": "#74c476", "I": "#a1d99b", "W": "#fdae6b"}
_WORDS = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of parameters"}


@dataclass(frozen=True)
class Timed:
    """An action, with the times at which it begins and ends."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A schedule played through. Unless :func:`timeline` gets other durations, communication takes no time and all
    stages cost the same.

    Args:
        schedule: its name.
        ranks: what each rank does, in order.
        stages_per_rank: how many stages each has.
        micro_batches: how many there are.
    """

    schedule: str
    ranks: tuple[tuple[Timed, ...], ...]
    stages_per_rank: int
    micro_batches: int

    @property
    def length(self) -> float:
        """From the first action's start to the last one's end."""
        return max(timed.end for rank in self.ranks for timed in rank)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they wait."""
        busy = sum(timed.end - timed.start for rank in self.ranks for timed in rank)
        return 1 - busy / (self.length * len(self.ranks))

    def kept(self, rank: int) -> int:
        """The largest number of forwards for which `rank` keeps activations at once. Each is of one of its stages."""
        return _most_kept(timed.action for timed in self.ranks[rank])

    def text(self) -> str:
        """A row for each rank and a column for each unit of time; ``F2b`` is the forward of micro-batch 2 in the rank's
        second stage."""
        stages = find_schedule(self.schedule)
        width = max(len(self._cell(timed.action, 0)) for rank in self.ranks for timed in rank) + 1
        lines = [self.title()]
        for number, rank in enumerate(self.ranks):
            own = stages.stages_of(number, len(self.ranks), self.stages_per_rank)
            row = ["."] * round(self.length)
            for timed in rank:
                cell = self._cell(timed.action, own.index(timed.action.stage))
                for slot in range(round(timed.start), round(timed.end)):
                    row[slot] = cell
            lines.append(f"rank {number:<3}" + "".join(cell.ljust(width) for cell in row).rstrip())
        lines.append(self._legend())
        return "\n".join(lines)

    def svg(self) -> str:
        """The timeline as an SVG picture."""
        unit, height, left, top = 22.0, 30, 70, 46
        width = left + unit * self.length + 20
        total = top + height * len(self.ranks) + 40
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{total}" '
            f'font-family="sans-serif" font-size="11" role="img" aria-label="{html.escape(self.title())}">',
            '<rect width="100%" height="100%" fill="white"/>',
            f'<text x="{left}" y="22" font-size="14">{html.escape(self.title())}</text>',
        ]
        for number, rank in enumerate(self.ranks):
            y = top + number * height
            own = find_schedule(self.schedule).stages_of(number, len(self.ranks), self.stages_per_rank)
            parts.append(f'<text x="8" y="{y + 18}">rank {number}</text>')
            parts.append(
                f'<rect x="{left}" y="{y}" width="{unit * self.length:.1f}" height="{height - 4}" fill="#f0f0f0"/>'
            )
            for timed in rank:
                action = timed.action
                x, size = left + unit * timed.start, unit * (timed.end - timed.start)
                # Later stages of a rank are paler.
                opacity = 1 - 0.5 * own.index(action.stage) / max(1, len(own) - 1) if len(own) > 1 else 1
                parts.append(
                    f"<g><title>{_WORDS[action.kind]} of micro-batch {action.micro_batch} in stage {action.stage}"
                    f'</title><rect x="{x:.1f}" y="{y}" width="{size - 1:.1f}" height="{height - 4}" '
                    f'fill="{_COLOURS[action.kind]}" fill-opacity="{opacity:.2f}"/>'
                    f'<text x="{x + size / 2:.1f}" y="{y + 17}" text-anchor="middle">{action.micro_batch}</text></g>'
                )
        x, y = float(left), top + height * len(self.ranks) + 8
        for kind in self._kinds():
            parts.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{_COLOURS[kind]}"/>')
            parts.append(f'<text x="{x + 20}" y="{y + 11}">{_WORDS[kind]}</text>')
            x += 40 + 7 * len(_WORDS[kind])
        if self.stages_per_rank > 1:
            parts.append(f'<text x="{x}" y="{y + 11}">paler: the rank\'s later stages</text>')
        return "\n".join([*parts, "</svg>", ""])

    def _repr_svg_(self) -> str:
        """What a notebook shows."""
        return self.svg()

    def save(self, path: str | Path) -> None:
        """Writes the picture to an ``.svg`` file, or the text to a ``.txt`` one.

        Raises:
            ValueError: `path` has another ending.
        """
        kinds = {".svg": self.svg, ".txt": self.text}
        path = Path(path)
        if path.suffix not in kinds:
            raise ValueError(f"{path} ends in {path.suffix or 'nothing'!r}; a schedule is drawn to .svg or .txt files")
        path.write_text(kinds[path.suffix](), encoding="utf-8")

    def title(self) -> str:
        """What is shown, with the bubble's share."""
        several = f", {self.stages_per_rank} stages a rank" if self.stages_per_rank > 1 else ""
        return (
            f"{self.schedule}: {len(self.ranks)} ranks{several}, {self.micro_batches} micro-batches; "
            f"bubble {self.bubble:.1%}"
        )

    def _cell(self, action: Action, local: int) -> str:
        return f"{action.kind}{action.micro_batch}" + (chr(ord("a") + local) if self.stages_per_rank > 1 else "")

    def _kinds(self) -> list[str]:
        used = {timed.action.kind for rank in self.ranks for timed in rank}
        return [kind for kind in _WORDS if kind in used]

    def _legend(self) -> str:
        letters = "; a, b, ...: the rank's first stage, its second, ..." if self.stages_per_rank > 1 else ""
        return ", ".join(f"{kind}: {_WORDS[kind]}" for kind in self._kinds()) + ", .: waiting" + letters


@lru_cache(maxsize=1024)
def kept_by_ranks(schedule: str, *, ranks: int, stages_per_rank: int, micro_batches: int) -> list[int]:
    """What :meth:`Timeline.kept` says of each rank. It depends on the order of a rank's actions alone.

    Raises:
        ValueError: as for :func:`tensorshard.plan.schedules.check_schedule`.
    """
    by_rank = actions(schedule, ranks=ranks, stages_per_rank=stages_per_rank, micro_batches=micro_batches)
    return [_most_kept(of_rank) for of_rank in by_rank]


def _most_kept(order: Iterable[Action]) -> int:
    count = most = 0
    for action in order:
        count += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
        most = max(most, count)
    return most


def timeline(
    schedule: str,
    *,
    ranks: int,
    stages_per_rank: int,
    micro_batches: int,
    durations: Mapping[str, float] | Sequence[Mapping[str, float]] = DURATIONS,
    message: float = 0.0,
) -> Timeline:
    """Plays a schedule through: every rank does its actions in order, each as soon as its inputs are there.

    Args:
        durations: of "F", "B", "I" and "W"; or a sequence of these, one for each rank.
        message: how long it takes to send a stage's output to another rank.

    Raises:
        ValueError: as for :func:`tensorshard.plan.schedules.check_schedule`.
    """
    of_rank = [durations] * ranks if isinstance(durations, Mapping) else durations
    free, ends = [0.0] * ranks, list[float]()
    done: list[list[Timed]] = [[] for _ in range(ranks)]
    for turn in _in_order(schedule, ranks, stages_per_rank, micro_batches):
        start = free[turn.rank]
        for place, is_sent in turn.needs:
            start = max(start, ends[place] + message * is_sent)
        free[turn.rank] = start + of_rank[turn.rank][turn.action.kind]
        ends.append(free[turn.rank])
        done[turn.rank].append(Timed(turn.action, start, free[turn.rank]))
    return Timeline(schedule, tuple(tuple(rank) for rank in done), stages_per_rank, micro_batches)


@dataclass(frozen=True)
class _Turn:
    """An action in an order in which all actions can be done.

    Args:
        needs: the positions in the order of what must be over before, and whether another rank sends it.
    """

    action: Action
    rank: int
    needs: tuple[tuple[int, bool], ...]


@lru_cache(maxsize=256)
def _in_order(schedule: str, ranks: int, stages_per_rank: int, micro_batches: int) -> tuple[_Turn, ...]:
    """All actions of all ranks. The order depends on what each action needs, and not on how long anything takes."""
    todo = actions(schedule, ranks=ranks, stages_per_rank=stages_per_rank, micro_batches=micro_batches)
    last, placed = ranks * stages_per_rank - 1, find_schedule(schedule)
    order: list[_Turn] = []
    places: dict[Action, int] = {}
    following = [0] * ranks
    while len(order) < sum(map(len, todo)):
        before = len(order)
        for rank in range(ranks):
            while following[rank] < len(todo[rank]):
                action = todo[rank][following[rank]]
                needs = [next((n for n in choices if n in places), None) for choices in _needs(action, last)]
                if None in needs:
                    break
                sent = [(places[n], placed.rank_of(n.stage, ranks) != rank) for n in needs if n is not None]
                places[action] = len(order)
                order.append(_Turn(action, rank, tuple(sent)))
                following[rank] += 1
        if len(order) == before:
            raise RuntimeError(f"the {schedule} schedule waits for itself")
    return tuple(order)


def _needs(action: Action, last: int) -> list[tuple[Action, ...]]:
    """What must be over before `action`: one action of each tuple."""
    stage, index = action.stage, action.micro_batch
    if action.kind == "F":
        return [(Action("F", stage - 1, index),)] if stage else []
    if action.kind == "W":
        return [(Action("I", stage, index),)]
    needs: list[tuple[Action, ...]] = [(Action("F", stage, index),)]
    if stage < last:
        needs.append((Action("B", stage + 1, index), Action("I", stage + 1, index)))
    return needs
