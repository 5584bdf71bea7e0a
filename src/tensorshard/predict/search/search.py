"""A best-first search: the plan with the least predicted time is estimated next, until no other may be better.

A bound of memory prunes what cannot fit. What remains is predicted from a trace without tp, then from a trace with the
plan's own tp, and estimated when it is the most promising. A deep model's plan is extrapolated from a few of its blocks
first, and again put in order. The error of a prediction corrects those of plans with the same stages.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tensorshard.common.progress import end_words, say
from tensorshard.common.words import first_line
from tensorshard.plan.plan import Plan
from tensorshard.predict.estimate import REFUSALS, Estimate
from tensorshard.predict.rank_estimate import LARGE_SEGMENT
from tensorshard.predict.search.candidates import Candidate, Refusal, candidates
from tensorshard.predict.search.model_facts import ModelFacts, extrapolate, model_facts
from tensorshard.predict.search.predictions import Prediction, Predictions
from tensorshard.predict.search.problem import SEARCHED, SearchProblem
from tensorshard.predict.search.traces import (
    BASE,
    Trace,
    TraceKey,
    check_needs_all_blocks,
    run_trace,
    search_table,
    trace_key,
)
from tensorshard.predict.step_time import COMMUNICATION

MOST_ESTIMATES = 48
"""The most plans that are estimated. A search that ends there says that others may be better."""

# The shares by which predicted seconds may be too high: of a plan whose tp and recomputation were not run as one data
# rank yet; of one whose were; and of an extrapolation. A plan is looked at, too, if it may be faster than the best so.
_DOUBT_BEFORE = 0.15
_DOUBT = 0.05
_DOUBT_OF_PIPELINES = 0.03  # their bubble is predicted for equal stages, which is rather too low
_DOUBT_OF_LINE = 0.005
_LEAST_DOUBT_OF_LINE = 0.0005  # of extrapolations, where this search's errors were close to each other
_LEAST_FLOOR = 0.99  # whether logits are computed in tiles may differ, and this much of a step with it

_AS_MUCH = 0.95  # a plan that saves less memory than another takes at least this part of its memory: buffers differ
_DEEP = 24  # with at least so many equal blocks, two estimates with a few of them take less time than one with all


@dataclass
class CandidateState:
    """A plan, and what is known of it so far.

    Args:
        first: the prediction from traces alone, or an extrapolation.
        estimate: the estimate; None if the plan was not estimated. If the plan does not fit, it may lack some ranks.
        seconds: seconds of a step, by the estimate.
        refused: why the model does not take the plan; "" if it does, or if that was not tried.
        extrapolated: whether `first` is an extrapolation; None if that was not tried.

    Attributes:
        predicted: the prediction with the present corrections.
    """

    candidate: Candidate
    first: Prediction
    estimate: Estimate | None = None
    seconds: float = 0.0
    refused: str = ""
    extrapolated: bool | None = None
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
    def time_words(self) -> str:
        """:attr:`seconds` with their bounds; of a plan that was estimated."""
        assert self.estimate is not None
        return self.estimate.time_words(self.seconds)

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
_STAGES = ("tp", "sequence_parallel", "cp", "ep", "pp", "pp_schedule", "pp_stages_per_rank")


@dataclass
class Search:
    """A search under way, or done.

    Args:
        traces, facts: those of an earlier search for the same model. This search uses them, and adds to them.

    Attributes:
        considered: every plan that the world allows.
        refused: regions without any plan.
        fitting: plans that fit, the best first.
        exhausted: whether every plan that could be better than those found was estimated.
        estimates: how many plans were estimated.
        ended: why it ended before; "" if it did not.
    """

    problem: SearchProblem
    traces: dict[TraceKey, Trace] = field(default_factory=dict)
    facts: ModelFacts | None = None
    considered: list[CandidateState] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    fitting: list[CandidateState] = field(default_factory=list)
    exhausted: bool = True
    estimates: int = 0
    ended: str = ""
    _predictions: Predictions = field(init=False)
    _floors: dict[int, float] = field(default_factory=dict)  # least seconds, by the order of candidates
    _memory_floors: dict[int, int] = field(default_factory=dict)  # least bytes, in the same way
    # Ratios of estimated to predicted seconds, by the fields of the stages; of extrapolations, by None.
    _ratios: dict[tuple[Any, ...] | None, list[float]] = field(default_factory=dict)

    def run(
        self,
        key: Key,
        top: int,
        *,
        most: int = MOST_ESTIMATES,
        max_misfits: int = MOST_ESTIMATES,
        longest: float = math.inf,
        room: float = 1.0,
        stop_at_first_fit: bool = False,
    ) -> "Search":
        """Looks for the `top` best plans by `key`. If it was run before, it goes on with what is left.

        It ends with what it has when its time is over (:mod:`tensorshard.common.progress`).

        Args:
            most: how many plans may be estimated, with those of earlier runs.
            max_misfits: the same, as long as none of them fits.
            longest: the most seconds that a step may take.
            room: the part of the memory that a plan may take by its bound, before its estimate.
            stop_at_first_fit: whether to stop at the first plan that fits.

        Raises:
            ValueError: the model cannot be trained by any plan.
        """
        if not self.ended:
            try:
                self._run(key, top, most, max_misfits, longest, room, stop_at_first_fit)
            except KeyboardInterrupt as stop:
                self.ended, self.exhausted = end_words(stop), False
        return self

    def _run(
        self, key: Key, top: int, most: int, max_misfits: int, longest: float, room: float, stop_at_first_fit: bool
    ) -> None:
        if not self.considered:
            self._prepare()
        self.exhausted = True
        failed: dict[TraceKey, str] = {}
        queue = self._in_order((one for one in self.considered if one.estimate is None), key)
        while queue and not (stop_at_first_fit and self.fitting):
            one = queue[0]
            is_out = one.refused or one.memory > self.problem.memory or one.likely_seconds > longest * (1 + _DOUBT)
            if is_out or self._is_worse(one, key, top):
                queue.popleft()
                continue
            if one.memory > self.problem.memory * room:
                queue.popleft()
                self.exhausted = False
                continue
            wanted = trace_key(one.plan)
            if wanted in failed:
                one.refused = failed[wanted]
                continue
            if wanted not in self.traces:
                self._trace(wanted, one, failed, queue)
            elif self.estimates >= (most if self.fitting else min(most, max_misfits)):
                self.exhausted = False
                break
            elif self._can_extrapolate(one):
                self._extrapolate(one)
            else:
                queue.popleft()
                self._estimate(one, key, longest)
            self._correct(queue)
            queue = self._in_order(queue, key)

    def _prepare(self) -> None:
        problem = self.problem
        if BASE not in self.traces:
            # As many samples as a data rank has if all ranks are data ranks. Most plans compute about as many at once.
            samples = min(problem.global_batch, max(2, problem.global_batch // problem.world_size))
            say("running the model once")
            self.facts = model_facts(problem.model, problem.batch(samples)[0], samples, problem.fixed.get("pp_units"))
            if self.facts is not None:
                problem = self.problem = replace(problem, parameters=self.facts.parameters)
            self.traces[BASE] = run_trace(problem, BASE, samples, self._equal_blocks)
        listed, self.refused = candidates(problem, (1,) if self.facts is None else self.facts.expert_parts)
        listed = self._with_enough_units(listed)
        self._predictions = Predictions(problem, self.traces, self.facts)
        self.considered = [CandidateState(candidate, self._predictions.of(candidate)) for candidate in listed]

    def _with_enough_units(self, listed: list[Candidate]) -> list[Candidate]:
        """The plans of no more stages than the model can have; notes degrees of pp of which there are none."""
        if self.facts is None:
            return listed
        units = self.facts.units
        left = [one for one in listed if one.plan.pp == 1 or one.plan.pp * one.plan.stages_per_rank <= units]
        for pp in sorted({one.plan.pp for one in listed} - {one.plan.pp for one in left}):
            self.refused.append(Refusal(f"pp={pp}", f"makes more stages than the {units} units of the model"))
        return left

    # What is next.

    def _in_order(self, among: Iterable[CandidateState], key: Key) -> deque[CandidateState]:
        """The most promising plans first; those that are refused are left out."""
        left = [one for one in among if not one.refused]
        return deque(sorted(left, key=lambda one: (self._rank(one, key), one.candidate.order)))

    def _rank(self, one: CandidateState, key: Key) -> tuple[float, float]:
        return key(one.predicted.memory, one.predicted.seconds)

    def _is_worse(self, one: CandidateState, key: Key, top: int) -> bool:
        """Whether a plan is not among the `top` best, as far as predictions can be trusted."""
        if key is BY_TIME and any(_cuts_samples(other.plan, one.plan) for other in self.fitting):
            return True
        if len(self.fitting) < top:
            return False
        best, last = self.fitting[0], self.fitting[top - 1]
        if self._rank(one, key) < key(last.memory, last.seconds):
            return False
        # Predicted times may be too high. So a plan that is predicted to be near the best is estimated, too.
        return key is not BY_TIME or self._least_seconds(one) >= best.seconds

    def _least_seconds(self, one: CandidateState) -> float:
        """Seconds that a plan takes at least, as far as predictions can be trusted."""
        floor = self._floors.get(one.candidate.order, 0.0)
        if one.extrapolated:
            return max(floor, one.predicted.seconds * (1 - self._doubt_of_line))
        after = _DOUBT if one.plan.pp == 1 else _DOUBT_OF_PIPELINES
        doubt = after if trace_key(one.plan) in self.traces else _DOUBT_BEFORE
        return max(floor, one.predicted.seconds * (1 - doubt))

    @property
    def _doubt_of_line(self) -> float:
        """The share by which an extrapolation may be too high; less once this search's errors are close."""
        errors = self._ratios.get(None, [])
        if len(errors) < 2:
            return _DOUBT_OF_LINE
        return min(_DOUBT_OF_LINE, _LEAST_DOUBT_OF_LINE + 2 * (max(errors) - min(errors)))

    # What becomes known.

    @property
    def _equal_blocks(self) -> tuple[str, ...]:
        return () if self.facts is None else self.facts.equal_blocks

    def _trace(
        self,
        key: TraceKey,
        one: CandidateState,
        failed: dict[TraceKey, str],
        queue: Iterable[CandidateState],
    ) -> None:
        """Runs a trace for `one`, and predicts anew what it tells more of."""
        along = f"tp={key.tp}{' with sequences split' * key.sequence_parallel}"
        along += f"{f', cp={key.cp}' * (key.cp > 1)}{f', ep={key.ep}' * (key.ep > 1)}"
        say(f"running {along}, recompute={key.recompute}")
        try:
            self.traces[key] = run_trace(self.problem, key, self.traces[BASE].samples, self._equal_blocks)
        except REFUSALS as error:
            one.refused = failed[key] = first_line(error)
            return
        traced = self.traces.keys() - {key}
        for other in queue:
            if other.plan.tp == key.tp and trace_key(other.plan) not in traced and not other.extrapolated:
                other.first = self._predictions.of(other.candidate)

    def _can_extrapolate(self, one: CandidateState) -> bool:
        deep = len(self._equal_blocks) >= _DEEP
        return one.extrapolated is None and deep and self.problem.can_be_shortened and one.plan.pp == 1

    def _extrapolate(self, one: CandidateState) -> None:
        """Predicts a plan from estimates with a few blocks. If the model needs all of them, the prediction stays."""
        say(f"{self.estimates} of at most {MOST_ESTIMATES} estimates made; one with a few of the blocks")
        one.extrapolated = False
        try:
            prediction = predict_from_few_blocks(self.problem.under(one.plan.ep), one.plan, self._equal_blocks)
        except Exception as error:
            check_needs_all_blocks(error)
            return
        one.first = replace(prediction, memory=max(prediction.memory, one.first.memory))
        one.extrapolated = True
        self._raise_floors(one, prediction.seconds * (1 - self._doubt_of_line))

    def _estimate(self, one: CandidateState, key: Key, longest: float) -> None:
        best = f", the best so far takes {self.fitting[0].time_words}" if self.fitting else ", none fits"
        say(f"{self.estimates} of at most {MOST_ESTIMATES} estimates made{best if self.estimates else ''}")
        self.estimates += 1
        plan, samples = one.plan, self.traces[BASE].samples
        knew_cuts = bool(self.problem.shared.traced)
        problem, splits_sequences = self.problem.under(plan.ep), plan.sequence_parallel
        search_table(problem, plan.tp, samples, self._equal_blocks, sequence_parallel=splits_sequences, ep=plan.ep)
        try:
            one.estimate = problem.estimate(one.plan, stop_above=self.problem.memory)
        except REFUSALS as error:
            one.refused = first_line(error)
            for other in self._refused_alike(one.plan):
                other.refused = one.refused
            return
        if self.problem.shared.traced and not knew_cuts:
            self._predict_pipelines()
        if one.memory > self.problem.memory:
            self._raise_memory_floors(one)
        if not one.estimate.complete:
            return
        one.seconds = self.problem.seconds(one.estimate)
        kind = None if one.extrapolated else _stages(one.plan)
        self._ratios.setdefault(kind, []).append(one.seconds / one.first.seconds)
        self._raise_floors(one, one.seconds)
        if one.memory <= self.problem.memory and one.seconds <= longest:
            self.fitting.append(one)
            self.fitting.sort(key=lambda state: (key(state.memory, state.seconds), state.candidate.order))

    # What that says of other plans.

    def _predict_pipelines(self) -> None:
        """Predicts them anew once it is known how the model is cut."""
        for other in self.considered:
            if other.plan.pp > 1 and other.estimate is None and not other.extrapolated:
                other.first = self._predictions.of(other.candidate)

    def _correct(self, among: Iterable[CandidateState]) -> None:
        """Corrects predictions by the least error of plans with the same stages, and raises them to the floors.

        Of a pipeline, whose bubble is predicted for equal stages, predictions are too low. They are raised by half as
        much as all that were estimated, since others may be nearer.
        """
        for one in among:
            ratio = min(self._ratios.get(None if one.extrapolated else _stages(one.plan), [1.0]))
            if ratio > 1 and not one.extrapolated:
                ratio = (1 + ratio) / 2
            seconds = max(one.first.seconds * ratio, self._floors.get(one.candidate.order, 0.0))
            memory = max(one.first.memory, self._memory_floors.get(one.candidate.order, 0))
            one.predicted = replace(one.first, seconds=seconds, memory=memory)

    def _raise_floors(self, one: CandidateState, seconds: float) -> None:
        """Notes that plans which do all that `one` does in `seconds`, and more, take at least as long."""
        for other in self.considered:
            if other is not one and _does_more(other.plan, one.plan):
                order, part = other.candidate.order, 1 if _has_the_same_logits(other.plan, one.plan) else _LEAST_FLOOR
                self._floors[order] = max(self._floors.get(order, 0.0), seconds * part)

    def _raise_memory_floors(self, one: CandidateState) -> None:
        """Notes that plans which save less memory than `one`, and nothing else, take about as much at least."""
        least = int(one.memory * _AS_MUCH)
        for other in self.considered:
            if _saves_more(one.plan, other.plan):
                order = other.candidate.order
                self._memory_floors[order] = max(self._memory_floors.get(order, 0), least)

    def _refused_alike(self, plan: Plan) -> Iterable[CandidateState]:
        """Plans that a model refuses as it refuses `plan`: those with the same stages, and the same layers split."""
        same = [*_STAGES, *(("zero", "recompute", "offload", "dp_shard", "micro_batches") if plan.pp == 1 else ())]
        wanted = [getattr(plan, name) for name in same]
        return (one for one in self.considered if [getattr(one.plan, name) for name in same] == wanted)


def predict_from_few_blocks(problem: SearchProblem, plan: Plan, blocks: Sequence[str]) -> Prediction:
    """The memory and the time of a plan, extrapolated from estimates of models with a few of its equal `blocks`.

    What an allocator reserves beyond live tensors counts as for the few blocks, less one segment.

    Raises:
        Exception: a model that needs all of its blocks may raise anything.
    """
    few, more = problem.with_few_blocks(
        partial(_estimated, plan), blocks, plan.tp, sequence_parallel=plan.sequence_parallel
    )

    def line(of: Callable[[Estimate], float]) -> float:
        return extrapolate(of(few), of(more), blocks)

    live = line(lambda estimate: estimate.largest.peak_allocated)
    reserved = more.largest.peak_device - more.largest.peak_allocated - LARGE_SEGMENT
    memory = int(live) + max(reserved, problem.hardware.context_under(plan))
    return Prediction(memory, line(problem.seconds), 0.0, line(_communication))


def _estimated(plan: Plan, short: SearchProblem) -> Estimate:
    return short.estimate(plan, borrow=True)


def _communication(estimate: Estimate) -> float:
    assert estimate.step_time is not None  # the hardware has rates
    return estimate.step_time.by_category.get(COMMUNICATION, 0.0)


def _stages(plan: Plan) -> tuple[Any, ...]:
    return tuple(getattr(plan, name) for name in _STAGES)


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


def _has_the_same_logits(plan: Plan, other: Plan) -> bool:
    """Whether plans of one layout compute logits in the same tiles, which depend on the room that a step leaves."""
    return all(getattr(plan, name) == getattr(other, name) for name in ("micro_batches", "zero", "offload"))


def _cuts_samples(plan: Plan, than: Plan) -> bool:
    """Whether `plan` is like `than`, but has more data ranks, with fewer of its micro-batches, in place of cp ranks. It
    computes the same, exchanges less, and so takes no longer."""
    more, rest = divmod(than.cp, plan.cp)
    if rest or more == 1 or plan.pp > 1 or than.recompute not in (plan.recompute, "none"):
        return False
    if plan.dp_size != more * than.dp_size or plan.micro_batches * more != than.micro_batches:
        return False
    return all(
        getattr(plan, name) == getattr(than, name) for name in ("tp", "sequence_parallel", "ep", "zero", "offload")
    )


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
