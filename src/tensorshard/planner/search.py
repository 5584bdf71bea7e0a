"""Best first: the plan whose bound is the lowest is looked at next, until no bound is below what was found.

Branch and bound (Land and Doig 1960). A bound is first one of the full model alone, then one of a trace under the
plan's own tp and recomputation, and then the estimate itself. Each step is taken only for a plan that is the most
promising one.
"""

import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from tensorshard.estimate.estimate import Estimate
from tensorshard.plan import Plan
from tensorshard.planner.bounds import Bound, Bounds
from tensorshard.planner.candidates import Candidate, Refusal, candidates
from tensorshard.planner.model_facts import ModelFacts, model_facts
from tensorshard.planner.progress import Progress
from tensorshard.planner.question import SEARCHED, Question
from tensorshard.planner.traces import BASE, Family, Trace, family_of, run_trace

MOST_ESTIMATES = 48
"""How many plans are estimated, at most; a search that ends there says what it cannot exclude."""


@dataclass
class Considered:
    """A plan, and what is known of it so far.

    Args:
        bound: the least that it takes.
        estimate: what it takes; None where the bound said enough.
        seconds: of a step, by the estimate.
        refused: why the model does not take it; "" where it does, or nobody asked.
    """

    candidate: Candidate
    bound: Bound
    estimate: Estimate | None = None
    seconds: float = 0.0
    refused: str = ""

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.candidate.plan

    @property
    def memory(self) -> int:
        """Bytes of the fullest rank's device, or a bound of them."""
        return self.bound.memory if self.estimate is None else self.estimate.largest.peak_device

    @property
    def least_seconds(self) -> float:
        """Seconds of a step, or a bound of them."""
        return self.bound.seconds if self.estimate is None else self.seconds


Key = Callable[[int, float], tuple[float, float]]
"""What is minimized: of bytes and seconds, the first number decides and the second where that is the same."""

BY_TIME: Key = lambda memory, seconds: (seconds, memory)  # noqa: E731
BY_MEMORY: Key = lambda memory, seconds: (memory, seconds)  # noqa: E731


_SAME = tuple(name for name in SEARCHED if name not in ("recompute", "offload", "zero", "micro_batches"))


@dataclass
class Search:
    """A search under way, or done.

    Args:
        traces, facts: of an earlier search for the same model; they are used, and added to.

    Attributes:
        considered: every plan that the world allows.
        refused: regions without any.
        found: plans that fit, the best first.
        exhausted: whether every plan that could be better than those found was estimated.
        estimates: how many were.
    """

    question: Question
    traces: dict[Family, Trace] = field(default_factory=dict)
    facts: ModelFacts | None = None
    considered: list[Considered] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    found: list[Considered] = field(default_factory=list)
    exhausted: bool = True
    estimates: int = 0
    _scarce: set[Family] = field(default_factory=set)  # families of plans that did not fit
    _floors: dict[int, float] = field(default_factory=dict)  # seconds, by the order of candidates

    def run(
        self,
        key: Key,
        top: int,
        progress: Progress,
        *,
        most: int = MOST_ESTIMATES,
        longest: float = math.inf,
        any_will_do: bool = False,
    ) -> "Search":
        """Looks for the `top` best plans by `key`.

        Args:
            most: how many plans may be estimated.
            longest: seconds that a step may take; plans that take longer are not looked for.
            any_will_do: whether to stop at the first plan that fits.

        Raises:
            ValueError: the model cannot be trained by any plan.
        """
        self._bounds = self._prepare(progress)
        heap = [(self._rank(one, key), one.candidate.order, one) for one in self.considered]
        heapq.heapify(heap)
        failed: dict[Family, str] = {}
        while heap:
            rank, order, one = heapq.heappop(heap)
            if len(self.found) >= top and rank >= key(self.found[top - 1].memory, self.found[top - 1].seconds):
                break
            if any_will_do and self.found:
                break
            if one.refused or one.memory > self.question.memory or one.least_seconds > longest:
                continue
            family = self._traced_as(one.plan)
            if family in failed:
                one.refused = failed[family]
                continue
            if family not in self.traces:
                progress.say(f"running tp={family[0]}{' with sequences split' * family[1]}, recompute={family[2]}")
                try:
                    self.traces[family] = run_trace(self.question, family, self.traces[BASE].samples)
                except (ValueError, NotImplementedError) as error:
                    one.refused = failed[family] = _first_sentence(error)
                    continue
            bound = self._bound(one)
            if bound != one.bound:  # of an earlier trace
                one.bound = bound
                heapq.heappush(heap, (self._rank(one, key), order, one))
                continue
            if self.estimates == most:
                self.exhausted = False
                break
            self._estimate(one, key, progress, longest)
        progress.end()
        return self

    def _prepare(self, progress: Progress) -> Bounds:
        question = self.question
        listed, self.refused = candidates(question)
        samples = max((one.micro_batch for one in listed), default=question.global_batch)
        samples = max(samples, max((t.samples for t in self.traces.values()), default=0))
        if BASE not in self.traces or self.traces[BASE].samples < samples:
            self.traces.clear()
            progress.say("running the model once")
            self.facts = model_facts(question.model, question.batch(samples)[0], samples)
            self.traces[BASE] = run_trace(question, BASE, samples)
        bounds = Bounds(question, self.traces, self.facts)
        self.considered = [Considered(one, bounds.of(one)) for one in listed]
        return bounds

    def _rank(self, one: Considered, key: Key) -> tuple[float, float]:
        return key(one.bound.memory, one.bound.seconds)

    def _estimate(self, one: Considered, key: Key, progress: Progress, longest: float) -> None:
        best = f", best so far {self.found[0].seconds:.3g} s" if self.found else ""
        progress.say(f"{self.estimates} of {len(self.considered)} plans estimated{best}")
        self.estimates += 1
        try:
            one.estimate = self.question.estimate(one.plan)
        except (ValueError, NotImplementedError) as error:
            one.refused = _first_sentence(error)
            for other in self._alike(one.plan):
                other.refused = one.refused
            return
        one.seconds = self.question.seconds(one.estimate)
        self._raise_bounds(one)
        if one.memory <= self.question.memory and one.seconds <= longest:
            self.found.append(one)
            self.found.sort(key=lambda found: (key(found.memory, found.seconds), found.candidate.order))
        elif one.memory > self.question.memory:
            self._scarce.add(family_of(one.plan))

    def _bound(self, one: Considered) -> Bound:
        """What is known now of the least that a plan takes."""
        bound = self._bounds.of(one.candidate)
        return replace(bound, seconds=max(bound.seconds, self._floors.get(one.candidate.order, 0.0)))

    def _traced_as(self, plan: Plan) -> Family:
        """The family whose trace is wanted before `plan` is estimated.

        What recomputation takes is known well enough without one, unless memory is scarce.
        """
        tp, sequence_parallel, _ = family = family_of(plan)
        return family if family in self._scarce else (tp, sequence_parallel, "none")

    def _raise_bounds(self, one: Considered) -> None:
        """Plans that do all that `one` does and more take as long at least."""
        for other in self.considered:
            if other is not one and _does_more(other.plan, one.plan):
                order = other.candidate.order
                self._floors[order] = max(self._floors.get(order, 0.0), one.seconds)

    def _alike(self, plan: Plan) -> Iterable[Considered]:
        """Plans that a model refuses as it refuses `plan`: those with the same stages, and the same layers split."""
        same = ["tp", "sequence_parallel", "pp", "pp_schedule", "pp_stages_per_rank"]
        if plan.pp == 1:
            same += ["zero", "recompute", "offload", "dp_shard", "micro_batches"]
        wanted = [getattr(plan, name) for name in same]
        return (one for one in self.considered if [getattr(one.plan, name) for name in same] == wanted)


def _does_more(plan: Plan, than: Plan) -> bool:
    """Whether `plan` computes again, moves elsewhere, reduces more often or cuts smaller what `than` does not, and is
    the same."""
    if than.recompute not in (plan.recompute, "none") or than.offload not in (plan.offload, None):
        return False
    if plan.zero != than.zero and (plan.zero, than.zero) != (2, 1):
        return False
    if plan.micro_batches != than.micro_batches and (plan.pp > 1 or plan.micro_batches % than.micro_batches):
        return False
    return all(getattr(plan, name) == getattr(than, name) for name in _SAME)


def _first_sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0]
