"""`estimate`: a plan's memory on every distinct rank, found by running the Engine itself on fake tensors."""

import gc
import logging
import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.comm.forked import run_at_once
from tensorshard.common.progress import say
from tensorshard.common.words import span_words
from tensorshard.engine.engine import Engine
from tensorshard.engine.loss_terms import takes_model
from tensorshard.engine.optimizer import OptimizerFactory
from tensorshard.host.memory import cores_here
from tensorshard.model.batches import batch_size
from tensorshard.model.fake_copies import make_fake_copy
from tensorshard.model.tensors import map_tensors_once, tensor_leaves
from tensorshard.model.transformers_settings import NotPacked
from tensorshard.parallelize.build import build_engine
from tensorshard.parallelize.part import Decisions
from tensorshard.parallelize.stages import key_of_run
from tensorshard.pipeline.cut import cut_model
from tensorshard.pipeline.trace.call_graph import CallGraph
from tensorshard.plan.field_checks import check_choice, size_in_bytes
from tensorshard.plan.plan import AXES, Plan
from tensorshard.plan.schedules import find_schedule
from tensorshard.predict.describe import offload_lines, rank_lines, stage_lines, tensor_lines, time_lines, verdict
from tensorshard.predict.hardware import ASSUMED_CPU, Hardware, find_hardware
from tensorshard.predict.operation_ledger import BACKWARD, UPDATE, OperationLedger, Operations, Transfer
from tensorshard.predict.page import Side, page, picture
from tensorshard.predict.rank_estimate import RankEstimate, summarize
from tensorshard.predict.step_time import StepTime, step_time
from tensorshard.predict.watched_steps import watch_steps
from tensorshard.torch_private.fake_results import QuickFakeTensorMode
from tensorshard.torch_private.fake_tensors import (
    grouped_products_of_any_dtype,
    without_fake_kernel_reports,
)
from tensorshard.torch_private.process_groups import fake_world
from tensorshard.weights.files.pretrained_model import without_files

logger = logging.getLogger("tensorshard")

REFUSALS = (ValueError, NotImplementedError, RuntimeError)
"""The errors of a plan that does not suit the model: a refusal, or what the model's own forward raises under it."""

_DOUBT_OF_ASSUMED = 5.0  # a machine may be faster or slower than the one that is assumed by this factor
_RANKS_HERE = "LOCAL_WORLD_SIZE"
_BACKENDS = {"cuda": "fake", "cpu": "gloo"}  # an NCCL collective is one call, like one of a fake group

_NOTES = (
    "bytes of live tensors in two steps of the Engine on fake tensors, one rank of each stage; what kernels take for "
    "themselves is not in it",
    "reserved bytes are those of a model of torch's caching allocator for CUDA, and are not validated; of CPU ranks, "
    "those of live tensors and a margin; on the device, the context is added, which is assumed",
)


@dataclass(frozen=True)
class Estimate:
    """The memory that a plan takes.

    Args:
        plan: with every axis set.
        ranks: one for each pipeline rank: the one with the largest shards.
        hardware: the hardware of the estimate; None without.
        global_batch: samples of a step.
        complete: whether every distinct rank was run. If not, one of `ranks` takes more than the limit that was given.
    """

    plan: Plan
    world_size: int
    ranks: list[RankEstimate]
    hardware: Hardware | None = None
    global_batch: int | None = None
    complete: bool = True

    @cached_property
    def step_time(self) -> StepTime | None:
        """Seconds of a step on the hardware, with a low and a high bound; None without hardware whose speed is known,
        or if not every rank was run.

        Times are a roofline's. They order plans; ``tensorshard plan --measure`` measures.
        """
        if self.hardware is None or self.hardware.rates is None or not self.complete:
            return None
        return step_time(self.ranks, self.plan, self.world_size, self.hardware.rates)

    @property
    def step_seconds(self) -> float | None:
        """The middle of :attr:`step_time`. On this machine's CPU, ranks that share a core also wait for it."""
        time, hardware = self.step_time, self.hardware
        if time is None or hardware is None:
            return None
        return time.on_cores(cores_here()) if hardware.shares_cores else time.seconds

    @property
    def step_span(self) -> tuple[float, float] | None:
        """The low and the high bound of :attr:`step_seconds`; None as for :attr:`step_time`."""
        time, middle = self.step_time, self.step_seconds
        if time is None or middle is None or self.hardware is None:
            return None
        doubt = _DOUBT_OF_ASSUMED if self.hardware.name == ASSUMED_CPU else 1.0
        return time.low * middle / time.seconds / doubt, time.high * middle / time.seconds * doubt

    def time_words(self, seconds: float | None = None) -> str:
        """Seconds of a step and their bounds, as text; "" as for :attr:`step_time`.

        Args:
            seconds: the middle, if it was corrected by what was measured; by default :attr:`step_seconds`.
        """
        if self.step_seconds is None or self.step_span is None:
            return ""
        factor = 1.0 if seconds is None else seconds / self.step_seconds
        low, high = self.step_span
        return span_words(self.step_seconds * factor, (low * factor, high * factor))

    @property
    def model_flops(self) -> int:
        """Floating-point operations of a step on all ranks together: those of matrix products, convolutions and
        attention, counted as they run, without what recomputation computes again."""
        return sum(self._flops_by_type().values())

    @property
    def peak_flops(self) -> float | None:
        """Floating-point operations a second of all devices together at their peak, for the types that
        :attr:`model_flops` are computed in. ``model_flops / seconds / peak_flops`` is the MFU of a step. None where the
        hardware's speed is not known, or assumed."""
        hardware, by_type = self.hardware, self._flops_by_type()
        if hardware is None or hardware.rates is None or hardware.name == ASSUMED_CPU or not any(by_type.values()):
            return None
        seconds = sum(flops / hardware.rates.peak(dtype) for dtype, flops in by_type.items())
        devices = min(self.world_size, cores_here()) if hardware.shares_cores else self.world_size
        return devices * self.model_flops / seconds

    def _flops_by_type(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for rank in self.ranks:
            for dtype, flops in rank.operations.flops_by_type().items():
                counts[dtype] += flops * (self.world_size // len(self.ranks))
        return counts

    @property
    def time_by_category(self) -> dict[str, float] | None:
        """Seconds of a step, by what they are spent on; None as for :attr:`step_time`.

        These are "compute", "exposed communication", "bubble", "optimizer" and "offload".
        """
        return None if self.step_time is None else self.step_time.by_category

    @property
    def samples_per_second(self) -> float | None:
        """Samples of all data ranks in a second; None as for :attr:`step_time`."""
        if self.step_time is None or self.global_batch is None:
            return None
        return self.global_batch / self.step_time.seconds

    @property
    def largest(self) -> RankEstimate:
        """The rank that takes the most memory."""
        return max(self.ranks, key=lambda rank: rank.peak_device)

    @property
    def peaks(self) -> list[int]:
        """Bytes of live tensors at the peak, for each rank of the world: the peak of its stage."""
        return [rank.peak_allocated for rank in self.of_each_rank]

    @property
    def of_each_rank(self) -> list[RankEstimate]:
        """For each rank of the world the one of ``ranks`` that stands for it: that of its stage."""
        return [rank for rank in self.ranks for _ in range(self.world_size // len(self.ranks))]

    def fits(self, memory: int | str | None = None) -> bool:
        """Whether every rank fits.

        Args:
            memory: bytes of a device, or text such as "24GiB"; by default that of the hardware.

        Raises:
            ValueError: no memory was given, and the hardware is not known.
        """
        return self.largest.peak_device <= self._memory(memory)

    def verdict(self, memory: int | str | None = None) -> str:
        """One line: whether it fits, and by how much. Arguments and errors as for :meth:`fits`."""
        device = self.hardware.name if self.hardware is not None and memory is None else ""
        return verdict(self.largest.peak_device, self._memory(memory), device)

    def describe(self, memory: int | str | None = None) -> str:
        """Whether it fits and by how much, what each distinct rank holds at its peak, and the largest tensors there.

        Lines have at most 80 columns, apart from those of the plan.
        """
        largest = self.largest
        lines = []
        if memory is not None or self.hardware is not None:
            lines += [self.verdict(memory), ""]
        lines += [self.plan.describe(), ""]
        if len(self.ranks) > 1:
            lines += [*stage_lines(self.ranks), ""]
        lines += [*rank_lines(largest), "", "largest tensors then:", *tensor_lines(largest.largest)]
        lines += offload_lines(largest)
        if self.step_time is not None and self.hardware is not None:
            lines += ["", *time_lines(self.step_time, self.samples_per_second, measured=self.hardware.is_measured)]
        return "\n".join(lines)

    def side(self) -> Side:
        """The estimate as a column of a page."""
        return Side("estimated", self.ranks, _NOTES)

    def to_html(self, path: str | Path, memory: int | str | None = None) -> None:
        """Writes a page that needs nothing else: memory over the steps by category, the mesh, the schedule.

        Args:
            memory: as for :meth:`fits`; if neither is known, the page does not say whether the plan fits.
        """
        verdict = ""
        if memory is not None or self.hardware is not None:
            verdict = self.verdict(memory)
        Path(path).write_text(page(self.plan, self.world_size, [self.side()], verdict), encoding="utf-8")

    def _repr_svg_(self) -> str:
        """What a notebook shows: the memory of the fullest rank over two steps."""
        return picture("estimated", self.largest)

    def _memory(self, memory: int | str | None) -> int:
        if memory is not None:
            return size_in_bytes("memory", memory)
        if self.hardware is None:
            raise ValueError("no memory was given: pass memory='24GiB', or estimate(hardware='a100-80')")
        return self.hardware.memory


def estimate(
    model: nn.Module | Callable[[], nn.Module],
    plan: Plan,
    *,
    world_size: int,
    inputs: Any,
    targets: Any,
    optimizer: OptimizerFactory,
    loss_fn: Callable[[Any, Any], Any],
    hardware: str | Hardware | None = None,
    device: str | None = None,
    decisions: Decisions | None = None,
    stop_above: int | None = None,
) -> Estimate:
    """How much memory a plan takes on each rank, and how long a step takes, without the hardware.

    The Engine itself takes two steps on fake tensors, which have shapes and no memory, as each distinct rank in turn.
    Nothing is computed, and no weights are allocated. Operations are those of CPU ranks. Memory that a kernel
    allocates inside itself is not counted.

    Args:
        model: as for :func:`tensorshard.parallelize`; a module is copied, and left as it is. Files of weights are not
            opened.
        world_size: the number of ranks.
        inputs, targets: one data rank's batch, as for :meth:`Engine.step`; only shapes and types matter. For a
            ``loss_fn(model, batch)``: the batch, and None.
        optimizer, loss_fn: as for :func:`tensorshard.parallelize`.
        hardware: a name such as "a100-80", or a :class:`Hardware`; without it there is no time, and no limit to fit.
        device: what the ranks compute on: "cuda" or "cpu". Collectives of CPU ranks also hold what they receive. None:
            "cpu" if the hardware is a machine without GPUs, else "cuda".
        decisions: those of an earlier estimate of this model, to save time. Those of this one are added to them.
        stop_above: bytes of a device. The estimate ends at the first rank that takes more, and is not complete then.
            The ranks of a pipeline that are likely to take the most are run first. Of many ranks with stages that are
            built the same, the one that keeps the most micro-batches is run and stands for the rest. None to run all.

    Raises:
        ValueError: the plan does not suit the model or the number of ranks; or the hardware is unknown (the error
            lists the names).
        RuntimeError: this process is in a process group already.

    Examples:
        >>> adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
        >>> build = functools.partial(torch.nn.Linear, 1024, 1024)
        >>> batch = torch.zeros(8, 1024)  # only shapes and types matter
        >>> estimate = ts.estimate(build, ts.Plan(zero=3), world_size=4, inputs=batch, targets=batch,
        ...                        optimizer=adamw, loss_fn=torch.nn.functional.mse_loss, hardware="a100-80")
        >>> estimate.fits("1GiB"), estimate.largest.peak_allocated < 2**25
        (True, True)
    """
    profile = find_hardware(hardware)
    if device is None:
        device = "cpu" if profile is not None and profile.is_cpu else "cuda"
    check_choice("device", device, tuple(_BACKENDS))
    resolved = plan.resolve(world_size)
    model = without_files(model)
    if dist.is_initialized():
        raise RuntimeError(
            "estimate was called in a process that is in a process group already; call it before parallelize, or in "
            "a separate process"
        )
    ranks_here = world_size
    if profile is not None and profile.rates is not None:
        ranks_here = min(world_size, profile.rates.devices_per_node)
    device_bytes = profile.context_under(resolved) if profile is not None else 0
    tried = replace(resolved, micro_batches=enough_micro_batches(resolved, inputs, targets))
    size = batch_size(inputs)
    samples = size * tried.micro_batches // resolved.micro_batches
    decisions = Decisions() if decisions is None else decisions
    first_ranks = list(_first_ranks(resolved))
    if resolved.pp > 1:  # importing torch's schedules makes a tensor, which must not be a fake one
        find_schedule(resolved.pp_schedule).torch_class()

    def estimated(stage: int) -> RankEstimate:
        rank = first_ranks[stage]
        stage_words = f", stage {stage} of {len(first_ranks)}" if len(first_ranks) > 1 else ""
        say(f"two steps of rank {rank} on fake tensors{stage_words}")
        with (
            _quiet(),
            without_fake_kernel_reports(),
            _young_garbage(),
            _ranks_of_a_node(ranks_here),
            fake_world(rank, world_size, _BACKENDS[device]),
            grouped_products_of_any_dtype(),
            NotPacked(inputs) as rows,
            QuickFakeTensorMode() as fake,
        ):

            def build() -> Engine:
                ours = make_fake_copy(model, fake, torch.device("cpu")) if isinstance(model, nn.Module) else model
                return build_engine(
                    rows.building(ours),
                    tried,
                    optimizer=optimizer,
                    loss_fn=loss_fn,
                    sample_inputs=sample_inputs,
                    decisions=decisions,
                    off_device=device != "cpu",
                )

            def batch() -> tuple[Any, Any]:
                made = map_tensors_once(lambda t: torch.empty(t.shape, dtype=t.dtype), [inputs, targets])
                return first_samples(made[0], size, samples), first_samples(made[1], size, samples)

            counter = OperationLedger()
            ledger, known, engine = watch_steps(build, batch, counter)
            operations = scaled(counter.operations(engine.mesh, resolved), resolved, tried.micro_batches)
            # A CPU rank's device memory is the host's, which also holds what is offloaded to it.
            offloaded = engine.storage.held("host memory") if device == "cpu" else 0
            return summarize(
                ledger,
                known,
                rank=rank,
                stage=stage,
                device_bytes=device_bytes + offloaded,
                operations=operations,
                storage=engine.storage,
                on_host=device == "cpu",
            )

    sample_inputs = None if takes_model(loss_fn) else inputs
    order = _fullest_first(len(first_ranks))
    # A table is searched for on real blocks, and the model's constructor run, by the first rank for all.
    is_built = isinstance(model, nn.Module) or decisions.recorded is not None
    is_split = (resolved.tp == 1 or decisions.table is not None) and resolved.ep in (1, *decisions.experts)
    alone = 0 if is_built and is_split else 1
    run = None
    traced = {} if decisions.traced is None else decisions.traced
    splits_backward = find_schedule(resolved.pp_schedule).splits_backward  # then what ranks hold differs in more ways
    if stop_above is not None and resolved.pp >= _MANY and decisions.traced is not None and not splits_backward:
        run = key_of_run(resolved, 0, sample_inputs)
        alone = alone if run in traced else 1  # the first rank runs the model, from which it is cut

    def representatives() -> list[int]:
        return _representatives(traced[run].graph, tried) if run in traced else list(range(resolved.pp))

    ranks = _run_ranks(estimated, order, alone, representatives, stop_above)
    ranks = [replace(one, rank=first_ranks[one.stage]) for one in ranks]
    complete = len(ranks) == len(first_ranks)
    return Estimate(resolved, world_size, ranks, profile, size * resolved.dp_size, complete)


def _run_ranks(
    estimated: Callable[[int], RankEstimate],
    order: list[int],
    alone: int,
    representatives: Callable[[], list[int]],
    stop_above: int | None,
) -> list[RankEstimate]:
    """The estimates of a pipeline's ranks, by their places.

    Args:
        order: in which they are run. alone: how many are run before all others.
        representatives: called once two are run: for each rank the one that stands for it.
        stop_above: as for :func:`estimate`.
    """
    stands_for: list[int] = []

    def parts() -> Iterator[list[int]]:
        yield order[:alone]
        if stop_above is None:
            yield order[alone:]
            return
        # The two ends take the most memory. If one takes too much, the others need not be run.
        yield order[alone : alone + 2]
        stands_for.extend(representatives())
        yield [stage for stage in order[alone + 2 :] if stands_for[stage] == stage]

    ranks: dict[int, RankEstimate] = {}
    for rank in chain.from_iterable(run_at_once([partial(estimated, one) for one in some]) for some in parts()):
        ranks[rank.stage] = rank
        if stop_above is not None and rank.peak_device > stop_above:
            break
    else:
        ranks |= {stage: replace(ranks[run], stage=stage) for stage, run in enumerate(stands_for) if stage not in ranks}
    return [ranks[stage] for stage in sorted(ranks)]


_MANY = 16  # ranks of a pipeline; of so many not all are run in a search


def _representatives(graph: CallGraph, plan: Plan) -> list[int]:
    """For each pipeline rank, the one whose stages do as much in the same calls and that keeps the most micro-batches.

    The two ends stand for themselves alone.
    """
    cut = cut_model(graph, plan.pp * plan.stages_per_rank, split=plan.pp_split)
    schedule, kept = find_schedule(plan.pp_schedule), _kept_by_ranks(plan)
    does: list[list[Any]] = [[] for _ in range(plan.pp)]
    for stage, (start, stop) in enumerate(cut.spans):
        calls = graph.calls[start:stop]
        one_by_one = tuple((c.flops, c.written_bytes, c.saved_bytes, c.specs) for c in calls)
        sizes = sorted(graph.bytes_of[name] for name in cut.parameters(stage))
        shared = sorted(cut.shared.keys() & cut.parameters(stage))
        crossing = cut.received_specs(stage), cut.sent_specs(stage)
        does[schedule.rank_of(stage, plan.pp)].append((one_by_one, sizes, shared, crossing))
    between = range(1, plan.pp - 1)

    def representative(rank: int) -> int:
        return max((other for other in between if does[other] == does[rank]), key=lambda other: (kept[other], -other))

    return [0, *map(representative, between), plan.pp - 1]


def _kept_by_ranks(plan: Plan) -> list[int]:
    from tensorshard.pipeline.run.draw_schedule import kept_by_ranks

    return kept_by_ranks(
        plan.pp_schedule, ranks=plan.pp, stages_per_rank=plan.stages_per_rank, micro_batches=plan.micro_batches
    )


def _first_ranks(plan: Plan) -> Iterator[int]:
    """The first rank of each pipeline stage, which has the largest shards."""
    within = 1
    for axis in AXES[1:]:
        within *= getattr(plan, axis)
    yield from range(0, plan.pp * within, within)


def _fullest_first(stages: int) -> list[int]:
    """The first and the last stage, then the others. The first keeps the most micro-batches, the last has the model's
    output."""
    return sorted(range(stages), key=lambda stage: (stage not in (0, stages - 1), stage))


@contextmanager
def _young_garbage() -> Iterator[None]:
    """Inside, garbage collection looks only at new objects: going through all others takes longer than a step."""
    if gc.get_freeze_count():  # others have frozen objects, which `unfreeze` would thaw
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _quiet() -> Iterator[None]:
    """Inside, what the Engine logs about itself is not shown."""
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def _ranks_of_a_node(count: int) -> Iterator[None]:
    """Inside, `count` ranks share a host, and each may use its part of the host's memory."""
    before = os.environ.get(_RANKS_HERE)
    os.environ[_RANKS_HERE] = str(count)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_RANKS_HERE]
        else:
            os.environ[_RANKS_HERE] = before


_ROUNDS = 4  # a schedule that keeps a bounded number of micro-batches reaches it in so many rounds over the ranks
_ALONE = 3  # without a pipeline: the first makes gradients, the last has them reduced, and all others are alike


def enough_micro_batches(plan: Plan, inputs: Any, targets: Any) -> int:
    """The fewest micro-batches that take the same memory as those of a resolved `plan`.

    Without a pipeline three are enough. In a pipeline, each rank must keep the activations of as many at once as it
    does with all of them.
    """
    every = plan.micro_batches
    size = batch_size(inputs)
    if every <= _ALONE or size % every or not _divides(inputs, size) or not _divides(targets, size):
        return every
    if plan.pp == 1:
        return _ALONE
    wanted = _kept_by_ranks(plan)

    def keeps_as_many(count: int) -> bool:
        with suppress(ValueError):  # the schedule does not take so many
            return _kept_by_ranks(replace(plan, micro_batches=count)) == wanted
        return False

    # Looped schedules take whole rounds over the ranks.
    rounds = range(2 * plan.pp, min(every, _ROUNDS * plan.pp + 1), plan.pp)
    most = next(filter(keeps_as_many, rounds), every)
    fewer = range(max(plan.pp + 2, most - plan.pp + 1), most)
    place = bisect_left(fewer, True, key=keeps_as_many)
    return fewer[place] if place < len(fewer) else most


def first_samples(tree: Any, size: int, count: int) -> Any:
    """The first `count` of `size` samples, as views: the memory of all of them stays."""
    return map_tensors_once(lambda tensor: tensor[:count] if tensor.dim() and count < size else tensor, tree)


def scaled(operations: Operations, plan: Plan, run: int) -> Operations:
    """The operations of a step of the plan, from those of a step with `run` of its micro-batches.

    Forward and backward run for each micro-batch. Gradients are reduced once, under ZeRO 2 for each micro-batch, and
    under ZeRO 3 over shards for each micro-batch and over replicas once.
    """
    if run == plan.micro_batches:
        return operations

    def times(count: int, is_per_micro_batch: bool) -> int:
        return round(count * plan.micro_batches / run) if is_per_micro_batch else count

    return replace(
        operations,
        kernels=Counter({k: times(count, k.section != UPDATE) for k, count in operations.kernels.items()}),
        transfers=Counter({t: times(count, _is_of_each(t, plan)) for t, count in operations.transfers.items()}),
    )


def _is_of_each(transfer: Transfer, plan: Plan) -> bool:
    if transfer.axis == "pp":
        return transfer.collective in ("send", "receive")  # not those of the loss, and of gradients that stages share
    if transfer.section == UPDATE:
        return False
    if transfer.axis in ("dp_replicate", "dp_shard", "dp", "shard", "gradients", "experts", "world"):
        if plan.zero == 2:
            return transfer.section == BACKWARD
        return plan.zero == 3 and transfer.collective != "all_reduce"
    return True


def _divides(tree: Any, size: int) -> bool:
    """Whether every tensor has `size` samples, or is a single number."""
    return all(not tensor.dim() or tensor.size(0) == size for tensor in tensor_leaves(tree))
