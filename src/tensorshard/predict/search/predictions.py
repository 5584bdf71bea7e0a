"""Predicts a plan before its estimate: a lower bound of its memory, which prunes, and seconds, which order estimates.

Both are arithmetic on traces of one data rank, and know uneven stages once a pipeline was estimated. The bound leaves
out padding and buffers. Seconds send the weights of a block in one message.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from tensorshard.passes.precision import DTYPES
from tensorshard.pipeline.cut import cut_model
from tensorshard.pipeline.run.split_backward import may_split_backward
from tensorshard.pipeline.trace.call_graph import CallGraph
from tensorshard.plan.plan import Plan
from tensorshard.plan.schedules import find_schedule
from tensorshard.predict.operation_ledger import BACKWARD, FORWARD, UPDATE, Kernel, Transfer
from tensorshard.predict.rank_estimate import SMALL_SEGMENT, resident
from tensorshard.predict.search.candidates import Candidate
from tensorshard.predict.search.model_facts import ModelFacts
from tensorshard.predict.search.problem import SearchProblem
from tensorshard.predict.search.traces import BASE, Trace, TraceKey, scaled_kernel_time, trace_key
from tensorshard.predict.step_time import transfer_time

_OF_CUT = 0.95  # a rank takes at least this part of what the costs that the model is cut by say of it
_UNEVEN = 0.7  # a stage's share of activations is at least this times that of equal stages
_EVEN = 0.95  # the same, if a model has equal blocks, and as many of them in each stage
_NEEDED = 0.95  # the share of a trace's working memory that a plan with ZeRO needs: it keeps no whole gradients
_COMPUTED_AGAIN = 0.9  # the share of a block's forward that is recomputed: its last operations are not needed
_SUMS = 4  # collectives of a block along tp, if its attention and its MLP are split
_FEW = 8  # ranks of a schedule that stand for many
_SIMULATED = 256  # a schedule is not simulated if its ranks times its micro-batches are more than this
# Passes over all gradients in fp32, as estimates have them: to add those of a further micro-batch, under ZeRO 0 and 1,
# and under ZeRO 2 and 3; and under ZeRO 3, to unpack weights twice and to pack gradients. On CPU ranks also to sum what
# they receive.
_ADDED = {"fp32": (2.8, 0.6), "narrower": (1.6, 2.0)}
_COPIED = {"fp32": 11, "narrower": 5}
_SUMMED = 3
_UNPACKED = 0.3  # the share of ZeRO 3's passes that is in forward


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


@dataclass
class Predictions:
    """Predicts plans from the traces that there are.

    Args:
        traces: the trace of the key `BASE` is always there.
        facts: the facts of one forward; None if they are not known.
    """

    problem: SearchProblem
    traces: Mapping[TraceKey, Trace]
    facts: ModelFacts | None
    _recomputation: dict[tuple[int, int, bool], float] = field(default_factory=dict)
    _shares: dict[tuple[int, int, str], list[tuple[float, float, float]]] = field(default_factory=dict)

    def of(self, candidate: Candidate) -> Prediction:
        """The prediction for a plan."""
        return Prediction(self._memory(candidate), *self._seconds(candidate))

    def _nearest(self, plan: Plan) -> tuple[Trace, TraceKey, int, int]:
        """The nearest trace to a plan, its key, and the numbers of tp and of cp ranks by which to divide its work."""
        wanted = trace_key(plan)
        for ep, cp in dict.fromkeys((ep, cp) for ep in (wanted.ep, 1) for cp in (wanted.cp, 1)):
            same = wanted._replace(cp=cp, ep=ep)
            plain = same._replace(recompute="none")
            for key in (same, plain, plain._replace(sequence_parallel=not wanted.sequence_parallel)):
                if key in self.traces:
                    return self.traces[key], key, 1, wanted.cp // cp
        return self.traces[BASE], BASE, wanted.tp, wanted.cp

    # Memory: a lower bound.

    def _memory(self, candidate: Candidate) -> int:
        plan = candidate.plan
        trace, key, split, parts = self._nearest(plan)
        split *= plan.pp
        zero, shard = int(plan.zero), plan.shard_size
        gathered = self._gathered(plan) if zero == 3 and shard > 1 else 0.0

        def together(parameters: float, gradients: float, optimizer: float, activations: float) -> float:
            # Gradients of gathered parameters are of their size, too.
            kept = gradients if plan.micro_batches > 1 else 0.0
            return parameters + gathered + optimizer + max(gradients, kept + activations, gathered)

        activations = self._activations(plan, trace, key) * candidate.micro_batch / split / parts
        of_ranks = 0.0
        if plan.pp > 1:
            kept = _kept(plan.pp_schedule, plan.stages_per_rank, plan.pp, plan.micro_batches / plan.pp)
            even = self._states(plan, trace, key, split, largest=0.0)
            for rank, (of_states, of_activations, _) in enumerate(self._shares_of_ranks(plan)):
                held = _at(kept, rank / plan.pp) * plan.pp * activations * of_activations
                parameters, gradients, optimizer = (nbytes * of_states for nbytes in even)
                of_ranks = max(of_ranks, _OF_CUT * together(parameters, gradients, optimizer, held))
            activations *= self._least_share(plan) * plan.pp * max(kept)
        if plan.pp == 1 and key == trace_key(plan):
            # The working memory of a step has a fixed part, and a part for each sample. So for fewer samples it shrinks
            # at most in proportion.
            working = _NEEDED * trace.working * min(1.0, candidate.micro_batch / trace.samples)
            activations = max(activations, working)
        total = max(of_ranks, together(*self._states(plan, trace, key, split, self._largest(plan)), activations))
        if self.problem.on_cpus:
            return resident(int(total)) + self.problem.hardware.context_under(plan)
        segments = -(-int(total) // SMALL_SEGMENT)  # an allocator reserves whole segments
        return max(1, segments) * SMALL_SEGMENT + self.problem.hardware.context_under(plan)

    def _states(
        self, plan: Plan, trace: Trace, key: TraceKey, split: int, largest: float
    ) -> tuple[float, float, float]:
        """Bytes of parameters, gradients and optimizer states with equal stages, or of the largest parameter, which is
        in one of them. What ZeRO 3 gathers is not included.

        Args:
            trace, key: the nearest trace. split: over how many ranks its work is divided, those of pp included.
            largest: the part of all trained elements that a rank with the largest parameter has of it.
        """
        zero, shard, base = int(plan.zero), plan.shard_size, self.traces[BASE]
        copies = 1.0 if plan.precision == "fp32" else 1 / 3  # of 6 bytes, 2 are the copy for computing
        width = 4 if plan.precision == "fp32" else 6
        kept_here, kept_traced = self._kept_of_experts(plan.ep), self._kept_of_experts(key.ep)
        of_one = self._kept_of_experts(plan.ep, 2)  # of the largest parameter

        def held_of(traced: int, in_base: float, level: int) -> float:
            """Bytes of values that are sharded at ZeRO `level` and above."""
            if zero >= level:  # experts are sharded over fewer ranks, which have fewer of them
                return max(traced / kept_traced / split, in_base * largest) / shard
            return max(traced / kept_traced * kept_here / split, in_base * largest * of_one)

        of_parameters = trace.parameters, base.gradients / 4 * width
        unsharded, in_parts = held_of(*of_parameters, level=4), held_of(*of_parameters, level=min(zero, 1))
        parameters = unsharded
        if zero == 3:
            # Frozen 16-bit weights stay as they are; the trace is of ZeRO 0, which computes with them in fp32.
            narrow = self.facts.narrow if self.facts is not None and plan.precision == "fp32" else 0
            parameters = in_parts - narrow / split / shard
        elif zero and plan.precision != "fp32":
            parameters = unsharded * copies + in_parts * (1 - copies)
        gradients = held_of(trace.gradients, base.gradients, level=2)
        if zero == 1 and plan.micro_batches == 1 and plan.precision != "fp32":
            gradients /= 2  # those of a single micro-batch are reduced as they come
        optimizer = held_of(trace.optimizer, base.optimizer, level=1)
        if plan.offloaded is not None:
            gradients, optimizer = 0.0, 0.0
            if not self.problem.on_cpus:  # master weights are in the host's memory
                parameters = 0.0 if zero == 3 and shard > 1 else unsharded * copies
        return parameters, gradients, optimizer

    def _least_share(self, plan: Plan) -> float:
        """The activations of the rank that keeps the most, as a part of those with equal stages; at least."""
        blocks = 0 if self.facts is None else len(self.facts.equal_blocks)
        stages = plan.pp * plan.stages_per_rank
        return max(_UNEVEN, _EVEN * (blocks // stages) * stages / blocks) if blocks else _UNEVEN

    def _shares_of_ranks(self, plan: Plan) -> Sequence[tuple[float, float, float]]:
        """How many times what a rank has with equal stages each has: of parameters, of what is kept for backward, and
        of work. Nothing if no run is known by which a pipeline was cut."""
        graph = next((traced.graph for traced in (self.problem.shared.traced or {}).values()), None)
        if graph is None:
            return ()
        place = find_schedule(plan.pp_schedule).placement
        key = (plan.pp, plan.stages_per_rank, place)
        if key not in self._shares:
            self._shares[key] = _shares_of_ranks(graph, plan)
        return self._shares[key]

    def _kept_of_experts(self, ep: int, place: int = 0) -> float:
        """The part of the parameters that a rank has, if `ep` ranks share the experts. `place`: as in the facts."""
        return 1.0 if self.facts is None else 1 - self.facts.expert_share[place] * (1 - 1 / ep)

    def _largest(self, plan: Plan) -> float:
        """The part of all trained elements that a rank with the largest parameter has of it."""
        return 0.0 if self.facts is None else self.facts.largest_share / plan.tp

    def _gathered(self, plan: Plan) -> float:
        """Bytes of the weights that ZeRO 3 gathers at once: at least those of a block, and the largest parameter."""
        if self.facts is None:
            return 0.0
        elements = self.traces[BASE].gradients / 4 * self._largest(plan) * self._kept_of_experts(plan.ep, 2)
        if plan.shard_units is None:
            elements = max(elements, self.facts.largest_block / plan.tp * self._kept_of_experts(plan.ep, 1))
        return elements * (4 if plan.precision == "fp32" else 2)

    def _activations(self, plan: Plan, trace: Trace, key: TraceKey) -> float:
        """A lower bound for the bytes of each sample, on the ranks of `trace`, whose key is `key`."""
        if key.recompute == plan.recompute and (key == BASE or key.sequence_parallel or not plan.sequence_parallel):
            return trace.activations / trace.samples
        if self.facts is None or plan.recompute == "none":
            return 0.0
        # A block that is recomputed keeps its inputs.
        width = 1.0 if plan.precision == "fp32" else 0.5
        traced = (plan.tp if key.tp == plan.tp else 1) * (plan.cp if key.cp == plan.cp else 1)
        return self.facts.block_outputs * width / self.facts.samples / traced

    # Seconds.

    def _seconds(self, candidate: Candidate) -> tuple[float, float, float]:
        """Seconds of a step, of its bubble, and of waiting for communication."""
        plan, problem = candidate.plan, self.problem
        trace, key, split, parts = self._nearest(plan)
        size, count = candidate.micro_batch, plan.micro_batches
        # Each tp rank computes the layers between split ones in full, unless sequences are split, too.
        others = split if plan.sequence_parallel else 2 * split / (split + 1)
        forward = trace.seconds(FORWARD, problem, size, split * parts, others * parts)
        backward = trace.seconds(BACKWARD, problem, size, split * parts, others * parts)
        if key.recompute != plan.recompute:
            backward += self._recompute_seconds(plan, size)
        waiting = self._along_tp(trace, key, candidate, parts) + self._along_cp(trace, key, candidate)
        if key.ep == plan.ep > 1:  # before there is a trace, tokens are taken to travel in no time
            waiting += self._traced("ep", trace, candidate)
        per_batch = forward + backward + waiting  # of a micro-batch
        work = per_batch * count / plan.pp
        bubble = 0.0
        if plan.pp > 1:
            schedule = (plan.pp_schedule, plan.stages_per_rank, plan.pp, count)
            share = round(50 * forward / per_batch) / 50
            bubble = work * _bubble(*schedule, share, may_split_backward(plan))
            work *= max([1.0, *(_OF_CUT * of_work for *_, of_work in self._shares_of_ranks(plan))])
        passes = self._passes_over_gradients(plan) / plan.pp
        along_dp = self._along_dp(plan, forward / plan.pp, backward / plan.pp, passes)
        updated = 1.0 if plan.zero else self._kept_of_experts(plan.ep)
        shard = split * plan.pp * (plan.shard_size if plan.zero else 1) * self._kept_of_experts(key.ep) / updated
        update = trace.seconds(UPDATE, problem, trace.samples, shard) + self._offload(plan, trace, split)
        seconds = work + bubble + along_dp + update + passes
        return self.problem.on_cores(seconds, seconds - bubble), bubble, waiting * count / plan.pp + along_dp

    def _recompute_seconds(self, plan: Plan, samples: int) -> float:
        """Seconds of recomputation for one micro-batch: of all kernels of the blocks, or, if it is selective, of those
        without products."""
        if self.facts is None:
            return 0.0
        full = plan.recompute == "full"
        key = (samples, plan.tp * plan.cp, full)
        if key not in self._recomputation:
            share = samples / self.facts.samples / (plan.tp * plan.cp)
            self._recomputation[key] = sum(
                scaled_kernel_time(self._in_precision(kernel, plan), self.problem, share) * count
                for kernel, count in self.facts.kernels.items()
                if full or not kernel.flops
            )
        seconds = self._recomputation[key]
        return _COMPUTED_AGAIN * seconds if full else seconds / 2

    @staticmethod
    def _in_precision(kernel: Kernel, plan: Plan) -> Kernel:
        """A kernel of the facts, which are those of a forward in fp32, as it runs in the plan's precision."""
        if plan.precision == "fp32" or kernel.dtype != "float32":
            return kernel
        return replace(kernel, dtype=str(DTYPES[plan.precision]).removeprefix("torch."), nbytes=kernel.nbytes // 2)

    def _traced(self, axis: str, trace: Trace, candidate: Candidate, parts: int = 1) -> float:
        """Seconds of a trace's collectives along an axis for one micro-batch, if `parts` ranks share sequences."""
        share = candidate.micro_batch / trace.samples / parts
        return sum(
            self._transfer(replace(transfer, nbytes=round(transfer.nbytes * share)), candidate.plan) * count
            for transfer, count in trace.transfers
            if transfer.axis == axis and transfer.collective != "receive"  # the rank receives while it sends
        )

    def _along_cp(self, trace: Trace, key: TraceKey, candidate: Candidate) -> float:
        """Seconds of cp's exchanges for one micro-batch. Ranks wait for each of them."""
        plan = candidate.plan
        if key.cp == plan.cp:
            return self._traced("cp", trace, candidate)
        if self.facts is None:
            return 0.0
        # Keys and values are gathered, or they and queries go to and from the ranks of their heads; so in backward.
        share = candidate.micro_batch / self.facts.samples / plan.tp * (1.0 if plan.precision == "fp32" else 0.5)
        return sum(
            2 * self._transfer(Transfer(FORWARD, "cp", "all_to_all", int(nbytes * share), plan.cp), plan) * count
            for (queries, keys), count in self.facts.attention.items()
            for nbytes in [min(keys, (queries + keys) / plan.cp)]
        )

    def _along_tp(self, trace: Trace, key: TraceKey, candidate: Candidate, parts: int) -> float:
        """Seconds of tp's collectives for one micro-batch. Ranks wait for each of them."""
        plan = candidate.plan
        if plan.tp == 1:
            return 0.0
        if key.tp == plan.tp:
            return self._traced("tp", trace, candidate, parts)
        if self.facts is None or not self.facts.blocks:
            return 0.0
        # A block has two pairs of split layers. The outputs of each pair are summed, and the gradients of its inputs.
        nbytes = self.facts.block_outputs / self.facts.blocks / self.facts.samples / plan.cp * candidate.micro_batch
        nbytes *= 1.0 if plan.precision == "fp32" else 0.5
        per_sum = self._transfer(Transfer(FORWARD, "tp", "all_reduce", int(nbytes), plan.tp), plan)
        return per_sum * _SUMS * self.facts.blocks

    def _along_dp(self, plan: Plan, forward: float, backward: float, passes: float) -> float:
        """Seconds of the data axes' collectives that kernels do not hide.

        Args:
            forward, backward: seconds of a micro-batch's kernels on a rank.
            passes: seconds of a step's passes over all gradients.
        """
        ranks = plan.dp_size * plan.cp  # that reduce gradients
        if ranks == 1:
            return 0.0
        count, blocks = plan.micro_batches, 1 if self.facts is None else max(1, self.facts.blocks // plan.pp)
        gradients = self.traces[BASE].gradients * self._kept_of_experts(plan.ep) / plan.tp / plan.pp / blocks
        weights = gradients if plan.precision == "fp32" else gradients / 2

        def seconds(collective: str, axis: str, nbytes: float, ranks: int) -> float:
            return self._transfer(Transfer(BACKWARD, axis, collective, int(nbytes), ranks), plan) * blocks

        if plan.zero == 0:
            gathered, reduced = 0.0, seconds("all_reduce", "gradients", gradients, ranks)
        else:
            times = count if plan.zero == 3 else 1
            gathered = seconds("all_gather", "shard", weights, plan.shard_size) * times
            reduced = seconds("reduce_scatter", "shard", gradients, plan.shard_size)
            reduced *= count if int(plan.zero) >= 2 else 1
            reduced += gathered * self._in_blocks if plan.zero == 3 and plan.pp == 1 else 0.0
            if plan.dp_replicate > 1:
                replicas = seconds("all_reduce", "dp_replicate", gradients / plan.shard_size, plan.dp_replicate)
                reduced += replicas * (count if plan.zero == 2 else 1)
        if not self.problem.rates.asynchronous:
            return gathered + reduced
        # Of ZeRO 3 the kernels of all micro-batches run beside the transfers, and of ZeRO 2 those of every backward.
        forward *= count if plan.zero == 3 else 1
        backward *= count if int(plan.zero) >= 2 else 1
        if plan.zero == 3:
            forward, backward = forward + _UNPACKED * passes, backward + (1 - _UNPACKED) * passes
        return max(0.0, gathered - forward) + max(0.0, reduced - backward)

    @property
    def _in_blocks(self) -> float:
        """The part of all weights that is in blocks: ZeRO 3 keeps those around them from forward to backward."""
        if self.facts is None or not self.facts.blocks:
            return 1.0
        return min(1.0, 4 * self.facts.largest_block * self.facts.blocks / self.traces[BASE].gradients)

    def _passes_over_gradients(self, plan: Plan) -> float:
        """Seconds of adding up gradients, and of packing and unpacking messages, without a pipeline."""
        kind = "fp32" if plan.precision == "fp32" else "narrower"
        passes = _ADDED[kind][int(plan.zero) >= 2 and plan.shard_size > 1] * (plan.micro_batches - 1)
        if plan.dp_size * plan.cp > 1:
            times = plan.micro_batches if int(plan.zero) >= 2 else 1
            passes += (_SUMMED if self.problem.on_cpus else 0) * times
            passes += _COPIED[kind] * times if plan.zero == 3 and plan.shard_size > 1 else 0
        rates = self.problem.rates
        low, high = rates.memory_efficiency
        passes *= self._kept_of_experts(plan.ep)
        return passes * self.traces[BASE].gradients / plan.tp / (rates.memory_bandwidth * (low * high) ** 0.5)

    def _transfer(self, transfer: Transfer, plan: Plan) -> float:
        return transfer_time(transfer, plan, self.problem.world_size, self.problem.rates)

    def _offload(self, plan: Plan, trace: Trace, split: int) -> float:
        if plan.offloaded is None or plan.offloaded.optimizer is None:
            return 0.0
        states = 2 * trace.optimizer / split / plan.pp / (plan.shard_size if plan.zero else 1)  # read and written
        rates = self.problem.rates
        if plan.offloaded.optimizer == "disk" and rates.disk_bandwidth:
            return states * min(self.problem.world_size, rates.devices_per_node) / rates.disk_bandwidth
        return states / rates.host_bandwidth


@cache
def _bubble(schedule: str, stages: int, ranks: int, micro_batches: int, forward: float, split: bool) -> float:
    """How long a rank waits in a schedule, as a share of its own work, if all stages are equal.

    Args:
        forward: the share of forward in a micro-batch's time. split: whether backward runs in two halves.
    """
    if ranks * micro_batches > _SIMULATED:  # with backward in two halves, each is a third
        return (ranks - 1) / ((3 if split else 1) * stages * micro_batches)
    from tensorshard.pipeline.run.draw_schedule import timeline

    backward = 1 - forward
    inputs = backward / 2 if split else backward
    durations = [{"F": forward, "B": backward, "I": inputs, "W": backward - inputs}] * ranks
    simulated = timeline(
        schedule, ranks=ranks, stages_per_rank=stages, micro_batches=micro_batches, durations=durations
    )
    return simulated.length / (micro_batches * stages) - 1


@cache
def _kept(schedule: str, stages: int, ranks: int, times: float) -> tuple[float, ...]:
    """The parts of a micro-batch's activations that ranks keep at most, from the first rank to the last, if all stages
    have equal ones. A few ranks stand for many: the part of the first one is the same, or a little more.

    Args:
        times: how many micro-batches there are for each rank.
    """
    from tensorshard.pipeline.run.draw_schedule import kept_by_ranks

    if times < 1:  # as no schedule allows but gpipe, which keeps them all
        return (times,) * min(ranks, _FEW)
    few = min(ranks, _FEW)
    # With several stages a rank, schedules take micro-batches in rounds: longer ones where ranks do not divide them.
    rounds, of_round = min(4, int(times)), int(few * times / int(times))
    by_rank = kept_by_ranks(schedule, ranks=few, stages_per_rank=stages, micro_batches=rounds * of_round)
    return tuple(most / (few * stages) for most in by_rank)


def _at(kept: Sequence[float], place: float) -> float:
    """What :func:`_kept` says of the rank with so many of all before it."""
    before, further = divmod(place * len(kept), 1)
    first, second = kept[int(before)], kept[min(int(before) + 1, len(kept) - 1)]
    return first + (second - first) * further


def _shares_of_ranks(graph: CallGraph, plan: Plan) -> list[tuple[float, float, float]]:
    """What :meth:`Predictions._shares_of_ranks` says, by the cut of the calls of `graph`; nothing if it has none."""
    try:
        cut = cut_model(graph, plan.pp * plan.stages_per_rank, split=plan.pp_split)
    except ValueError:
        return []
    parameters, kept, work = [0.0] * plan.pp, [0.0] * plan.pp, [0.0] * plan.pp
    for stage, (start, stop) in enumerate(cut.spans):
        rank = find_schedule(plan.pp_schedule).rank_of(stage, plan.pp)
        parameters[rank] += graph.parameter_bytes(start, stop)
        kept[rank] += sum(call.saved_bytes for call in graph.calls[start:stop])
        work[rank] += sum(call.flops for call in graph.calls[start:stop])
    totals = sum(graph.bytes_of.values()), sum(kept), sum(work)
    each = [total / plan.pp or 1.0 for total in totals]  # with equal stages
    return [(p / each[0], k / each[1], w / each[2]) for p, k, w in zip(parameters, kept, work, strict=True)]
