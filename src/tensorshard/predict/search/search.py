"""A best-first search: it estimates the plan with the best prediction next, until no other is predicted to be better.

A plan is first predicted from a trace without tp, then from a trace with the plan's own tp. If the model is deep, it is
then outlined: predicted from estimates with a few of the model's blocks. Then it is estimated. Each of these is done
only when the plan is the most promising one. The error of a prediction corrects those of similar
plans (:mod:`.corrections`). Predicted memory is a lower bound. So no plan that may fit is left out.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from tensorshard.plan.plan import Plan
from tensorshard.predict.estimate import REFUSALS, Estimate
from tensorshard.predict.search.candidates import Candidate, Refusal, candidates
from tensorshard.predict.search.corrections import Corrections
from tensorshard.predict.search.model_facts import ModelFacts, model_facts
from tensorshard.predict.search.outlines import can_outline, outline
from tensorshard.predict.search.predictions import Prediction, Predictions
from tensorshard.predict.search.progress import Progress
from tensorshard.predict.search.question import SEARCHED, Question
from tensorshard.predict.search.traces import BASE, Family, Trace, family_of, run_trace, search_table

MOST_ESTIMATES = 48
"""The most plans that are estimated. A search that ends there says that others may be better."""

# A plan is estimated, too, if it is predicted to be slower than the best by less than this share, or by less than a
# quarter of it if a plan with the same stages was estimated before. Where such plans were mispredicted by different
# shares, it is half of their range.
_DOUBT = 0.02
_MOST_DOUBT = 0.1

_AS_MUCH = 0.95  # a plan that saves less memory than another takes at least this part of its memory: buffers differ


@dataclass
class Considered:
    """A plan, and what is known of it so far.

    Args:
        first: the prediction from traces alone, or from an outline.
        estimate: the estimate; None if the plan was not estimated. If the plan does not fit, it may lack some ranks.
        seconds: seconds of a step, by the estimate.
        refused: why the model does not take the plan; "" if it does, or if that was not tried.
        outlined: whether `first` is from an outline; None if that was not tried.

    Attributes:
        predicted: the prediction with the present corrections.
    """

    candidate: Candidate
    first: Prediction
    estimate: Estimate | None = None
    seconds: float = 0.0
    refused: str = ""
    outlined: bool | None = None
    predicted: Prediction = field(init=False)

    def __post_init__(self) -> None:
        self.predicted = self.first

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.candidate.plan

    @property
    def memory(self) -> int:
        """Bytes on the fullest rank's device; before the estimate, a lower bound of them."""
        return self.predicted.memory if self.estimate is None else self.estimate.largest.peak_device

    @property
    def is_estimated(self) -> bool:
        """Whether every rank of it was estimated."""
        return self.estimate is not None and self.estimate.complete

    @property
    def likely_seconds(self) -> float:
        """Seconds of a step, as estimated or predicted."""
        return self.seconds if self.is_estimated else self.predicted.seconds


Key = Callable[[int, float], tuple[float, float]]
"""What is minimized: from bytes and seconds, two numbers. The first decides; the second decides between equal ones."""

BY_TIME: Key = lambda memory, seconds: (seconds, memory)  # noqa: E731
BY_MEMORY: Key = lambda memory, seconds: (memory, seconds)  # noqa: E731


_SAME = tuple(name for name in SEARCHED if name not in ("recompute", "offload", "zero", "micro_batches"))


@dataclass
class Search:
    """A search under way, or done.

    Args:
        traces, facts: those of an earlier search for the same model. This search uses them, and adds to them.

    Attributes:
        considered: every plan that the world allows.
        refused: regions without any plan.
        found: plans that fit, the best first.
        exhausted: whether every plan that could be better than those found was estimated.
        estimates: how many plans were estimated.
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
    _predictions: Predictions = field(init=False)
    _floors: dict[int, float] = field(default_factory=dict)  # least seconds, by the order of candidates
    _memory_floors: dict[int, int] = field(default_factory=dict)  # least bytes, in the same way
    _corrections: Corrections = field(default_factory=Corrections)
    _beyond_outlines: list[float] = field(default_factory=list)  # ratios of estimated to outlined seconds

    def run(
        self,
        key: Key,
        top: int,
        progress: Progress,
        *,
        most: int = MOST_ESTIMATES,
        most_too_large: int = MOST_ESTIMATES,
        longest: float = math.inf,
        any_will_do: bool = False,
    ) -> "Search":
        """Looks for the `top` best plans by `key`. If it was run before, it goes on with what is left.

        Args:
            most: how many plans may be estimated, with those of earlier runs.
            most_too_large: the same, as long as none of them fits.
            longest: the most seconds that a step may take.
            any_will_do: whether to stop at the first plan that fits.

        Raises:
            ValueError: the model cannot be trained by any plan.
        """
        if not self.considered:
            self._prepare(progress)
        self.exhausted = True
        failed: dict[Family, str] = {}
        queue = self._in_order((one for one in self.considered if one.estimate is None), key)
        while queue and not (any_will_do and self.found):
            one = queue[0]
            is_out = one.refused or one.memory > self.question.memory or one.likely_seconds > longest * (1 + _DOUBT)
            if is_out or self._is_worse(one, key, top):
                queue.popleft()
                continue
            family = self._traced_as(one)
            if family in failed:
                one.refused = failed[family]
                continue
            if family not in self.traces:
                progress.say(f"running tp={family[0]}{' with sequences split' * family[1]}, recompute={family[2]}")
                try:
                    self.traces[family] = self._run_trace(family, self.traces[BASE].samples)
                except REFUSALS as error:
                    one.refused = failed[family] = _first_sentence(error)
                else:
                    self._predict_anew(queue, family)
            elif self.estimates >= (most if self.found else min(most, most_too_large)):
                self.exhausted = False
                break
            elif (unclear := self._first_to_outline(queue)) is not None:
                self._outline(unclear, progress)
            else:
                queue.popleft()
                self._estimate(one, key, progress, longest)
            self._correct(queue)
            queue = self._in_order(queue, key)
        progress.end()
        return self

    @property
    def _equal_blocks(self) -> tuple[str, ...]:
        return () if self.facts is None else self.facts.equal_blocks

    def _run_trace(self, family: Family, samples: int) -> Trace:
        return run_trace(self.question, family, samples, self._equal_blocks)

    def _predict_anew(self, among: Iterable[Considered], family: Family) -> None:
        """Predicts plans with as many tp ranks as `family`, which has just been traced, except those that have a trace
        of their own."""
        traced = self.traces.keys() - {family}
        for one in among:
            if one.plan.tp == family[0] and family_of(one.plan) not in traced and not one.refused and not one.outlined:
                one.first = self._predictions.of(one.candidate)

    def _in_order(self, among: Iterable[Considered], key: Key) -> deque[Considered]:
        """The most promising plans first; those that are refused are left out."""
        left = [one for one in among if not one.refused]
        rank = self._rank if self.found or key is not BY_MEMORY else self._likely_rank
        return deque(sorted(left, key=lambda one: (rank(one, key), one.candidate.order)))

    def _is_worse(self, one: Considered, key: Key, top: int) -> bool:
        """Whether a plan is not among the `top` best, as far as predictions can be trusted."""
        if len(self.found) < top:
            return False
        best, last = self.found[0], self.found[top - 1]
        if self._rank(one, key) < key(last.memory, last.seconds):
            return False
        # Predicted times may be too high. So a plan that is predicted to be near the best is estimated, too.
        return key is not BY_TIME or one.likely_seconds * (1 - self._doubt(one)) >= best.seconds

    def _doubt(self, one: Considered) -> float:
        """The part of a plan's predicted time by which it may be too high."""
        known = self._corrections.doubt_of(one.plan)
        return _DOUBT if known is None else max(_DOUBT / 4, 0.0 if one.outlined else min(known, _MOST_DOUBT))

    def _prepare(self, progress: Progress) -> None:
        question = self.question
        listed, self.refused = candidates(question)
        if BASE not in self.traces:
            # As many samples as a data rank has if all ranks are data ranks. Most plans compute about as many at once.
            samples = min(question.global_batch, max(2, question.global_batch // question.world_size))
            progress.say("running the model once")
            self.facts = model_facts(question.model, question.batch(samples)[0], samples, question.fixed)
            self.traces[BASE] = self._run_trace(BASE, samples)
        self._predictions = Predictions(question, self.traces, self.facts)
        for candidate in listed:
            try:
                self.considered.append(Considered(candidate, self._predictions.of(candidate)))
            except ValueError as error:  # it cannot be cut into so many stages
                nothing = Prediction(0, math.inf, 0.0, 0.0)
                self.considered.append(Considered(candidate, nothing, refused=_first_sentence(error)))

    def _rank(self, one: Considered, key: Key) -> tuple[float, float]:
        return key(one.predicted.memory, one.predicted.seconds)

    def _likely_rank(self, one: Considered, key: Key) -> tuple[float, float]:
        """The rank by the bytes that a plan likely takes, rather than by a lower bound of them."""
        likely = one.first.memory * self._corrections.likely_of_memory(one.plan)
        return key(max(one.predicted.memory, int(likely)), one.predicted.seconds)

    def _correct(self, among: Iterable[Considered]) -> None:
        """Corrects the predictions by the estimates so far."""
        beyond = min(self._beyond_outlines, default=1.0)
        for one in among:
            ratio = beyond if one.outlined else self._corrections.of(one.plan) or 1.0
            seconds = max(one.first.seconds * ratio, self._floors.get(one.candidate.order, 0.0))
            likely = one.first.memory * (1.0 if one.outlined else self._corrections.of_memory(one.plan))
            memory = max(int(likely), self._memory_floors.get(one.candidate.order, 0))
            same = (seconds, memory) == (one.first.seconds, one.first.memory)
            one.predicted = one.first if same else replace(one.first, seconds=seconds, memory=memory)

    def _first_to_outline(self, queue: Sequence[Considered]) -> Considered | None:
        """The first plan that can be outlined, if the estimate of the first in the queue should wait for that: it may
        turn out to be as good."""
        first, split_alike = queue[0], {family[:2] for family in self.traces}
        for one in queue:
            if one.predicted.seconds * (1 - 2 * _MOST_DOUBT) > first.predicted.seconds:
                return None
            if one.memory > self.question.memory or one.outlined is not None:
                continue
            if family_of(one.plan)[:2] not in split_alike:
                continue
            doubt = 2 * max(_DOUBT, self._doubt(one))
            if one is not first and one.predicted.seconds * (1 - doubt) > first.predicted.seconds:
                continue
            if can_outline(self.question, one.plan, self._equal_blocks):
                return one
        return None

    def _outline(self, one: Considered, progress: Progress) -> None:
        """Predicts a plan from its outline. If the model needs all of its blocks, the prediction stays as it is."""
        progress.say(
            f"{self.estimates} of {len(self.considered)} plans estimated, one with a few of the model's blocks"
        )
        one.outlined = False
        with suppress(Exception):
            outlined = outline(self.question, one.plan, self._equal_blocks)
            self._corrections.note(one.plan, one.first.seconds, outlined.seconds)
            one.first = replace(outlined, memory=max(outlined.memory, one.first.memory))
            one.outlined = True
            self._raise_floors(one, outlined.seconds)

    def _estimate(self, one: Considered, key: Key, progress: Progress, longest: float) -> None:
        best = f", best so far {self.found[0].seconds:.3g} s" if self.found else ""
        progress.say(f"{self.estimates} of {len(self.considered)} plans estimated{best}")
        self.estimates += 1
        plan, samples = one.plan, self.traces[BASE].samples
        search_table(self.question, plan.tp, samples, self._equal_blocks, sequence_parallel=plan.sequence_parallel)
        try:
            one.estimate = self.question.estimate(one.plan, stop_above=self.question.memory)
        except REFUSALS as error:
            one.refused = _first_sentence(error)
            for other in self._alike(one.plan):
                other.refused = one.refused
            return
        if not one.outlined:
            self._corrections.note_memory(one.plan, one.first.memory, one.memory)
        if one.memory > self.question.memory:
            self._scarce.add(family_of(one.plan))
            self._raise_memory_floors(one)
        if not one.estimate.complete:
            return
        one.seconds = self.question.seconds(one.estimate)
        if one.outlined:
            self._beyond_outlines.append(one.seconds / one.first.seconds)
        else:
            self._corrections.note(one.plan, one.first.seconds, one.seconds)
        self._raise_floors(one, one.seconds)
        if one.memory <= self.question.memory and one.seconds <= longest:
            self.found.append(one)
            self.found.sort(key=lambda found: (key(found.memory, found.seconds), found.candidate.order))

    def _traced_as(self, one: Considered) -> Family:
        """The family whose trace should be run before a plan is estimated.

        Unless memory is scarce, a trace without recomputation is enough.
        """
        tp, sequence_parallel, _ = family = family_of(one.plan)
        kept = self._predictions.kept_without_recomputation(one.candidate)
        is_scarce = family in self._scarce or one.memory + kept > self.question.memory
        return family if is_scarce else (tp, sequence_parallel, "none")

    def _raise_floors(self, one: Considered, seconds: float) -> None:
        """Notes that plans which do all that `one` does in `seconds`, and more, take at least as long."""
        for other in self.considered:
            if other is not one and _does_more(other.plan, one.plan):
                order = other.candidate.order
                self._floors[order] = max(self._floors.get(order, 0.0), seconds)

    def _raise_memory_floors(self, one: Considered) -> None:
        """Notes that plans which save less memory than `one`, and nothing else, take about as much at least."""
        least = int(one.memory * _AS_MUCH)
        for other in self.considered:
            if _saves_more(one.plan, other.plan):
                order = other.candidate.order
                self._memory_floors[order] = max(self._memory_floors.get(order, 0), least)

    def _alike(self, plan: Plan) -> Iterable[Considered]:
        """Plans that a model refuses as it refuses `plan`: those with the same stages, and the same layers split."""
        same = ["tp", "sequence_parallel", "pp", "pp_schedule", "pp_stages_per_rank"]
        if plan.pp == 1:
            same += ["zero", "recompute", "offload", "dp_shard", "micro_batches"]
        wanted = [getattr(plan, name) for name in same]
        return (one for one in self.considered if [getattr(one.plan, name) for name in same] == wanted)


def _does_more(plan: Plan, than: Plan) -> bool:
    """Whether `plan` is like `than`, but recomputes or offloads more, reduces more often, or has smaller
    micro-batches."""
    if than.recompute not in (plan.recompute, "none") or than.offload not in (plan.offload, None):
        return False
    if plan.zero != than.zero and (plan.zero, than.zero) != (2, 1):
        return False
    if plan.micro_batches != than.micro_batches and (plan.pp > 1 or plan.micro_batches % than.micro_batches):
        return False
    return all(getattr(plan, name) == getattr(than, name) for name in _SAME)


def _saves_more(plan: Plan, than: Plan) -> bool:
    """Whether `plan` is like `than`, but shards more, recomputes or offloads more, or has smaller micro-batches."""
    if than.recompute not in (plan.recompute, "none") or than.offload not in (plan.offload, None):
        return False
    if plan.zero != than.zero and (plan.zero == 3 or int(than.zero) > int(plan.zero)):  # ZeRO 3 gathers weights again
        return False
    if plan.micro_batches != than.micro_batches and than.micro_batches == 1:  # which has no gradients to add to
        return False
    if plan.micro_batches < than.micro_batches:
        return False
    return all(getattr(plan, name) == getattr(than, name) for name in _SAME)


def _first_sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0]
