"""The plans that a search has found, and why it rejected the others."""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from textwrap import wrap

from tensorshard.common.words import seconds_words, size_text
from tensorshard.plan.plan import Plan
from tensorshard.predict.estimate import Estimate
from tensorshard.predict.hardware import Hardware
from tensorshard.predict.page_frame import document
from tensorshard.predict.search.candidates import Refusal
from tensorshard.predict.search.wording import plan_words

_WIDTH = 80


@dataclass(frozen=True)
class FoundPlan:
    """A plan that fits.

    Args:
        plan: with every axis set.
        estimate: its memory on every distinct rank, and its time.
        seconds: estimated seconds of a step.
        reasons: what speaks for or against the plan, in words with numbers.
        measured_seconds: of a step that was really taken; None if none was.
        failed: why the steps that were tried could not be taken; "" if they were, or if none was tried.
    """

    plan: Plan
    estimate: Estimate
    seconds: float
    reasons: list[str]
    measured_seconds: float | None = None
    failed: str = ""

    @property
    def memory(self) -> int:
        """Bytes of the fullest rank's device."""
        return self.estimate.largest.peak_device


@dataclass(frozen=True)
class PlanSearch:
    """The best plans for a model on some machines; iterating goes through them, the best first.

    Args:
        plans: the plans that were found.
        rejected: groups of plans that were not chosen, each with the reason.
        hardware, memory, world_size, global_batch: those of the search. `memory` is the bytes that a rank may take.
        considered: how many plans the world and the batch allow.
        estimated: how many of them were run on fake tensors. The others are predicted to be slower, or do not fit.
        proven: whether everything that was predicted to be near the best was estimated.
    """

    plans: list[FoundPlan]
    rejected: list[Refusal]
    hardware: Hardware
    memory: int
    world_size: int
    global_batch: int
    considered: int
    estimated: int
    proven: bool

    def __iter__(self) -> Iterator[FoundPlan]:
        return iter(self.plans)

    def __len__(self) -> int:
        return len(self.plans)

    def __getitem__(self, index: int) -> FoundPlan:
        return self.plans[index]

    @property
    def best(self) -> FoundPlan:
        """The first plan."""
        return self.plans[0]

    def describe(self) -> str:
        """A table of the plans, why the first one is the best, and what was rejected; lines of at most 80 columns."""
        measured = any(found.measured_seconds is not None or found.failed for found in self.plans)
        lines = [self.title(), "", f"{'':>3}  {'measured  ' * measured:>12}{'a step':>10}  {'a rank':>10}  plan"]
        for number, found in enumerate(self.plans, start=1):
            head = f"{number:>3}  {_measured_words(found) * measured}{seconds_words(found.seconds):>10}  "
            head += f"{size_text(found.memory):>10}  "
            lines += wrap(plan_words(found.plan), _WIDTH, initial_indent=head, subsequent_indent=" " * len(head))
        for number, found in enumerate(self.plans, start=1):
            reasons = [*found.reasons, *([f"failed: {found.failed}"] if found.failed else [])]
            if reasons:
                lines += ["", f"of plan {number}:"]
                lines += [line for reason in reasons for line in _wrapped(reason)]
        if self.rejected:
            lines += ["", "not chosen:", *(line for refusal in self.rejected for line in _wrapped(str(refusal)))]
        lines += ["", *wrap(self._note(), _WIDTH)]
        return "\n".join(lines)

    def title(self) -> str:
        """What the search was for, in one line."""
        ranks = f"{self.world_size} rank{'s' * (self.world_size > 1)} of {self.hardware.name}"
        return f"{ranks}, {size_text(self.memory)} each, {self.global_batch} samples a step"

    def to_html(self, path: str | Path) -> None:
        """Writes a page that needs nothing else: the table, time against memory of each plan found, and the reasons."""
        points = [Point(found.seconds, found.memory, plan_words(found.plan), found.reasons) for found in self.plans]
        page = search_page(self.title(), points, [str(refusal) for refusal in self.rejected], self._note())
        Path(path).write_text(page, encoding="utf-8")

    def _note(self) -> str:
        grade = "from measured rates" if self.hardware.is_measured else "not validated"
        how = f"{self.considered} plans considered, {self.estimated} estimated; times are {grade}."
        if self.proven:
            return f"{how} Of the others it is only predicted that they take longer, or known that they do not fit."
        return f"{how} The search ended at its bound of estimates: a plan that was not estimated may be better."


def _measured_words(found: FoundPlan) -> str:
    seconds = found.measured_seconds
    words = "failed" if found.failed else "" if seconds is None else seconds_words(seconds)
    return f"{words:>10}  "


def _wrapped(text: str) -> list[str]:
    return wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="    ")


_PICTURE_WIDTH, _PICTURE_HEIGHT, _EDGE = 640, 320, 60


@dataclass(frozen=True)
class Point:
    """A plan in the picture.

    Args: as for :class:`tensorshard.predict.search.plan_search.FoundPlan`; the plan is in words.
    """

    seconds: float
    memory: int
    words: str
    reasons: list[str]


def search_page(title: str, points: list[Point], rejected: list[str], note: str) -> str:
    """The page, as HTML."""
    rows = "".join(
        f"<tr><td>{number}</td><td>{seconds_words(point.seconds)}</td><td>{size_text(point.memory)}</td>"
        f"<td><code>{escape(point.words)}</code></td><td>{escape('; '.join(point.reasons))}</td></tr>"
        for number, point in enumerate(points, start=1)
    )
    others = "".join(f"<li>{escape(reason)}</li>" for reason in rejected)
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<table><tr><th></th><th>a step</th><th>a rank</th><th>plan</th><th>reasons</th></tr>{rows}</table>",
        f"<h2>Time against memory</h2>{_picture(points)}",
        f"<h2>Not chosen</h2><ul>{others}</ul><p>{escape(note)}</p>",
    ]
    return document(title, body)


def _picture(points: list[Point]) -> str:
    """Plans as points, labelled with their numbers in the table: the further left and down, the better."""
    longest, most = max(point.seconds for point in points), max(point.memory for point in points)
    marks = []
    for number, point in enumerate(points, start=1):
        x = _EDGE + (_PICTURE_WIDTH - 2 * _EDGE) * point.seconds / longest
        y = _PICTURE_HEIGHT - _EDGE - (_PICTURE_HEIGHT - 2 * _EDGE) * point.memory / most
        label = f"{escape(point.words)}: {seconds_words(point.seconds)}, {size_text(point.memory)}"
        marks.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="#1f77b4"><title>{label}</title></circle>'
            f'<text x="{x + 7:.1f}" y="{y - 7:.1f}" font-size="12">{number}</text>'
        )
    right, low = _PICTURE_WIDTH - _EDGE, _PICTURE_HEIGHT - _EDGE
    axes = (
        f'<path d="M{_EDGE} {_EDGE / 2}V{low}H{right + _EDGE / 2}" fill="none" stroke="currentColor"/>'
        f'<text x="{right}" y="{low + 20}" font-size="12" text-anchor="middle">{seconds_words(longest)}</text>'
        f'<text x="{_EDGE - 5}" y="{_EDGE}" font-size="12" text-anchor="end">{size_text(most)}</text>'
        f'<text x="{_PICTURE_WIDTH / 2}" y="{low + 40}" font-size="12" text-anchor="middle">a step</text>'
    )
    return (
        f'<svg viewBox="0 0 {_PICTURE_WIDTH} {_PICTURE_HEIGHT}" width="{_PICTURE_WIDTH}" role="img" '
        f'aria-label="Plans by time and memory">'
        f"{axes}{''.join(marks)}</svg>"
    )
