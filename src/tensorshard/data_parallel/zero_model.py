"""ZeRO 0, 1 and 2: every rank holds the whole parameters; gradients are averaged, optimizer states may be sharded.

A parameter's storage is padded to a multiple of the number of ranks, and the part that a rank updates is a view of it.
So the gather after an update writes straight into the parameters, and a reduction reads straight from the gradient that
autograd made. There are no flat copies of the model. (FSDP without resharding has a second copy of the parameters,
bucketed data parallelism one of the gradients.) Small or uneven parameters of a unit are sent in one packed message.

The module's parameters are those that forwards compute with, at any time
(:mod:`tensorshard.data_parallel.published_weights`). The optimizer gets the masters, which may be shards.
"""

import sys
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from tensorshard.comm.collectives import all_gather_into, all_reduce_
from tensorshard.comm.world import world
from tensorshard.data_parallel.buckets import Buckets
from tensorshard.data_parallel.gradient_reducer import GradientReducer
from tensorshard.data_parallel.published_weights import PublishedWeights
from tensorshard.data_parallel.released_weights import ReleasedUnit, ReleasedWeights, between_units
from tensorshard.data_parallel.sharded_model import ParameterSplit, ShardedModel
from tensorshard.data_parallel.unit_order import UnitOrder
from tensorshard.data_parallel.zero_parameter import ZeroParameter, expert_layout, shard_layout
from tensorshard.model.forward_contexts import RootRole, hook_root, surround_root
from tensorshard.model.parameters import ParameterPlaces, keeps_statistics
from tensorshard.model.trains_itself import call_before_methods
from tensorshard.plan.mesh import Mesh
from tensorshard.plan.storage import MasterPlace, Storage, TakeGradient, UpdateProgress
from tensorshard.torch_private.autograd import is_function_transformed


class ZeroModel(ShardedModel):
    """A model at ZeRO 0, 1 or 2: full parameters on every data rank, gradients averaged, states perhaps sharded.

    Args:
        model: the model on the meta device, its other transforms applied.
        values: name and full value of each parameter, one at a time.
        units: lists of modules whose parameters travel together.
        level: 0, 1 or 2.
        reduce_dtype: gradients are summed over the ranks in this type.
        storage: where master weights are kept that forwards do not compute with.
    """

    def __init__(
        self,
        model: nn.Module,
        values: Iterable[tuple[str, torch.Tensor]],
        units: list[list[nn.Module]],
        mesh: Mesh,
        split: ParameterSplit,
        *,
        level: int,
        precision: str,
        reduce_dtype: torch.dtype,
        storage: Storage,
    ) -> None:
        super().__init__(model, split)
        self._device = torch.device(mesh.device_mesh.device_type)
        self._units = units
        self._groups = shard_layout(mesh, level)
        self._expert_groups = self._groups if mesh.experts is mesh else expert_layout(mesh, level)
        self._shards = storage.parameter_units()
        self._all = self._materialize(values, precision, storage)
        self._masters = {name: p.master for name, p in self._all.items()}
        self._order: UnitOrder | None = None
        apart = between_units(model, units) if self._groups.releases else None
        self._buckets = Buckets(self._all.values(), units, self.finish_gather, apart=apart)
        if self._groups.releases:
            root, released = self._released_units(units)
            weights = ReleasedWeights(self._all.values(), self._groups, [root, *released], self._shards)
            self._weights: PublishedWeights = weights
        else:
            self._weights = PublishedWeights(self._all.values(), self._groups)
        self.in_users_code += [self._weights.masters, self._weights.averaged]
        self._gradients = GradientReducer(
            self._all.values(),
            self._buckets,
            self._weights,
            self._groups,
            reduce_dtype=reduce_dtype,
            level=level,
            meets=any(map(keeps_statistics, model.modules())),
        )
        hook_root(model, RootRole.DATA_PARALLEL, before=self._before_forward)
        surround_root(model, RootRole.DATA_PARALLEL, self._weights.averaged.paused)
        if self._groups.releases:
            self._watch_calls(weights, root, released, mesh)
        elif self._groups.shard is not None:
            self._wait_before_forward(units)
        self._shards.watch_forwards(model)
        self._shards.check_room(mesh.world_group)

    def held_numel(self) -> int:
        return sum(p.shard.numel() if p.releases else p.storage.numel() for p in self._all.values())

    def masters(self) -> dict[str, nn.Parameter]:
        return self._masters

    def trained_masters(self) -> dict[str, nn.Parameter]:
        self._buckets.arrange()
        return {name: p.master for name, p in self._all.items() if p.compute.requires_grad}

    def discard_gradients(self) -> None:
        self._gradients.discard()

    def abandon_step(self) -> None:
        self._gradients.abandon()
        if self._order is not None:
            self._order.reset()

    def begin_micro_batch(self, last: bool, *, shown: bool = False) -> None:
        self._gradients.begin_micro_batch(last, shown=shown)

    def begin_backward(self, loss: torch.Tensor) -> None:
        self._gradients.begin_backward(loss)

    def finish_micro_batch(self) -> None:
        self._gradients.finish_micro_batch()

    def finish_backward(self) -> None:
        self._gradients.finish_backward()
        self.writers = self._gradients.writers

    def show_gradients(self) -> None:
        self._gradients.show_gradients()

    def average_given_gradients(self) -> None:
        self._gradients.average_given()
        self.writers = self._gradients.writers

    def watch_gradients(self, take: TakeGradient, finish: Callable[[], None]) -> None:
        super().watch_gradients(take, finish)
        self._gradients.watch(take, finish)

    def master_places(self) -> dict[str, MasterPlace]:
        return {name: p.place for name, p in self._all.items()}

    # -- values --

    def all_gather_parameters(self, copied: Container[torch.Tensor] = ()) -> None:
        self._shards.forget()
        for bucket in self._buckets.forward_order():
            self._weights.publish(bucket, copied)

    def watch_updates(self, update: UpdateProgress) -> None:
        self._weights.update = update
        self._shards.watch_updates(update)
        if self._groups.shard is None:  # else forwards already wait for gathers
            self._wait_before_forward(self._units)
        # Units that this forward did not call are gathered, too: another rank may have called them.
        hook_root(self.model, RootRole.BACKGROUND_UPDATE, after=lambda *_: self._weights.publish_updated(), always=True)

    def gather_as_updated(self, copied: Container[torch.Tensor] = ()) -> None:
        self._shards.forget()
        self._weights.publish_as_updated(self._buckets.forward_order(), copied)

    def all_gather_loaded(self) -> None:
        self.all_gather_parameters()
        self._weights.publish(self._buckets.frozen)

    def finish_gather(self) -> None:
        self._wait()
        self.adopt_writes()
        self._wait()

    def _wait(self) -> None:
        for bucket in [*self._buckets.trained, self._buckets.frozen]:
            self._weights.wait(bucket)

    def adopt_writes(self) -> None:
        if self._weights.adopt():
            self.all_gather_loaded()

    def compare_written(self) -> None:
        self._weights.compare_written()

    def shown_parameters(self) -> dict[str, nn.Parameter]:
        return {name: p.compute for name, p in self._all.items()}

    def is_part(self, name: str) -> bool:
        p = self._all.get(name)
        return self.split.num_shards(name) > 1 or (p is not None and p.is_rounded and p.num_shards > 1)

    def is_released(self, name: str) -> bool:
        p = self._all.get(name)
        return p is not None and p.releases

    def shows_part(self, name: str) -> bool:
        return self.split.num_shards(name) > 1

    def master_shown_in_state_dicts(self, name: str) -> nn.Parameter | None:
        p = self._all.get(name)
        return p.master if p is not None and p.is_rounded else None

    def shown_part(self, name: str, full: torch.Tensor) -> torch.Tensor:
        return self.split.local(name, full)

    def shown_value(self, name: str, full: torch.Tensor) -> torch.Tensor:
        value = self.shown_part(name, full)
        p = self._all.get(self._aliases.get(name, name))
        if p is not None:
            p.set_master(value)
        return value

    @torch.no_grad()
    def set_value(self, name: str, value: torch.Tensor) -> None:
        p = self._all[self._aliases.get(name, name)]
        if not p.releases:  # else all_gather_loaded makes what is held outdated
            p.compute.copy_(value)
        p.set_master(value)

    @torch.no_grad()
    def kept_value(self, name: str) -> Callable[[], None]:
        p = self._all[self._aliases.get(name, name)]
        target = p.shard if p.is_copy else p.compute
        return partial(_copy, target, target.detach().clone())

    # -- parameters --

    @torch.no_grad()
    def _materialize(
        self, values: Iterable[tuple[str, torch.Tensor]], precision: str, storage: Storage
    ) -> dict[str, ZeroParameter]:
        """Replaces the parameters on the meta device by real ones. Ties are kept."""
        made: dict[str, ZeroParameter] = {}
        templates = dict(self.model.named_parameters())
        places = ParameterPlaces(self.model)
        for name, value in values:
            is_expert = self.split.of(name).of_data_ranks
            groups = self._expert_groups if is_expert else self._groups
            made[name] = ZeroParameter(
                name, value, templates[name], precision, groups, is_expert, storage, self._shards
            )
            places.replace(templates[name], made[name].compute)
        return made

    def _before_forward(self, *_: Any) -> None:
        if not is_function_transformed():  # there nothing may be written
            self.adopt_writes()

    # -- ZeRO 3 --

    def _released_units(self, units: list[list[nn.Module]]) -> tuple[ReleasedUnit, list[ReleasedUnit]]:
        """The parameters outside of `units`, and those of the units that are gathered together."""
        names = {module: name for name, module in self.model.named_modules()}
        modules: dict[int, list[nn.Module]] = {}
        members: dict[int, list[ZeroParameter]] = {}
        outside: list[ZeroParameter] = []
        for p, number in self._buckets.unit_of.items():
            if p in self._buckets.outside:
                outside.append(p)
            else:
                members.setdefault(number // 2, []).append(p)
        by_compute = {p.compute: p for p in self._all.values()}
        for unit in units:
            for module in unit:
                own = [by_compute[c] for c in module.parameters() if c in by_compute]
                numbers = {self._buckets.unit_of[p] // 2 for p in own if p not in self._buckets.outside}
                for number in numbers:
                    modules.setdefault(number, []).append(module)
        self._unit_numbers: dict[ReleasedUnit, tuple[int, ...]] = {}
        released, least = [], self._buckets.least_bytes
        for number in sorted(members):
            released.append(ReleasedUnit(names[modules[number][0]], modules[number], members[number], least))
            self._unit_numbers[released[-1]] = (2 * number, 2 * number + 1)
        return ReleasedUnit(type(self.model).__name__, [self.model], outside, least), released

    def _watch_calls(self, weights: ReleasedWeights, root: ReleasedUnit, units: list[ReleasedUnit], mesh: Mesh) -> None:
        self._order_group, self._order_device = mesh.gradient_group, torch.device(mesh.device_mesh.device_type)

        def reduce(unit: ReleasedUnit) -> None:
            if unit in self._unit_numbers:
                self._gradients.reduce(self._unit_numbers[unit])

        def gather_lists(numbers: list[int], length: int) -> list[list[int]]:
            mine = torch.tensor(numbers, device=self._order_device)
            everyone = mine.new_empty(self._order_group.size() * length)
            all_gather_into(everyone, mine, self._order_group, what="which units were called")
            return everyone.view(-1, length).tolist()  # type: ignore[no-any-return]

        ranks = self._order_group.size()
        order = UnitOrder(self.model, weights, root, units, ranks, reduce, self._sum_over_ranks, gather_lists)
        self._order = self._gradients.order = order
        hook_root(
            self.model,
            RootRole.DATA_PARALLEL,
            before=lambda *_: order.begin_forward(),
            after=lambda *call: self._forward_over(call[-1]),
            always=True,
        )

    def _sum_over_ranks(self, numbers: Sequence[float]) -> list[float]:
        message = torch.tensor(list(numbers), dtype=torch.float64, device=self._order_device)
        all_reduce_(message, self._order_group, what="which parameters were used")
        return world().known(message, list(numbers))  # type: ignore[no-any-return]

    def _forward_over(self, output: Any) -> None:
        assert self._order is not None
        self._order.end_forward(output, failed=output is None and sys.exception() is not None)
        if not torch.is_grad_enabled() and not self.logits.is_waiting:  # the loss may still compute logits
            self._order.release_root()

    def loss_is_over(self) -> None:
        super().loss_is_over()
        if self._order is not None and not torch.is_grad_enabled():
            self._order.release_root()

    # -- gathers --

    def _wait_before_forward(self, units: list[list[nn.Module]]) -> None:
        """Makes each unit's forward wait for the unit's gather, and the model's forward for all other parameters."""
        by_compute = {p.compute: p for p in self._all.values()}
        for unit in units:
            for module in unit:
                self._hook(
                    module, {self._buckets.unit_of[by_compute[c]] for c in module.parameters() if c in by_compute}
                )
        self._hook(self.model, {self._buckets.unit_of[p] for p in self._buckets.outside})
        self.model.register_state_dict_pre_hook(lambda *_: self.finish_gather())

    def _hook(self, module: nn.Module, units: set[int]) -> None:
        def wait(*_: Any) -> None:
            for unit in units:
                bucket = self._buckets.of_units.get(unit)
                if bucket is not None and (bucket.gathering or bucket.update_pending):
                    self._weights.wait(bucket)
            if module is self.model:
                self._weights.wait(self._buckets.frozen)

        if module is self.model:
            hook_root(module, RootRole.GATHERED_PARAMETERS, before=wait)
        else:
            module.register_forward_pre_hook(wait)
            call_before_methods(module, wait)


@torch.no_grad()
def _copy(to: torch.Tensor, values: torch.Tensor) -> None:
    to.copy_(values)
