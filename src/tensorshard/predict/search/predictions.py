"""Predicts how long a plan takes, and the least memory that it can take, from traces that exist already.

Seconds are added up from parts: the kernels of one data rank, divided among the stages as the model is cut; the
collectives that the Engine makes for its parameters; the schedule, which is simulated. They are near the estimate's
seconds, above or below. Memory is a lower bound: it leaves out padding, buffers and uneven stages.
"""

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from tensorshard.pipeline.run.split_backward import may_split_backward
from tensorshard.plan.plan import AXES, Plan
from tensorshard.plan.schedules import find_schedule
from tensorshard.predict.caching_allocator import SMALL_SEGMENT
from tensorshard.predict.operations import BACKWARD, FORWARD, UPDATE, Transfer
from tensorshard.predict.rank_estimate import resident
from tensorshard.predict.search.candidates import Candidate
from tensorshard.predict.search.data_collectives import packed_sizes, sends
from tensorshard.predict.search.model_facts import ModelFacts
from tensorshard.predict.search.question import Question
from tensorshard.predict.search.traces import BASE, Family, Trace, family_of, scaled_kernel_time
from tensorshard.predict.step_time import Active, sending_time, stage_actions, transfer_time

_UNEVEN = 0.7  # a stage's share of activations is at least this times that of equal stages
_COMPUTED_AGAIN = 0.9  # the share of a block's forward that is recomputed: its last operations are not needed
# Kernels that the Engine launches for each trained parameter, in addition to those of one rank. Gradients are packed
# for a reduction and unpacked (ZeRO 0 to 2), and added to those of earlier micro-batches.
_PACKING = 4
_ADDING = 1
# Passes over all gradients: to add those of a micro-batch; on CPU ranks, to sum what they receive; and under ZeRO 3, to
# unpack weights twice and to pack gradients.
_ADDED = 3
_SUMMED = 3
_COPIED = 6
_SUMS = 4  # collectives of a block along tp, if its attention and its MLP are split
_FEW = 8  # ranks of a schedule that stand for many
_PLAYED = 256  # a schedule is not simulated if its ranks times its micro-batches are more than this


@dataclass(frozen=True)
class Prediction:
    """What is known of a plan without its estimate.

    Args:
        memory: a lower bound for the bytes on the fullest rank's device. seconds: of a step, about.
        bubble, communication: the part of these seconds that is lost to each.
    """

    memory: int
    seconds: float
    bubble: float
    communication: float


@dataclass(frozen=True)
class _Moved:
    """Seconds of transfers: `seen` holds up a rank's step, `computed` is the rank's own computing for them."""

    seen: float = 0.0
    computed: float = 0.0

    def __add__(self, other: "_Moved") -> "_Moved":
        return _Moved(self.seen + other.seen, self.computed + other.computed)

    def __mul__(self, count: float) -> "_Moved":
        return _Moved(self.seen * count, self.computed * count)


@dataclass(frozen=True)
class _DataCollectives:
    """Seconds of all-gathers of weights, of reduce-scatters of gradients, and of sums of gradients over all ranks."""

    gathered: _Moved
    reduced: _Moved
    summed: _Moved


@dataclass
class Predictions:
    """Predicts plans from the traces that there are.

    Args:
        traces: by family; the trace of the family `BASE` is always there.
        facts: the facts of one forward; None if they are not known.
    """

    question: Question
    traces: Mapping[Family, Trace]
    facts: ModelFacts | None
    _sizes: dict[tuple[int, int, int], Counter[float]] = field(default_factory=dict)
    _collectives: dict[Hashable, _DataCollectives] = field(default_factory=dict)
    _again: dict[tuple[int, int, bool], float] = field(default_factory=dict)
    _tensor_collectives: dict[Hashable, _Moved] = field(default_factory=dict)

    def of(self, candidate: Candidate) -> Prediction:
        """The prediction for a plan."""
        return Prediction(self._memory(candidate), *self._seconds(candidate))

    def _nearest(self, plan: Plan) -> tuple[Trace, Family, int]:
        """The nearest trace to a plan, its family, and the number of tp ranks by which to divide its work."""
        tp, sequences, _ = family = family_of(plan)
        for known in (family, (tp, sequences, "none"), (tp, not sequences, "none")):
            if known in self.traces:
                return self.traces[known], known, 1
        return self.traces[BASE], BASE, tp

    def _memory(self, candidate: Candidate) -> int:
        plan = candidate.plan
        trace, known, split = self._nearest(plan)
        split *= plan.pp
        zero, shard = int(plan.zero), plan.dp_shard
        copies = 1.0 if plan.precision == "fp32" else 1 / 3  # of 6 bytes, 2 are the copy for computing
        base, largest = self.traces[BASE], self._largest(plan)  # which is in one of the stages
        width = 4 if plan.precision == "fp32" else 6
        parameters = whole = max(trace.parameters / split, base.gradients / 4 * largest * width)
        gathered = self._gathered(plan) if zero == 3 and shard > 1 else 0.0
        if zero == 3:
            parameters = parameters / shard + gathered
        elif zero and plan.precision != "fp32":
            parameters *= copies + (1 - copies) / shard
        gradients = max(trace.gradients / split, base.gradients * largest) / (shard if zero >= 2 else 1)
        optimizer = max(trace.optimizer / split, base.optimizer * largest) / (shard if zero >= 1 else 1)
        if plan.offloaded is not None:
            gradients, optimizer = 0.0, 0.0
            if not self.question.on_cpus:  # master weights are in the host's memory
                parameters = gathered if zero == 3 and shard > 1 else whole * copies
        activations = self._activations(plan, trace, known) * candidate.micro_batch / split
        if plan.pp > 1:
            times = plan.micro_batches / plan.pp
            activations *= _UNEVEN * plan.pp * _kept(plan.pp_schedule, plan.stages_per_rank, plan.pp, times)
        kept = gradients if plan.micro_batches > 1 else 0.0
        if plan.pp == 1 and known == family_of(plan):
            # The working memory of a step has a fixed part, and a part for each sample. So for fewer samples it shrinks
            # at most in proportion.
            activations = max(activations, trace.working * min(1.0, candidate.micro_batch / trace.samples))
        held = parameters + optimizer + max(gradients, kept + activations, gathered)  # gradients are of that size, too
        if self.question.on_cpus:
            return resident(int(held)) + self.question.hardware.context
        segments = -(-int(held) // SMALL_SEGMENT)  # an allocator reserves whole segments
        return max(1, segments) * SMALL_SEGMENT + self.question.hardware.context

    def _largest(self, plan: Plan) -> float:
        """The part of all trained elements that a rank with the largest parameter has of it."""
        return 0.0 if self.facts is None else self.facts.largest_share / plan.tp

    def _gathered(self, plan: Plan) -> float:
        """Bytes of the weights that ZeRO 3 gathers at once: at least those of a block, and the largest parameter."""
        if self.facts is None:
            return 0.0
        elements = self.traces[BASE].gradients / 4 * self._largest(plan)
        if plan.shard_units is None:
            elements = max(elements, self.facts.largest_block / plan.tp)
        return elements * (4 if plan.precision == "fp32" else 2)

    def _activations(self, plan: Plan, trace: Trace, known: Family) -> float:
        """A lower bound for the bytes of each sample, on the ranks of `trace`, whose family is `known`."""
        if known[2] == plan.recompute and (known == BASE or known[1] or not plan.sequence_parallel):
            return trace.activations / trace.samples
        if self.facts is None or plan.recompute == "none":
            return 0.0
        # A block that is recomputed keeps its inputs.
        width = 1.0 if plan.precision == "fp32" else 0.5
        return self.facts.block_outputs * width / self.facts.samples / (plan.tp if known[0] == plan.tp else 1)

    def kept_without_recomputation(self, candidate: Candidate) -> float:
        """Bytes of activations that a plan would keep without recomputation, as far as is known."""
        plan = candidate.plan
        plain = replace(plan, recompute="none")
        trace, known, split = self._nearest(plain)
        return self._activations(plain, trace, known) * candidate.micro_batch / split / plan.pp

    def _seconds(self, candidate: Candidate) -> tuple[float, float, float]:
        """Seconds of a step, of its bubble, and of waiting for communication."""
        plan, question = candidate.plan, self.question
        trace, known, split = self._nearest(plan)
        size, count = candidate.micro_batch, plan.micro_batches
        # Each tp rank computes the layers between split ones in full, unless sequences are split, too.
        others = split if plan.sequence_parallel else 2 * split / (split + 1)
        forward = trace.seconds(FORWARD, question, size, split, others)
        backward = trace.seconds(BACKWARD, question, size, split, others)
        if known[2] != plan.recompute:
            backward += self._computed_again(plan, size)
        along_tp = self._along_tp(trace, known, candidate)
        each = forward + backward + along_tp.seen  # of a micro-batch
        shares = self._shares(plan)
        work = each * count * max(shares)
        end, active = self._played(candidate, forward / each, each, shares)
        bubble = end - work
        launches = (self._launches(plan) + self._copies(plan)) / plan.pp
        work += launches
        shard = split * plan.pp * (plan.dp_shard if plan.zero else 1)
        update = trace.seconds(UPDATE, question, trace.samples, shard)
        windows = {FORWARD: forward * count / plan.pp, BACKWARD: backward * count / plan.pp}
        along_dp = self._along_dp(candidate, windows)
        offload = self._offload(plan, trace, split)
        actions = self._around_stages(plan)
        seconds = work + bubble + along_dp.seen + update + offload + actions
        computed = (forward + backward + along_tp.computed) * count / plan.pp
        busy = computed + launches + along_dp.computed + update + offload + actions
        on_cores = question.on_cores(seconds, busy * question.world_size, active)
        return on_cores, bubble, along_tp.seen * count / plan.pp + along_dp.seen

    def _shares(self, plan: Plan) -> tuple[float, ...]:
        """Each pipeline rank's share of a micro-batch's time."""
        if plan.pp == 1:
            return (1.0,)
        if self.facts is None or self.facts.stages is None:
            return (1 / plan.pp,) * plan.pp
        return self.facts.stages.shares(plan, self.question.rates)

    def _computed_again(self, plan: Plan, samples: int) -> float:
        """Seconds of recomputation for one micro-batch: of all kernels of the blocks, or, if it is selective, of those
        without products."""
        if self.facts is None:
            return 0.0
        full = plan.recompute == "full"
        key = (samples, plan.tp, full)
        if key not in self._again:
            share = samples / self.facts.samples / plan.tp
            self._again[key] = sum(
                scaled_kernel_time(kernel, self.question, share) * count
                for kernel, count in self.facts.kernels.items()
                if full or not kernel.flops
            )
        seconds = self._again[key]
        return _COMPUTED_AGAIN * seconds if full else seconds / 2

    def _along_tp(self, trace: Trace, known: Family, candidate: Candidate) -> "_Moved":
        """Seconds of tp's collectives for one micro-batch. Ranks wait for each of them."""
        plan, moved = candidate.plan, _Moved()
        if plan.tp == 1:
            return moved
        host = self.question.rates.host
        if known[0] == plan.tp:
            key = (known, _degrees(plan), candidate.micro_batch)
            if key in self._tensor_collectives:
                return self._tensor_collectives[key]
            share = candidate.micro_batch / trace.samples
            for transfer, count in trace.transfers:
                if transfer.collective != "receive":  # the rank receives while it sends
                    scaled = replace(transfer, nbytes=round(transfer.nbytes * share))
                    hops = (count / (plan.tp - 1)) if transfer.collective == "send" else count
                    moved += self._one(scaled, plan) * count + _both(host.split * hops if host else 0.0)
            self._tensor_collectives[key] = moved
            return moved
        if self.facts is None or not self.facts.blocks:
            return moved
        # A block has two pairs of split layers. The outputs of each pair are summed, and the gradients of its inputs.
        nbytes = self.facts.block_outputs / self.facts.blocks * candidate.micro_batch / self.facts.samples
        if plan.precision != "fp32":
            nbytes /= 2
        each = self._collective("all_reduce", "tp", nbytes, plan.tp, plan)
        return (each + _both(host.split if host else 0.0)) * (_SUMS * self.facts.blocks)

    def _along_dp(self, candidate: Candidate, windows: Mapping[str, float]) -> "_Moved":
        """Seconds of the data axes' collectives: those not hidden by kernels, and all that ranks compute for them."""
        plan = candidate.plan
        if plan.dp_size == 1:
            return _Moved()
        each = self._data_collectives(plan)
        times = plan.micro_batches if plan.zero == 3 else 1
        forward = each.gathered * times
        backward = each.reduced * (plan.micro_batches if int(plan.zero) >= 2 else 1) + each.summed
        backward += each.gathered * (times if plan.zero == 3 and plan.pp == 1 else 0)
        forward, backward = forward * (1 / plan.pp), backward * (1 / plan.pp)
        moved = forward + backward
        if not self.question.rates.asynchronous:
            return moved
        part = 1 if plan.zero == 3 else plan.micro_batches
        seen = max(0.0, forward.seen - windows[FORWARD] / part) + max(0.0, backward.seen - windows[BACKWARD] / part)
        return _Moved(seen, moved.computed)

    def _data_collectives(self, plan: Plan) -> "_DataCollectives":
        """The seconds of each kind of collective along the data axes, if all of them run once."""
        shard, replicate = plan.dp_shard, plan.dp_replicate
        key = (_degrees(plan), int(plan.zero), plan.precision)
        if key in self._collectives:
            return self._collectives[key]
        host = self.question.rates.host
        unit = _both(host.unit if host is not None and plan.zero == 3 else 0.0)
        gathered = reduced = summed = _Moved()
        for numel, count in self._messages(plan).items():
            gradients, weights = 4 * numel, numel * (4 if plan.precision == "fp32" else 2)
            if plan.zero == 0:
                summed += self._collective("all_reduce", "dp_shard", gradients, plan.dp_size, plan) * count
                continue
            gathered += (self._collective("all_gather", "dp_shard", weights, shard, plan) + unit) * count
            reduced += (self._collective("reduce_scatter", "dp_shard", gradients, shard, plan) + unit) * count
            if replicate > 1:
                each = self._collective("all_reduce", "dp_replicate", gradients / shard, replicate, plan)
                summed += (each + unit) * count
        found = self._collectives[key] = _DataCollectives(gathered, reduced, summed)
        return found

    def _around_stages(self, plan: Plan) -> float:
        """Seconds of the host's work around each forward and backward of a pipeline's stages, and in every step."""
        host = self.question.rates.host
        if host is None:
            return 0.0
        return host.step + stage_actions(plan) * host.action

    def _messages(self, plan: Plan) -> Counter[float]:
        """The sizes in elements of all messages along the data axes, without a pipeline, and how often each occurs."""
        if self.facts is None:
            return Counter([self.traces[BASE].gradients / 4 / plan.tp])
        key = (plan.tp, plan.dp_shard, int(plan.zero))
        if key not in self._sizes:
            width = 4 if plan.precision == "fp32" else 2
            self._sizes[key] = Counter(packed_sizes(self.facts.buckets, plan, width))
        return self._sizes[key]

    def _copies(self, plan: Plan) -> float:
        """Seconds of adding up gradients, and of packing and unpacking messages, without a pipeline."""
        trained = self.traces[BASE].gradients / plan.tp
        passes = 0.0
        if plan.zero != 3 or plan.dp_shard == 1:
            passes += _ADDED * (plan.micro_batches - 1)
        if plan.dp_size > 1:
            times = plan.micro_batches if int(plan.zero) >= 2 else 1
            passes += (_SUMMED if self.question.on_cpus else 0) * times
            passes += _COPIED * times if plan.zero == 3 else 0
        rates = self.question.rates
        low, high = rates.memory_efficiency
        return passes * trained / (rates.memory_bandwidth * (low * high) ** 0.5)

    def _collective(self, name: str, axis: str, nbytes: float, ranks: int, plan: Plan) -> "_Moved":
        """Seconds of one collective. CPU ranks make it out of sends."""
        if not self.question.on_cpus:
            return self._one(Transfer(BACKWARD, axis, name, int(nbytes), ranks), plan)
        count, each = sends(name, nbytes, ranks)
        # Several messages with gradients and weights are under way at once. Ranks wait for each collective along tp.
        transfer = Transfer(BACKWARD, axis, "send", int(each), ranks, overlaps=axis != "tp", part_of=name)
        return self._one(transfer, plan) * count

    def _one(self, transfer: Transfer, plan: Plan) -> "_Moved":
        """Seconds of one transfer. On CPU ranks, a collective counts as one send of all its bytes."""
        question = self.question
        if question.on_cpus and transfer.collective != "send":
            transfer = replace(transfer, collective="send", nbytes=int(transfer.sent))
        seconds = transfer_time(transfer, plan, question.world_size, question.rates)
        host = question.rates.host
        return _Moved(seconds, seconds if host is None else sending_time(transfer, host))

    def _offload(self, plan: Plan, trace: Trace, split: int) -> float:
        if plan.offloaded is None or plan.offloaded.optimizer is None:
            return 0.0
        states = 2 * trace.optimizer / split / plan.pp / (plan.dp_shard if plan.zero else 1)  # read and written
        rates = self.question.rates
        if plan.offloaded.optimizer == "disk" and rates.disk_bandwidth:
            return states * min(self.question.world_size, rates.devices_per_node) / rates.disk_bandwidth
        return states / rates.host_bandwidth

    def _played(
        self, candidate: Candidate, forward: float, each: float, shares: tuple[float, ...]
    ) -> tuple[float, Active]:
        """When the schedule is over, in seconds; and how many ranks are at work at once, in any unit of time.

        Args:
            forward: the share of forward in a micro-batch's time. each: that time. shares: each rank's share of it.
        """
        plan = candidate.plan
        if plan.pp == 1:
            return each * plan.micro_batches, ()
        if plan.pp * plan.micro_batches > _PLAYED:  # a formula; with backward in two halves, each half is a third
            parts = 3 if find_schedule(plan.pp_schedule).splits_backward else 1
            idle = (plan.pp - 1) / (parts * plan.stages_per_rank * plan.micro_batches)
            return each * plan.micro_batches * max(shares) * (1 + idle), ()
        message = 0.0
        if self.facts is not None and self.facts.stages is not None:
            nbytes = int(self.facts.stages.sent(plan) * candidate.micro_batch / (1 if plan.precision == "fp32" else 2))
            message = self._one(Transfer(FORWARD, "pp", "send", nbytes, 2), plan).seen
        split = may_split_backward(plan)
        length, active = _play(
            plan.pp_schedule, plan.stages_per_rank, plan.micro_batches, _coarse(forward), split, shares,
            _coarse(message / each),
        )  # fmt: skip
        copies = self.question.world_size // plan.pp
        return length * each, tuple((time, count * copies) for time, count in active)

    def _launches(self, plan: Plan) -> float:
        """Seconds of small kernels for each parameter, without a pipeline."""
        if self.facts is None or plan.zero == 3:
            return 0.0
        each = (_PACKING if plan.dp_size > 1 else 0) + _ADDING * (plan.micro_batches - 1)
        return each * self.facts.trained * self.question.rates.launch


def _degrees(plan: Plan) -> tuple[int, ...]:
    return tuple(getattr(plan, axis) for axis in AXES)


def _both(seconds: float) -> _Moved:
    """The host's own work around transfers: the rank computes, and its step is held up for as long."""
    return _Moved(seconds, seconds)


def _coarse(share: float) -> float:
    """`share` rounded to 2%. So more schedules are equal, and each is simulated once."""
    return round(share * 50) / 50


@cache
def _kept(schedule: str, stages: int, ranks: int, times: float) -> float:
    """The part of a micro-batch's activations that the rank with the most keeps, if all stages have equal ones. It is
    the same for many ranks as for a few, or a little more.

    Args:
        times: how many micro-batches there are for each rank.
    """
    from tensorshard.pipeline.run.draw_schedule import timeline

    if times < 1:  # as no schedule allows but gpipe, which keeps them all
        return times
    few = min(ranks, _FEW)
    played = timeline(schedule, ranks=few, stages_per_rank=stages, micro_batches=few * min(4, int(times)))
    return max(played.kept(rank) for rank in range(few)) / (few * stages)


@cache
def _play(
    schedule: str, stages: int, micro_batches: int, forward: float, split: bool, shares: tuple[float, ...],
    message: float,
) -> tuple[float, Active]:  # fmt: skip
    """The end of a schedule, and how many ranks are at work at once, in units of a micro-batch's time on one rank."""
    from tensorshard.pipeline.run.draw_schedule import timeline

    durations = []
    for share in shares:
        backward = (1 - forward) * share / stages
        inputs = backward / 2 if split else backward
        durations.append({"F": forward * share / stages, "B": backward, "I": inputs, "W": backward - inputs})
    played = timeline(
        schedule,
        ranks=len(shares),
        stages_per_rank=stages,
        micro_batches=micro_batches,
        durations=durations,
        message=message,
    )
    return played.length, played.active
