"""The plans that a search has found, and why it rejected the others."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap

from tensorshard.common.quantities import seconds_words
from tensorshard.plan.plan import Plan
from tensorshard.predict.estimate import Estimate
from tensorshard.predict.hardware import Hardware
from tensorshard.predict.search.candidates import Refusal
from tensorshard.predict.search.search_page import Point, search_page
from tensorshard.predict.search.wording import plan_words
from tensorshard.predict.sizes import size_text

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
            return f"{how} The others are predicted to be no better than the first."
        return f"{how} The search ended at its bound of estimates: a plan that was not estimated may be better."


def _measured_words(found: FoundPlan) -> str:
    seconds = found.measured_seconds
    words = "failed" if found.failed else "" if seconds is None else seconds_words(seconds)
    return f"{words:>10}  "


def _wrapped(text: str) -> list[str]:
    return wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="    ")
