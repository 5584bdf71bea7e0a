"""ZeRO 3: parameters are sharded too, and gathered unit by unit for forward and backward. On PyTorch's FSDP2.

Also here: sharding units: which modules' parameters are gathered and reduced together.
"""

import sys
from collections.abc import Callable, Container, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from tensorshard.comm.collectives import all_gather_into, is_gloo, reduce_scatter_into
from tensorshard.common.words import is_inside
from tensorshard.data_parallel.gathered_reads import GatheredReads
from tensorshard.data_parallel.sharded_gradients import ShardedGradients
from tensorshard.data_parallel.sharded_model import ParameterSplit, ShardedModel
from tensorshard.data_parallel.unit_calls import UnitCalls
from tensorshard.data_parallel.unit_values import UnitValues, WrittenShards
from tensorshard.model.blocks import find_blocks, select_modules
from tensorshard.model.forward_contexts import RootRole, hook_root, surround_forwards
from tensorshard.model.parameters import ParameterPlaces, like
from tensorshard.model.references import has_references, update_references
from tensorshard.model.trains_itself import call_before_methods, self_training
from tensorshard.passes.precision import autocast, compute_dtype, held_dtype, master_dtype, widen_output
from tensorshard.plan.mesh import Mesh
from tensorshard.plan.storage import MasterPlace, Storage, TakeGradient, UpdateProgress
from tensorshard.torch_private.autograd import is_in_backward
from tensorshard.torch_private.fsdp import (
    AllGather,
    ReduceScatter,
    padded_shards,
    parameter_groups,
    reset_iteration,
    set_collectives,
    shard_over,
    watch_reduced,
)
from tensorshard.torch_private.fsdp_calls import initialize_root, watch_unit
from tensorshard.torch_private.modules import own_parameters, parameter_at


class FullyShardedModel(ShardedModel):
    """A model of which each rank of ``dp_shard`` holds one part of every parameter.

    Args:
        model: the model on the meta device, its other transforms applied.
        value_of: the full value of the parameter with a name. Units are filled and sharded one after the other, so that
            no more than one unit is held in full at any time.
        units: lists of modules whose parameters travel together.
        reduce_dtype: gradients are summed over the ranks in this type.
        storage: where the shards are kept.
    """

    def __init__(
        self,
        model: nn.Module,
        value_of: Callable[[str], torch.Tensor],
        units: list[list[nn.Module]],
        mesh: Mesh,
        split: ParameterSplit,
        *,
        precision: str,
        reduce_dtype: torch.dtype,
        storage: Storage,
    ) -> None:
        super().__init__(model, split)
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._places = ParameterPlaces(model)
        self._hybrid = mesh.degrees["dp_replicate"] > 1
        self._expert_mesh: DeviceMesh | None = None
        if mesh.experts is not mesh:
            self._expert_mesh = mesh.experts.hybrid_mesh if self._hybrid else mesh.experts.shard_mesh
        self._ranks_per_expert = mesh.experts.gradient_ranks
        self._experts: set[nn.Parameter] = set()  # those that are filled, before they are sharded
        self._filled: list[tuple[nn.Module, str, nn.Parameter]] = []  # those of the unit that are held elsewhere, too
        # All trained parameters have one type, as was checked. A pipeline's stage may train none.
        self._dtype = next((master_dtype(p.dtype) for p in self._names if p.requires_grad), torch.float32)
        self._gradient_ranks = mesh.gradient_ranks
        self._master_places: dict[nn.Parameter, MasterPlace] = {}
        self._unit_masters: list[tuple[list[nn.Module], list[nn.Parameter]]] = []
        self._precision = precision
        # FSDP cannot shard a parameter without dimensions or without elements: each rank keeps it whole, and averages
        # the gradient that the first has.
        self._scalars: list[nn.Parameter] = []
        options: dict[str, Any] = {
            "mesh": mesh.hybrid_mesh if self._hybrid else mesh.shard_mesh,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=compute_dtype(self._dtype, precision),
                reduce_dtype=reduce_dtype if self._dtype == torch.float32 and mesh.gradient_ranks > 1 else self._dtype,
                cast_forward_inputs=False,  # autocast casts where it is needed
            ),
            "ignored_params": set(),
        }
        if self._expert_mesh is not None:
            over_fewer = shard_over(self._expert_mesh)
            options["shard_placement_fn"] = lambda full: over_fewer if full in self._experts else None
        narrow = options["mp_policy"].param_dtype
        self._shards = storage.parameter_units(narrow if narrow != self._dtype else None)
        if self._shards.on_host:
            # Shards and their gradients go to the device when a unit is gathered. They are not pinned: pinned memory
            # for all of them would exceed any budget.
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        self._shard_units(units, value_of, options)
        for own in self_training(model).values():
            if isinstance(own, FSDPModule) and isinstance(own, nn.Module):  # a unit of its own
                for method in own.methods_with_parameters:
                    register_fsdp_forward_method(own, method)
        # Kept here, because between a forward and its backward the modules show full parameters.
        self._masters = dict(model.named_parameters())
        for template, name in self._names.items():
            vars(self._masters[name]).update(vars(template))  # attributes that users have set on it
        self._gradients = ShardedGradients(
            model, self._masters, self._scalars, mesh.gradient_group, torch.device(mesh.device_mesh.device_type)
        )
        self._reads = GatheredReads(self._gradients, options["mp_policy"].param_dtype)
        for master in self._masters.values():
            if isinstance(master, DTensor):
                self._reads.watch(master)
        self._written = WrittenShards(
            {master: name for name, master in self._masters.items()},
            mesh.gradient_group,
            torch.device(mesh.device_mesh.device_type),
            {self._masters[name]: mesh.experts.gradient_group for name in self._masters if self._is_expert(name)},
        )
        self._gradients.written = self._reads.written = self._written
        self._calls = self._watch_units(mesh)
        if precision != "fp32":
            self._narrow_calls_from_outside(precision, torch.device(mesh.device_mesh.device_type))
        self._shards.watch_forwards(model)
        self._choose_collectives(mesh)
        self._shards.check_room(mesh.world_group)

    def _shard_units(
        self, units: list[list[nn.Module]], value_of: Callable[[str], torch.Tensor], options: dict[str, Any]
    ) -> None:
        """Fills and shards the parameters of `units`, one after the other, and then all others."""
        tied = _shared_between(self.model, units)
        for unit in units:
            parameters = [parameter for module in unit for parameter in module.parameters()]
            # What some ranks have none of makes no unit, which all have to gather in one order.
            if tied.isdisjoint(parameters) and not all(self._is_empty_somewhere(p) for p in parameters):
                self._fill(unit, value_of)
                options["ignored_params"].update(self._scalars)
                fully_shard(unit if len(unit) > 1 else unit[0], reshard_after_forward=True, **options)
                self._note_unit(unit)
        self._fill([self.model], value_of)
        options["ignored_params"].update(self._scalars)
        fully_shard(self.model, reshard_after_forward=False, **options)
        self._note_unit([self.model])

    def _choose_collectives(self, mesh: Mesh) -> None:
        """On Gloo, FSDP's messages are sent by collectives that are faster than its own."""
        if is_gloo(mesh.shard_group, torch.device(mesh.device_mesh.device_type)):
            names = {module: name for name, module in self.model.named_modules() if isinstance(module, FSDPModule)}
            for module, name in names.items():
                shown = name or type(self.model).__name__
                set_collectives(module, _AllGather(shown), _ReduceScatter(shown))

    def _watch_units(self, mesh: Mesh) -> UnitCalls:
        """Puts :class:`UnitCalls` between FSDP and its units."""
        model, group = self.model, mesh.gradient_group
        values = UnitValues()
        values.written = self._written

        def gather_lists(numbers: list[int], length: int) -> list[list[int]]:
            mine = torch.tensor(numbers, device=mesh.device_mesh.device_type)
            everyone = mine.new_empty(group.size() * length)
            all_gather_into(everyone, mine, group, what="which units were called")
            return everyone.view(-1, length).tolist()  # type: ignore[no-any-return]

        calls = UnitCalls(model, group.size(), self._gradients.sum_over_ranks, gather_lists, values)
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                unit = watch_unit(module, calls)
                if unit is not None:
                    calls.add(name or type(model).__name__, unit, is_root=module is model)
                    values.add(unit)
        self._gradients.calls = calls
        self._reads.copies = values.fresh_copy
        initialize_root(model)
        hook_root(
            model,
            RootRole.DATA_PARALLEL,
            before=lambda *_: self._forward_begins(),
            after=lambda *call: self._forward_over(call[-1]),
            always=True,
        )
        return calls

    def _narrow_calls_from_outside(self, precision: str, device: torch.device) -> None:
        """Makes units compute in the plan's type also where user code calls them, outside of the model's forward."""

        def is_outside() -> bool:
            return not self._calls.in_forward and not torch.is_autocast_enabled(device.type)  # as in recomputation

        def context() -> AbstractContextManager[Any]:
            return autocast(precision, device) if is_outside() else nullcontext()

        for module in self.model.modules():
            if isinstance(module, FSDPModule) and module is not self.model:
                surround_forwards(module, context)
                module.register_forward_hook(lambda _, args, output: widen_output(output) if is_outside() else None)

    def _forward_begins(self) -> None:
        self._reads.in_forward = True
        if not is_in_backward():
            self._reads.forget()
        self._calls.begin_forward()

    def watch_gradients(self, take: TakeGradient, finish: Callable[[], None]) -> None:
        super().watch_gradients(take, finish)
        self._gradients.take, self._gradients.finish = take, finish

    def watch_updates(self, update: UpdateProgress) -> None:
        self._reads.wait = update.wait
        self._shards.watch_updates(update)
        for modules, masters in self._unit_masters:
            for module in modules:
                wait = partial(update.wait, masters)
                if module is self.model:
                    hook_root(module, RootRole.BACKGROUND_UPDATE, before=lambda *_, wait=wait: wait())
                else:
                    module.register_forward_pre_hook(lambda *_, wait=wait: wait(), prepend=True)
                    call_before_methods(module, wait)

    def masters(self) -> dict[str, nn.Parameter]:
        return self._masters

    def master_places(self) -> dict[str, MasterPlace]:
        return {name: self._master_places[m] for name, m in self._masters.items() if m in self._master_places}

    def _forward_over(self, output: Any) -> None:
        self._reads.in_forward = False
        self._calls.end_forward(failed=output is None and sys.exception() is not None)
        # The loss may still compute logits from the parameters.
        if not torch.is_grad_enabled() and not self.logits.is_waiting:
            self._reshard()

    def loss_is_over(self) -> None:
        super().loss_is_over()
        if not torch.is_grad_enabled():
            self._reshard()

    def _reshard(self) -> None:
        """Shards the root's parameters again, where no backward follows that would do it."""
        assert isinstance(self.model, FSDPModule)
        self.model.reshard()

    def held_numel(self) -> int:
        return sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in self._masters.values())

    @property
    def gradient_divisor(self) -> int:
        return self._gradient_ranks

    def abandon_step(self) -> None:
        self.discard_gradients()
        self._gradients.forget()
        self._written.forget()
        self._reads.forget()
        self._calls.reset()
        reset_iteration(self.model)

    def begin_micro_batch(self, last: bool, *, average: bool = False) -> None:
        self._gradients.last = last
        assert isinstance(self.model, FSDPModule)
        self.model.set_is_last_backward(last)
        if self._hybrid:
            self.model.set_requires_all_reduce(last)

    def finish_micro_batch(self) -> None:
        """FSDP finishes by itself at the end of backward."""

    def finish_backward(self) -> None:
        """FSDP finishes by itself at the end of backward; gradients that the user gave are left."""
        self._gradients.average_by_hand()
        self._reads.forget()
        self.writers = self._gradients.writers

    def compare_written(self) -> None:
        self._written.compare()

    def all_gather_parameters(self, copied: Container[torch.Tensor] = ()) -> None:
        """FSDP gathers the masters themselves."""
        self._shards.forget()

    def gather_as_updated(self, copied: Container[torch.Tensor] = ()) -> None:
        self.all_gather_parameters(copied)

    def finish_gather(self) -> None:
        """FSDP gathers in forward and backward alone."""

    @torch.no_grad()
    def _fill(self, unit: list[nn.Module], value_of: Callable[[str], torch.Tensor]) -> None:
        """Gives the parameters of `unit` that are still on the meta device their full values."""
        for module in unit:
            for parameter in list(module.parameters()):
                if parameter.is_meta:
                    value = value_of(self._names[parameter])
                    value = value.to(held_dtype(parameter)) if value.is_floating_point() else value
                    if value.dim() == 0 or value.numel() == 0:
                        if value.numel() == 0:  # nothing converts it for a forward, and it has nothing to lose
                            value = value.to(compute_dtype(value.dtype, self._precision))
                        self._scalars.append(like(parameter, value.clone()))
                        self._places.replace(parameter, self._scalars[-1])
                        continue
                    filled = like(parameter, value.contiguous())
                    if self._is_expert(self._names[parameter]):
                        self._experts.add(filled)
                    self._places.replace(parameter, filled)
                    self._filled += [
                        (owner, key, filled) for owner, key in self._places.of(parameter) if has_references(owner, key)
                    ]

    def _is_empty_somewhere(self, parameter: nn.Parameter) -> bool:
        """Whether some ranks have no element of a parameter, as of an expert in a list."""
        split = self.split.of(self._names[parameter])
        layout, shape = split.layout(self._names[parameter]), parameter.shape
        return any(layout.local_shape(shape, rank, split.size).numel() == 0 for rank in range(split.size))

    def _is_expert(self, name: str) -> bool:
        """Whether the data ranks share the elements of a parameter, as the experts of a mixture."""
        return self.split.of(name).of_data_ranks

    def _divide_by_samples(self, gradients: torch.Tensor) -> None:
        """Divides the average of experts' gradients over the ranks that hold them.

        Each has the terms of the samples of all ranks that share the experts.
        """
        gradients.div_(self._gradient_ranks / self._ranks_per_expert)

    def _note_unit(self, unit: list[nn.Module]) -> None:
        """Notes the master weights of `unit`, which was just sharded, and moves their shards to where they are kept."""
        for owner, key, filled in self._filled:
            update_references(owner, key, filled, parameter_at(owner, key))
        self._filled.clear()
        self._experts.clear()
        groups = [group for module in unit for group in parameter_groups(module)]
        known = {master for _, masters in self._unit_masters for master in masters}
        own: list[nn.Parameter] = []
        for group in {id(group): group for group in groups}.values():
            shards = padded_shards(group)
            if not shards or not shards.keys().isdisjoint(known):
                continue
            own += shards
            if all(isinstance(master, DTensor) and master.device_mesh == self._expert_mesh for master in shards):
                watch_reduced(group, self._divide_by_samples)
            self._master_places.update(self._shards.keep(group))
        self._unit_masters.append((unit, own))


def _shared_between(model: nn.Module, units: list[list[nn.Module]]) -> set[nn.Parameter]:
    """Parameters that are tied across units, or to a module in no unit (such as one that another pipeline stage
    computes). FSDP needs all modules that use a parameter in one group, so these units join the root's group."""
    seen = _parameters_outside(model, {module for unit in units for module in unit})
    shared: set[nn.Parameter] = set()
    for unit in units:
        own = {parameter for module in unit for parameter in module.parameters()}
        shared |= own & seen
        seen |= own
    return shared


def _parameters_outside(model: nn.Module, modules: Container[nn.Module]) -> set[nn.Parameter]:
    """Parameters of `model` that are reached without going through one of `modules`."""
    visited: set[nn.Module] = set()
    outside: set[nn.Parameter] = set()
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if module not in visited and module not in modules:
            visited.add(module)
            outside |= set(own_parameters(module).values())
            waiting += module.children()
    return outside


class _Allocate:
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Allocate, AllGather):
    """FSDP's all-gather, done by :func:`all_gather_into`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        return all_gather_into(output_tensor, input_tensor, group, async_op, what=f"the parameters of {self._name}")


class _ReduceScatter(_Allocate, ReduceScatter):
    """FSDP's reduce-scatter, done by :func:`reduce_scatter_into`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        what = f"the gradients of {self._name}"
        return reduce_scatter_into(output_tensor, input_tensor, group, op, async_op, what=what)


def shard_units(model: nn.Module, requested: int | list[str] | None) -> list[list[nn.Module]]:
    """Lists of modules whose parameters are sent together, in the order of the model. All others form one more unit.

    Args:
        requested: as in :class:`tensorshard.Plan`: None, bytes of fp32 parameters, or names.
    """
    if isinstance(requested, list):
        return [[module] for module in _outermost(select_modules(model, requested)).values()]
    return _block_units(find_blocks(model).values(), requested)


def stage_shard_units(
    whole: nn.Module,
    stage: nn.Module,
    requested: int | list[str] | None,
    *,
    blocks: Iterable[nn.Module],
    units: Iterable[str],
) -> list[list[nn.Module]]:
    """The sharding units of a pipeline's stage, as :func:`shard_units` gives those of a model.

    A named module with layers on several stages makes one unit on each of them.

    Args:
        whole: the model.
        stage: the stage's modules, under the model's names.
        blocks: those of the model's blocks that are the stage's own.
        units: names of the modules that the stage calls as a whole.
    """
    if not isinstance(requested, list):
        return _block_units(blocks, requested)
    of_stage: list[list[nn.Module]] = []
    for name in _outermost(select_modules(whole, requested)):
        if is_inside(name, units):
            of_stage.append([stage.get_submodule(name)])
            continue
        within = [stage.get_submodule(unit) for unit in units if unit.startswith(f"{name}.")]
        if within:
            of_stage.append(within)
    return of_stage


def _block_units(blocks: Iterable[nn.Module], requested: int | None) -> list[list[nn.Module]]:
    single = [[block] for block in blocks]
    if requested is None:
        return single
    return _merge(single, lambda unit: 4 * sum(p.numel() for m in unit for p in m.parameters()), requested)


def _outermost(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in modules.items()
        if not any(name.startswith(f"{other}.") for other in modules if other != name)
    }


def _merge(
    units: list[list[nn.Module]], size_of: Callable[[list[nn.Module]], int], least: int
) -> list[list[nn.Module]]:
    """Joins neighbours until each unit has at least `least` bytes; a small rest joins the last."""
    merged: list[list[nn.Module]] = []
    current: list[nn.Module] = []
    for unit in units:
        current = current + unit
        if size_of(current) >= least:
            merged.append(current)
            current = []
    if current and merged:
        merged[-1] = merged[-1] + current
    elif current:
        merged.append(current)
    return merged
