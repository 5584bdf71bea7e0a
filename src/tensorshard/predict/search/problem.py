"""What a search is asked: the model, the hardware, the user's fixed fields; and the estimates that answer it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.comm.forked import run_at_once
from tensorshard.common.words import kind_of
from tensorshard.engine.optimizer import OptimizerFactory
from tensorshard.host.memory import cores_here
from tensorshard.model.batches import batch_size
from tensorshard.model.model_errors import raised_by_model
from tensorshard.model.tensors import map_tensors_once, tensor_leaves
from tensorshard.parallelize.checks import check_arguments
from tensorshard.parallelize.part import Decisions
from tensorshard.plan.field_checks import check_choice, check_int, check_positive, size_in_bytes, unknown_field
from tensorshard.plan.plan import Plan
from tensorshard.predict.estimate import Estimate, estimate
from tensorshard.predict.hardware import Hardware, Rates, find_hardware, hardware_here
from tensorshard.predict.search.model_facts import KEPT, FewerBlocks, with_all_blocks, without_blocks
from tensorshard.tensor_parallel.table.table import VerifiedTable
from tensorshard.tensor_parallel.verify.model_run import Captures, captures_kept
from tensorshard.weights.files.pretrained_model import PretrainedModel

_Result = TypeVar("_Result")

OBJECTIVES = ("time", "memory", "cost")

SEARCHED = (
    "dp_replicate", "dp_shard", "cp", "tp", "sequence_parallel", "pp", "pp_schedule", "pp_stages_per_rank", "zero",
    "micro_batches", "recompute", "offload", "ep",
)  # fmt: skip
"""The fields of a Plan that a search chooses; all others are the user's, or at their defaults."""


@dataclass(frozen=True)
class SearchProblem:
    """A search's arguments, checked.

    Args:
        model, inputs, targets, optimizer, loss_fn: as for :func:`find_plans`.
        hardware: with rates.
        memory: bytes that a rank may take by its estimate.
        global_batch: samples of a step.
        fixed: fields of a Plan that the user gave, by name.
        tables: the tables of tensor parallelism found so far, by degree and whether sequences are split. Estimates fill
            it.
        shared: what holds for several plans: the run of the model's constructor, and the runs from which pipelines are
            cut. Estimates fill it.
        tables_beside_experts: the tables of plans that split experts over ranks with different samples. They split
            each expert by itself, or leave it whole.
        captures: the model's runs from which tables were found. Estimates fill it.
        shortened: the problems for the models with fewer blocks, by the number of blocks that they keep.
        parameters: the elements of the whole model's parameters, which a model with fewer blocks counts as having; 0
            for a model that counts as having none; None if they are not known.
    """

    model: nn.Module | Callable[[], nn.Module]
    world_size: int
    inputs: Any
    targets: Any
    optimizer: OptimizerFactory
    loss_fn: Callable[[Any, Any], Any]
    hardware: Hardware
    memory: int
    global_batch: int
    fixed: Mapping[str, Any]
    tables: dict[tuple[int, bool], VerifiedTable | None] = field(default_factory=dict)
    tables_beside_experts: dict[tuple[int, bool], VerifiedTable | None] = field(default_factory=dict)
    shared: Decisions = field(default_factory=lambda: Decisions(traced={}))
    captures: Captures = field(default_factory=dict)
    shortened: dict[int, "SearchProblem"] = field(default_factory=dict)
    parameters: int | None = None

    @property
    def rates(self) -> Rates:
        """How fast a device is."""
        assert self.hardware.rates is not None  # checked by `make_problem`
        return self.hardware.rates

    @property
    def on_cpus(self) -> bool:
        """Whether ranks are CPU processes."""
        return self.hardware.is_cpu

    @property
    def can_be_shortened(self) -> bool:
        """Whether a callable builds the model, so that blocks can be left out."""
        return not isinstance(self.model, nn.Module | PretrainedModel)

    @property
    def may_split_sequences(self) -> bool:
        """Whether the fixed fields leave room for context parallelism."""
        return not self.fixed.get("compile")

    def under(self, ep: int) -> "SearchProblem":
        """The same problem with the tables of plans with this `ep`."""
        return self if ep == 1 else replace(self, tables=self.tables_beside_experts)

    def plan(self, **chosen: Any) -> Plan:
        """The Plan with the `chosen` fields and the fixed ones. A fixed field wins."""
        fixed = dict(self.fixed)
        if chosen.get("cp", 1) == 1 == fixed.get("cp", 1):  # how sequences are split says nothing where they are not
            fixed |= {"cp_dims": None, "cp_order": "auto"}
        return Plan(**{**chosen, **fixed})

    def batch(self, samples: int) -> tuple[Any, Any]:
        """Inputs and targets of `samples` samples: the first of the given ones; if these are too few, the first sample
        again and again."""
        size = batch_size(self.inputs)

        def resized(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.dim() or tensor.size(0) != size:
                return tensor
            return tensor[:samples] if samples <= size else tensor[:1].expand(samples, *tensor.shape[1:])

        inputs, targets = map_tensors_once(resized, [self.inputs, self.targets])
        return inputs, targets

    def estimate(
        self,
        plan: Plan,
        world_size: int | None = None,
        samples: int | None = None,
        *,
        borrow: bool = False,
        stop_above: int | None = None,
    ) -> Estimate:
        """The estimate of a resolved `plan`.

        Args:
            world_size: the number of ranks; None for the problem's.
            samples: samples of one data rank; None for its part of the global batch.
            borrow: whether a table that was found for another number of tp ranks may be used, if it suits the model.
                This is for predictions only, since a search for this number may find another table.
            stop_above: as for :func:`tensorshard.predict.estimate.estimate`.

        Raises:
            ValueError, NotImplementedError: the plan does not suit the model.
        """
        table = self._table_of(plan.tp, sequence_parallel=plan.sequence_parallel)
        stands_for = self.parameters if self.parameters == 0 or isinstance(self.model, FewerBlocks) else None
        decisions = replace(self.shared, table=table, parameters=stands_for)
        if borrow and decisions.table is None and plan.tp > 1:
            decisions.table = self.table_for(plan.tp, sequence_parallel=plan.sequence_parallel)
            if decisions.table is not None:
                try:
                    return self._estimate(plan, world_size, samples, decisions)
                except Exception as error:
                    if not raised_by_model(error):  # else its layers do not suit the table
                        raise
                decisions.table = None
        estimate = self._estimate(plan, world_size, samples, decisions, stop_above)
        self.tables[plan.tp, plan.sequence_parallel] = decisions.table
        return estimate

    def table_for(self, size: int, *, sequence_parallel: bool) -> VerifiedTable | None:
        """The table that was found for `size` tp ranks, or one for another number with its size changed; None if there
        is none."""
        for other in (size, *sorted(ranks for ranks, _ in self.tables)):
            table = self._table_of(other, sequence_parallel=sequence_parallel)
            if table is not None:
                return replace(table, size=size)
        return None

    def _table_of(self, size: int, *, sequence_parallel: bool) -> VerifiedTable | None:
        """The table that was found for `size` tp ranks. One with sequence parallelism also serves without it."""
        table = self.tables.get((size, sequence_parallel))
        in_parts = self.tables.get((size, True))
        return replace(in_parts, sequence={}) if table is None and in_parts is not None else table

    def _estimate(
        self,
        plan: Plan,
        world_size: int | None,
        samples: int | None,
        decisions: Decisions,
        stop_above: int | None = None,
    ) -> Estimate:
        inputs, targets = self.batch(self.global_batch // plan.dp_size if samples is None else samples)
        with captures_kept(self.captures):
            estimated = estimate(
                self.model,
                plan,
                world_size=self.world_size if world_size is None else world_size,
                inputs=inputs,
                targets=targets,
                optimizer=self.optimizer,
                loss_fn=self.loss_fn,
                hardware=self.hardware,
                device="cpu" if self.on_cpus else "cuda",
                decisions=decisions,
                stop_above=stop_above,
            )
        self.shared.recorded = decisions.recorded
        return estimated

    def seconds(self, estimate: Estimate) -> float:
        """The step time of an estimate."""
        assert estimate.step_seconds is not None  # the hardware has rates
        return estimate.step_seconds * self.hardware.time_ratio

    def on_cores(self, seconds: float, busy: float) -> float:
        """Seconds of a step that takes a rank `seconds`, of which it computes for `busy`, if ranks share cores."""
        return max(seconds, busy * self.world_size / cores_here()) if self.hardware.shares_cores else seconds

    def without_tables(self) -> "SearchProblem":
        """The same problem, with none of the tables that were found."""
        return replace(self, tables={})

    def with_blocks(
        self, kept: int, equal_blocks: Sequence[str], tp: int, *, sequence_parallel: bool
    ) -> "SearchProblem":
        """The same problem for the model with the first `kept` of its `equal_blocks`; it must be a callable.

        Its estimates use the table that was found with `tp` ranks, or one for another number; without any they search
        for one.
        """
        assert not isinstance(self.model, nn.Module)
        if kept not in self.shortened:
            model = FewerBlocks(self.model, tuple(equal_blocks[kept:]))
            self.shortened[kept] = replace(self, model=model, shared=Decisions(traced={}), captures={})
        shortened = self.shortened[kept]
        tables: dict[tuple[int, bool], VerifiedTable | None] = {}
        table = None if tp == 1 else self.table_for(tp, sequence_parallel=sequence_parallel)
        if table is not None:
            tables[tp, sequence_parallel] = without_blocks(table, equal_blocks, kept)
        return replace(self, model=shortened.model, tables=tables, shared=shortened.shared, captures=shortened.captures)

    def with_few_blocks(
        self,
        run: Callable[["SearchProblem"], _Result],
        equal_blocks: Sequence[str],
        tp: int,
        *,
        sequence_parallel: bool,
    ) -> tuple[_Result, _Result]:
        """What `run` returns for the problems with each number of :data:`KEPT` blocks, as in :meth:`with_blocks`."""
        are_new = len(self.shortened) < len(KEPT)
        problems = (self.with_blocks(n, equal_blocks, tp, sequence_parallel=sequence_parallel) for n in KEPT)
        calls = [partial(run, problem) for problem in problems]
        # The first runs leave the constructor's runs here for all later ones.
        few, more = (call() for call in calls) if are_new else run_at_once(calls)
        return few, more

    def has_table(self, size: int, *, sequence_parallel: bool) -> bool:
        """Whether an estimate for just `size` tp ranks has its table, or was found to need none."""
        known = (size, sequence_parallel) in self.tables
        return known or self._table_of(size, sequence_parallel=sequence_parallel) is not None

    def has_table_of_fewer(self, size: int, *, sequence_parallel: bool) -> bool:
        """Whether there is a table for fewer than `size` tp ranks, and none for `size`."""
        smaller = (ranks for ranks, _ in self.tables if ranks < size)
        return not self.has_table(size, sequence_parallel=sequence_parallel) and any(
            self._table_of(ranks, sequence_parallel=sequence_parallel) is not None for ranks in smaller
        )

    def keep_table(
        self, table: VerifiedTable, equal_blocks: Sequence[str], kept: int, *, sequence_parallel: bool
    ) -> None:
        """Keeps a table that was found for the model with the first `kept` of its `equal_blocks`, if it tells how the
        other blocks are split."""
        full = with_all_blocks(table, equal_blocks, kept)
        if full is not None:
            self.tables[table.size, sequence_parallel] = full

    def with_changes(
        self, *, world_size: int | None = None, global_batch: int | None = None, **fixed: Any
    ) -> "SearchProblem":
        """The same problem for more ranks, for another batch, or with more fields fixed."""
        size = self.world_size if world_size is None else world_size
        batch = self.global_batch if global_batch is None else global_batch
        return replace(self, world_size=size, global_batch=batch, fixed={**self.fixed, **fixed})


def make_problem(
    model: nn.Module | Callable[[], nn.Module],
    *,
    world_size: int,
    inputs: Any,
    targets: Any,
    optimizer: OptimizerFactory,
    loss_fn: Callable[[Any, Any], Any],
    hardware: str | Hardware | None,
    memory: int | str | None,
    global_batch: int | None,
    fixed: Plan | Mapping[str, Any] | None,
) -> SearchProblem:
    """Checks these arguments of :func:`find_plans`, and returns them as a SearchProblem.

    Raises:
        ValueError, TypeError: one of them makes no sense; the error says why.
        RuntimeError: this process is in a process group already.
    """
    check_int("world_size", world_size, least=1)
    given = fixed_fields(fixed)
    check_arguments(model, Plan(**given), optimizer, loss_fn, 0)
    size = batch_size(inputs)
    if not tensor_leaves(targets):
        raise ValueError(
            f"targets are {targets!r}, without a tensor; give what Engine.step is given, whose shapes matter alone"
        )
    if global_batch is not None:
        check_int("global_batch", global_batch, least=1)
    profile = hardware_here() if hardware is None else find_hardware(hardware)
    assert profile is not None
    if profile.rates is None:
        raise ValueError(
            f"hardware={profile.name!r} has no rates, so that no plan's time is known; give one that has, such as "
            f"'h100', or Hardware(..., rates=Rates(...))"
        )
    if dist.is_initialized():
        raise RuntimeError(
            "find_plans was called in a process that is in a process group already; call it before parallelize, or "
            "let parallelize(model, 'auto', ...) choose, which searches in a separate process"
        )
    share = 1 if profile.rates.asynchronous else min(world_size, profile.rates.devices_per_node)
    room = profile.memory // share if memory is None else size_in_bytes("memory", memory)
    room = int(room / profile.memory_ratio)  # real runs take this times the estimate, so the estimate must stay lower
    batch = size * world_size if global_batch is None else global_batch
    return SearchProblem(model, world_size, inputs, targets, optimizer, loss_fn, profile, room, batch, given)


def fixed_fields(fixed: Plan | Mapping[str, Any] | None) -> dict[str, Any]:
    """The fixed fields: those of a mapping, or those of a Plan that are not at their defaults.

    Raises:
        ValueError, TypeError: there are unknown fields, or values that no Plan takes.
    """
    if fixed is None:
        return {}
    if isinstance(fixed, Plan):
        defaults = {f.name: f.default for f in fields(Plan) if f.default is not MISSING}
        return {name: getattr(fixed, name) for name, default in defaults.items() if getattr(fixed, name) != default}
    if not isinstance(fixed, Mapping):
        raise TypeError(f"fixed is {kind_of(fixed)}; it must be a Plan, or a dict of its fields, such as tp=2")
    unknown = unknown_field(Plan, fixed)
    if unknown is not None:
        raise ValueError(f"fixed: {unknown}")
    checked = Plan(**fixed)
    # -1 stands for what the other axes leave. The search chooses that.
    return {name: getattr(checked, name) for name in fixed if not (name in _DEGREES and fixed[name] == -1)}


_DEGREES = ("dp_replicate", "dp_shard", "tp", "pp", "cp")


def check_objective(objective: str, step_time: float | None, top: int) -> None:
    """Refuses an objective, a step time or a number of plans that makes no sense.

    Raises:
        ValueError, TypeError: one of them makes no sense; the error says why.
    """
    check_choice("objective", objective, OBJECTIVES)
    check_int("top", top, least=1)
    if step_time is not None:
        check_positive("step_time", step_time)
    if objective == "cost" and step_time is None:
        raise ValueError(
            "objective='cost' looks for the fewest devices that take a step in a given time; give it in seconds, as in "
            "step_time=2.5"
        )
    if objective != "cost" and step_time is not None:
        raise ValueError(f"step_time={step_time} is for objective='cost', and the objective is {objective!r}")
