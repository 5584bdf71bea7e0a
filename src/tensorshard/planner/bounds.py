"""The least memory and the least time that a plan can take, from traces that were taken: no run is needed for them.

A bound is below what an estimate would say, so that a plan whose bound is worse than what was found need not be run.
What is left out is small: padding, buffers, kernels of reductions, uneven stages.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from tensorshard.engine.pipeline_step_runner import may_split_backward
from tensorshard.estimate.operations import BACKWARD, FORWARD, UPDATE, Transfer
from tensorshard.estimate.step_time import transfer_time
from tensorshard.plan import Plan
from tensorshard.planner.candidates import Candidate
from tensorshard.planner.model_facts import ModelFacts
from tensorshard.planner.question import Question
from tensorshard.planner.traces import BASE, Family, Trace, family_of, scaled_kernel_time
from tensorshard.schedules import find_schedule

_UNEVEN = 0.7  # a stage's share of activations, against that of stages that are alike
_COMPUTED_AGAIN = 0.9  # of a block's forward: its last operations need not be
# Kernels that the Engine launches for each trained parameter, beside those of one rank: gradients are packed for a
# reduction and unpacked (ZeRO 0 to 2), and added to those of earlier micro-batches.
_PACKING = 4
_ADDING = 1
_SEGMENT = 2 << 20  # bytes that torch's allocator takes from a device at once, at least
_PLAYED = 1024  # ranks times micro-batches of a schedule, above which it is not played through


@dataclass(frozen=True)
class Bound:
    """The least that a plan takes.

    Args:
        memory: bytes of the fullest rank's device. seconds: of a step.
        bubble, communication: seconds of these that are lost to them.
    """

    memory: int
    seconds: float
    bubble: float
    communication: float


@dataclass
class Bounds:
    """Bounds of plans, from the traces that there are.

    Args:
        traces: by family; that of one rank is always there.
        facts: of one forward; None if nothing is known of it.
    """

    question: Question
    traces: Mapping[Family, Trace]
    facts: ModelFacts | None

    def of(self, candidate: Candidate) -> Bound:
        """The bound of a plan."""
        return Bound(self._memory(candidate), *self._seconds(candidate))

    def _nearest(self, plan: Plan) -> tuple[Trace, Family, int]:
        """The trace that says the most of a plan, whose it is, and over how many tp ranks its work is still split."""
        tp, sequences, _ = family = family_of(plan)
        for known in (family, (tp, sequences, "none")):
            if known in self.traces:
                return self.traces[known], known, 1
        return self.traces[BASE], BASE, tp

    def _memory(self, candidate: Candidate) -> int:
        plan = candidate.plan
        trace, known, split = self._nearest(plan)
        split *= plan.pp
        zero, shard = int(plan.zero), plan.dp_shard
        copies = 1.0 if plan.precision == "fp32" else 1 / 3  # of 6 bytes, 2 are computed with
        parameters = trace.parameters / split
        if zero == 3:
            parameters /= shard
            if self.facts is not None and shard > 1 and plan.shard_units is None:  # a block's are gathered
                width = 4 if plan.precision == "fp32" else 2
                parameters += self.facts.largest_block * width / plan.tp
        elif zero and plan.precision != "fp32":
            parameters *= copies + (1 - copies) / shard
        gradients = trace.gradients / split / (shard if zero >= 2 else 1)
        optimizer = trace.optimizer / split / (shard if zero >= 1 else 1)
        if plan.offloaded is not None:
            gradients, optimizer = 0.0, 0.0
            if not self.question.on_cpus:  # masters are the host's
                parameters = 0.0 if zero == 3 and shard > 1 else trace.parameters / split * copies
        activations = 0.0
        if known[2] == plan.recompute:
            activations = trace.activations * candidate.micro_batch / trace.samples / split
            if plan.pp > 1:
                activations *= _UNEVEN * min(plan.micro_batches, plan.pp)
        kept = gradients if plan.micro_batches > 1 else 0.0
        held = parameters + optimizer + max(gradients, kept + activations)
        segments = -(-int(held) // _SEGMENT)  # what an allocator reserves
        return max(1, segments) * _SEGMENT + self.question.hardware.context

    def _seconds(self, candidate: Candidate) -> tuple[float, float, float]:
        """Of a step, of its bubble, and of communication that is waited for."""
        plan, question = candidate.plan, self.question
        trace, known, split = self._nearest(plan)
        size, count = candidate.micro_batch, plan.micro_batches
        forward = trace.seconds(FORWARD, question, size, split)
        backward = trace.seconds(BACKWARD, question, size, split)
        if known[2] != plan.recompute:
            backward += self._computed_again(plan, size)
        along_tp = self._along_tp(trace, known, candidate)
        work = (forward + backward + along_tp) * count / plan.pp
        bubble = (self._length(plan, forward / (forward + backward)) - 1) * work
        work += self._launches(plan) / plan.pp
        shard = split * plan.pp * (plan.dp_shard if plan.zero else 1)
        update = trace.seconds(UPDATE, question, trace.samples, shard)
        windows = {FORWARD: forward * count / plan.pp, BACKWARD: backward * count / plan.pp}
        seen, moved = self._along_dp(candidate, windows)
        offload = self._offload(plan, trace, split)
        seconds = work + bubble + seen + update + offload
        on_cores = question.on_cores(seconds, (work + moved + update + offload) * question.world_size)
        return on_cores, bubble, along_tp * count / plan.pp + seen

    def _computed_again(self, plan: Plan, samples: int) -> float:
        """Seconds of the blocks' forwards for one micro-batch: of all kernels, or of those without products."""
        if self.facts is None:
            return 0.0
        share = samples / self.facts.samples / plan.tp
        full = plan.recompute == "full"
        seconds = sum(
            scaled_kernel_time(kernel, self.question, share) * count
            for kernel, count in self.facts.kernels.items()
            if full or not kernel.flops
        )
        return _COMPUTED_AGAIN * seconds if full else seconds / 2

    def _along_tp(self, trace: Trace, known: Family, candidate: Candidate) -> float:
        """Seconds of tp's collectives for one micro-batch, which are waited for."""
        plan = candidate.plan
        if plan.tp == 1:
            return 0.0
        if known[0] == plan.tp:
            share = candidate.micro_batch / trace.samples
            return sum(
                self._time(replace(transfer, nbytes=round(transfer.nbytes * share)), plan) * count
                for transfer, count in trace.transfers
                if transfer.collective != "receive"  # it comes in while the rank sends
            )
        if self.facts is None or not self.facts.blocks:
            return 0.0
        # At least the output of each block is summed, and the gradient of its input.
        nbytes = self.facts.block_outputs / self.facts.blocks * candidate.micro_batch / self.facts.samples
        if plan.precision != "fp32":
            nbytes /= 2
        transfer = Transfer(FORWARD, "tp", "all_reduce", int(nbytes), plan.tp)
        return (2 * self.facts.blocks - 1) * self._time(transfer, plan)  # the first block's input may need none

    def _along_dp(self, candidate: Candidate, windows: Mapping[str, float]) -> tuple[float, float]:
        """Seconds of the data axes' collectives: what is seen of them beside kernels, and all of them."""
        plan = candidate.plan
        if plan.dp_size == 1:
            return 0.0, 0.0
        trained = self.traces[BASE].gradients / plan.tp / plan.pp
        shard, replicate = plan.dp_shard, plan.dp_replicate
        forward = backward = 0.0
        if plan.zero == 0:
            backward += self._time(Transfer(BACKWARD, "dp_shard", "all_reduce", int(trained), plan.dp_size), plan)
        else:
            weights = trained / (1 if plan.precision == "fp32" else 2)
            times = plan.micro_batches if plan.zero == 3 else 1
            gather = self._time(Transfer(FORWARD, "dp_shard", "all_gather", int(weights), shard), plan)
            reduce = self._time(Transfer(BACKWARD, "dp_shard", "reduce_scatter", int(trained), shard), plan)
            forward += gather * times
            backward += reduce * times + (gather * times if plan.zero == 3 and plan.pp == 1 else 0.0)
            if replicate > 1:
                among = Transfer(BACKWARD, "dp_replicate", "all_reduce", int(trained / shard), replicate)
                backward += self._time(among, plan)
        moved = forward + backward
        if not self.question.rates.asynchronous:
            return moved, moved
        part = 1 if plan.zero == 3 else plan.micro_batches
        seen = max(0.0, forward - windows[FORWARD] / part) + max(0.0, backward - windows[BACKWARD] / part)
        return seen, moved

    def _offload(self, plan: Plan, trace: Trace, split: int) -> float:
        if plan.offloaded is None or plan.offloaded.optimizer is None:
            return 0.0
        states = 2 * trace.optimizer / split / plan.pp / (plan.dp_shard if plan.zero else 1)  # read and written
        rates = self.question.rates
        if plan.offloaded.optimizer == "disk" and rates.disk_bandwidth:
            return states * min(self.question.world_size, rates.devices_per_node) / rates.disk_bandwidth
        return states / rates.host_bandwidth

    def _length(self, plan: Plan, forward: float) -> float:
        """How long the schedule takes, against a rank's own work, if stages are alike.

        Args:
            forward: its share of a micro-batch's time.
        """
        if plan.pp == 1:
            return 1.0
        if plan.pp * plan.micro_batches > _PLAYED:  # the schedules' own formulas, with a third for each half backward
            parts = 3 if find_schedule(plan.pp_schedule).splits_backward else 1
            return 1 + (plan.pp - 1) / (parts * plan.stages_per_rank * plan.micro_batches)
        share = round(forward, 2)
        split = may_split_backward(plan)
        return _played(plan.pp_schedule, plan.pp, plan.stages_per_rank, plan.micro_batches, share, split)

    def _launches(self, plan: Plan) -> float:
        """Seconds of small kernels for each parameter, of a model that is not cut."""
        if self.facts is None or plan.zero == 3:
            return 0.0
        each = (_PACKING if plan.dp_size > 1 else 0) + _ADDING * (plan.micro_batches - 1)
        return each * self.facts.trained * self.question.rates.launch

    def _time(self, transfer: Transfer, plan: Plan) -> float:
        """Seconds of a transfer. CPU ranks may send all of it at once."""
        if self.question.on_cpus and transfer.collective != "send":
            transfer = replace(transfer, collective="send", nbytes=int(transfer.sent))
        return transfer_time(transfer, plan, self.question.world_size, self.question.rates)


@cache
def _played(schedule: str, ranks: int, stages: int, micro_batches: int, forward: float, split: bool) -> float:
    """The length of a schedule, in units of what each rank computes."""
    from tensorshard.pipeline.run.draw_schedule import timeline

    each = stages * micro_batches
    backward = (1 - forward) / each
    inputs = backward / 2 if split else backward
    durations = {"F": forward / each, "B": backward, "I": inputs, "W": backward - inputs}
    return timeline(
        schedule, ranks=ranks, stages_per_rank=stages, micro_batches=micro_batches, durations=durations
    ).length  # fmt: skip
