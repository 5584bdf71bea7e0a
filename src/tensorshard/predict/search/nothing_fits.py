"""The error of a search in which no plan fits: by how much, and the smallest changes with which one fits."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import Any

from tensorshard.common.quantities import size_text
from tensorshard.predict.estimate import REFUSALS
from tensorshard.predict.search.problem import SearchProblem
from tensorshard.predict.search.search import BY_MEMORY, CandidateState, Progress, Search
from tensorshard.predict.search.wording import plan_words, why_nothing_fits

_TRIES = 2  # estimates for each change
_DOUBLINGS = 4
_WIDTH = 80


@dataclass(frozen=True)
class FittingChange:
    """A change of the search's arguments with which a plan fits.

    Args:
        words: what to change. plan: the plan that fits then, in words. memory: bytes that this plan takes.
    """

    words: str
    plan: str
    memory: int

    def __str__(self) -> str:
        return f"{self.words} ({size_text(self.memory)} with {self.plan})"


class NothingFitsError(ValueError):
    """No plan fits.

    Args:
        problem: a sentence that says by how much. regions: what each ZeRO level and kind of recomputation lacks.
        changes: the smallest changes with which a plan fits.
    """

    def __init__(self, problem: str, regions: list[str], changes: list[str]) -> None:
        remedy = "; or ".join(changes) if changes else "none of the changes that were tried"
        super().__init__(f"{problem} ({', '.join(regions)}). What would fit: {remedy}")
        self.problem, self.regions, self.changes = problem, regions, changes

    def __reduce__(self) -> Any:
        return type(self), (self.problem, self.regions, self.changes)

    def describe(self) -> str:
        """The same in lines of at most 80 columns."""
        lines = [*wrap(self.problem, _WIDTH), ""]
        for region in self.regions:
            lines += wrap(region, _WIDTH, initial_indent="  ", subsequent_indent="    ")
        lines += ["", "what would fit:" if self.changes else "no change that was tried makes one fit"]
        for change in self.changes:
            lines += wrap(change, _WIDTH, initial_indent="  ", subsequent_indent="    ")
        return "\n".join(lines)


def nothing_fits(search: Search, progress: Progress) -> ValueError:
    """The error of a search without a plan that fits."""
    problem = search.problem
    taken = [one for one in search.considered if not one.refused]
    if not taken:
        return ValueError(_no_plan(search))
    least = _nearest(search, taken)
    too_much = size_text(max(0, least.memory - problem.memory))
    changes = list(_changes(search, progress))
    progress.end()
    how = "" if least.is_estimated else "at least "
    sentence = (
        f"no plan of {problem.world_size} ranks fits {size_text(problem.memory)} each; the nearest, "
        f"{plan_words(least.plan)}, takes {how}{size_text(least.memory)}, {too_much} too much"
    )
    return NothingFitsError(sentence, [str(refusal) for refusal in why_nothing_fits(search)], list(map(str, changes)))


def _no_plan(search: Search) -> str:
    problem = search.problem
    reasons = [str(refusal) for refusal in search.refused]
    reasons += sorted({f"{plan_words(one.plan)}: {one.refused}" for one in search.considered})[:3]
    return (
        f"no plan of {problem.world_size} ranks suits a batch of {problem.global_batch} samples and what is fixed "
        f"({dict(problem.fixed) or 'nothing'}): {'; '.join(reasons[:6]) or 'none is allowed'}"
    )


def _nearest(search: Search, taken: list[CandidateState]) -> CandidateState:
    """The plan that takes the least memory: an estimated one, unless a few tries give no estimate."""
    for _ in range(2 * _TRIES):
        nearest = min(taken, key=lambda one: one.memory)
        if nearest.is_estimated:
            break
        with suppress(*REFUSALS):  # without an estimate its bound stays
            nearest.estimate = search.problem.under(nearest.plan.ep).estimate(nearest.plan)
    return min(taken, key=lambda one: (not one.is_estimated, one.memory))


def _changes(search: Search, progress: Progress) -> Iterator[FittingChange]:
    """The smallest change of each kind that helps."""
    for kind in (_smaller_batches, _more_devices, _lower_precision):
        for words, problem in kind(search.problem):
            progress.say(f"no plan fits; trying {words}")
            tried = Search(problem)
            if problem.fixed.get("precision") == search.problem.fixed.get("precision"):
                tried = replace(tried, traces=search.traces, facts=search.facts)
            tried.run(BY_MEMORY, 1, progress, most=_TRIES, stop_at_first_fit=True)
            if tried.found:
                found = tried.found[0]
                yield FittingChange(words, plan_words(found.plan), found.memory)
                break


def _smaller_batches(problem: SearchProblem) -> Iterator[tuple[str, SearchProblem]]:
    batch = problem.global_batch
    for _ in range(_DOUBLINGS):
        if batch % 2:
            return
        batch //= 2
        yield f"global_batch={batch}", problem.with_changes(global_batch=batch)


def _more_devices(problem: SearchProblem) -> Iterator[tuple[str, SearchProblem]]:
    fixed = {name: value for name, value in problem.fixed.items() if name not in ("dp_shard", "dp_replicate")}
    for doubling in range(1, _DOUBLINGS + 1):
        size = problem.world_size * 2**doubling
        yield f"world_size={size}", replace(problem, world_size=size, fixed=fixed)


def _lower_precision(problem: SearchProblem) -> Iterator[tuple[str, SearchProblem]]:
    if problem.fixed.get("precision", "fp32") == "fp32":
        yield "precision=bf16", problem.with_changes(precision="bf16")
