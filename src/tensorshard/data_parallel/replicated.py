"""ZeRO 0, 1 and 2: every rank holds the whole parameters; gradients are averaged, optimizer states may be sharded.

A parameter's storage is padded to a multiple of the number of ranks, and the part that a rank updates is a view of it.
So the gather after an update writes straight into the parameters, and a reduction reads straight from the gradient that
autograd made. There are no flat copies of the model. (FSDP without resharding has a second copy of the parameters,
bucketed data parallelism one of the gradients.) Small or uneven parameters of a unit are sent in one packed message.

The module's parameters are those that forwards compute with, at any time
(:mod:`tensorshard.data_parallel.published_weights`). The optimizer gets the masters, which may be shards.
"""

import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tensorshard.data_parallel.published_weights import PublishedWeights
from tensorshard.data_parallel.reduction import Bucket, Groups, Reduction
from tensorshard.data_parallel.replicated_parameter import ReplicatedParameter
from tensorshard.model.buffers import keeps_statistics
from tensorshard.model.forward_contexts import RootRole, hook_root
from tensorshard.model.parameters import ParameterPlaces
from tensorshard.model.trains_itself import call_before_methods
from tensorshard.model.watched_parameters import (
    Watch,
    held_gradient,
    hold_gradient,
    unwatch,
    watch,
)
from tensorshard.passes.precision import master_dtype
from tensorshard.plan.mesh import Mesh
from tensorshard.plan.storage import Place, Storage, TakeGradient, UpdateProgress
from tensorshard.sharded.sharded_model import ParameterSplit, ShardedModel
from tensorshard.torch_private.autograd import call_after_backward, current_backward, is_function_transformed
from tensorshard.torch_private.dispatch import without_torch_functions_of_tensors
from tensorshard.torch_private.fake_tensors import FakeTensor

# How many reductions may run at once when gradients are offloaded as they arrive; each keeps its gradients alive.
_IN_FLIGHT = 2


class ReplicatedModel(ShardedModel):
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
        self._level = level
        self._device = torch.device(mesh.device_mesh.device_type)
        self._units = units
        self._reduce_dtype = reduce_dtype
        self._shard_mesh, self._groups = _layout(mesh, level)
        self._all = self._materialize(values, precision, storage)
        self._masters = {name: p.master for name, p in self._all.items()}
        self._weights = PublishedWeights(self._all.values(), self._groups)
        self._unit_of = self._assign_units(units)
        self._in_flight: deque[Reduction] = deque()
        self._trained_flags: tuple[bool, ...] = ()
        self._arrange()
        self._most_in_flight = len(units) + 2 if self._groups.shard is None else _IN_FLIGHT
        self._accumulated: dict[ReplicatedParameter, torch.Tensor] = {}
        self._in_backward = False
        self._wrote: bool | None = None  # whether this backward's forward wrote parameters; None if nobody has looked
        self._is_guided = False  # the Engine says when backwards begin and end
        self._in_step = False  # in a step of the Engine, which scales losses so that gradients only need to be summed
        self._complete = True  # the gradients of the last backward have been averaged
        self._last = True
        self._final = True  # the step's gradients are complete after its next backward
        self._late: list[Bucket] = []  # gradients came after these were reduced in the same backward
        # A backward within a backward (reentrant checkpointing, reversible functions) adds to gradients again. The
        # first backward shows whether there is one. If so, reductions wait for the end.
        self._backwards_seen: set[int] | None = set()
        # The backward of a batch normalization is a collective, too. If ranks use different parameters, their units are
        # ready at different times. So all reductions come at the end: all ranks then make the same calls in one order.
        self._at_the_end = self._groups.communicate and any(map(keeps_statistics, model.modules()))
        self._shown_gradients: dict[ReplicatedParameter, _ShownGradient] = {}
        for parameter in self._all.values():
            self._watch(parameter)
        hook_root(model, RootRole.DATA_PARALLEL, before=self._before_forward)
        if self._groups.shard is not None:
            self._wait_before_forward(units)

    def held_numel(self) -> int:
        return sum(p.storage.numel() for p in self._all.values())

    def masters(self) -> dict[str, nn.Parameter]:
        return self._masters

    def trained_masters(self) -> dict[str, nn.Parameter]:
        self._arrange()
        return {name: p.master for name, p in self._all.items() if p.compute.requires_grad}

    @property
    def gradient_divisor(self) -> int:
        return 1

    def discard_gradients(self) -> None:
        while self._in_flight:
            self._in_flight.popleft().finish()
        self._launched = 0
        self._accumulated.clear()
        self._late.clear()
        for bucket in self._buckets:
            bucket.ready.clear()
        for p in self._all.values():
            if p in self._shown_gradients:
                unwatch(p.compute, self._shown_gradients.pop(p))
            p.compute.grad = None
            p.forget_gradient()
        self._in_backward = self._is_guided = False

    def abandon_step(self) -> None:
        while self._in_flight:
            self._in_flight.popleft().abandon()
        self.discard_gradients()
        self._complete = True
        self._in_step = False

    def begin_micro_batch(self, last: bool, *, average: bool = False) -> None:
        self._final = last
        self._last = last or (self._level == 2 and self._groups.shard is not None)
        self._complete = False
        self._in_step = not average
        self._is_guided = True

    def finish_micro_batch(self) -> None:
        self._end_of_backward()
        self._is_guided = True  # until finish_backward

    def finish_backward(self) -> None:
        if not self._complete:
            self._finish()
        self._is_guided = self._in_step = False

    def watch_gradients(self, take: TakeGradient, finish: Callable[[], None]) -> None:
        super().watch_gradients(take, finish)
        self._most_in_flight = _IN_FLIGHT
        for parameter in self._all.values():
            parameter.take_gradient, parameter.finish_gradients = take, finish

    def master_places(self) -> dict[str, Place]:
        return {name: p.place for name, p in self._all.items()}

    # -- values --

    def all_gather_parameters(self, copied: Container[torch.Tensor] = ()) -> None:
        for bucket in self._buckets:
            self._weights.publish(bucket, copied)

    def watch_updates(self, update: UpdateProgress) -> None:
        self._weights.update = update
        if self._groups.shard is None:  # else forwards already wait for gathers
            self._wait_before_forward(self._units)
        # Units that this forward did not call are gathered, too: another rank may have called them.
        hook_root(self.model, RootRole.BACKGROUND_UPDATE, after=lambda *_: self._weights.publish_updated(), always=True)

    def gather_as_updated(self, copied: Container[torch.Tensor] = ()) -> None:
        self._weights.publish_as_updated(self._call_order(), copied)

    def all_gather_loaded(self) -> None:
        self.all_gather_parameters()
        self._weights.publish(self._frozen)

    def finish_gather(self) -> None:
        self._wait()
        self.adopt_writes()
        self._wait()

    def _wait(self) -> None:
        for bucket in [*self._buckets, self._frozen]:
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
        return self.split.num_shards(name) > 1 or (p is not None and p.is_copy and p.num_shards > 1)

    def shows_part(self, name: str) -> bool:
        return self.split.num_shards(name) > 1

    def master_shown_in_state_dicts(self, name: str) -> nn.Parameter | None:
        p = self._all.get(name)
        return p.master if p is not None and p.is_copy else None

    def shown_value(self, name: str, full: torch.Tensor) -> torch.Tensor:
        value = self.split.local(name, full)
        p = self._all.get(self._aliases.get(name, name))
        if p is not None:
            p.set_master(value)
        return value

    @torch.no_grad()
    def set_value(self, name: str, value: torch.Tensor) -> None:
        p = self._all[self._aliases.get(name, name)]
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
    ) -> dict[str, ReplicatedParameter]:
        """Replaces the parameters on the meta device by real ones. Ties are kept."""
        made: dict[str, ReplicatedParameter] = {}
        templates = dict(self.model.named_parameters())
        places = ParameterPlaces(self.model)
        for name, value in values:
            made[name] = ReplicatedParameter(name, value, templates[name], precision, self._shard_mesh, storage)
            places.replace(templates[name], made[name].compute)
        return made

    def _assign_units(self, units: list[list[nn.Module]]) -> dict[ReplicatedParameter, int]:
        """The index of each parameter's unit. Two more are for parameters in no unit: those before the first unit, and
        the others."""
        by_compute = {p.compute: p for p in self._all.values()}
        unit_of: dict[ReplicatedParameter, int] = {}
        for index, unit in enumerate(units):
            for module in unit:
                for compute in module.parameters():
                    if compute in by_compute:
                        unit_of.setdefault(by_compute[compute], index)
        assigned: dict[ReplicatedParameter, int] = {}
        seen_unit = False
        for p in self._all.values():
            seen_unit = seen_unit or p in unit_of
            assigned[p] = unit_of.get(p, len(units) if seen_unit else -1)
        return assigned

    def _arrange(self) -> None:
        """Fills the buckets with the parameters that are trained now, if these have changed."""
        with without_torch_functions_of_tensors():
            trained = tuple([p.compute.requires_grad for p in self._all.values()])
        if trained == self._trained_flags:
            return
        if self._trained_flags:
            self.finish_gather()
        self._trained_flags = trained
        members: dict[int, list[ReplicatedParameter]] = {}
        frozen = []
        for p, is_trained in zip(self._all.values(), trained, strict=True):
            if p.master is not p.compute:
                p.master.requires_grad_(is_trained)
            if is_trained:
                members.setdefault(self._unit_of[p], []).append(p)
            else:
                frozen.append(p)
        self._frozen = Bucket(frozen)
        self._of_units = {index: Bucket(members[index]) for index in sorted(members)}
        self._buckets = list(self._of_units.values())
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._order = list(reversed(self._buckets))  # backward meets the units last to first
        self._launched = 0

    def _call_order(self) -> list[Bucket]:
        """The buckets in the order in which forwards wait for them."""
        in_units = range(len(self._units))
        rest = [bucket for index, bucket in self._of_units.items() if index not in in_units]
        return [*rest, *(bucket for index, bucket in self._of_units.items() if index in in_units)]

    def _before_forward(self, *_: Any) -> None:
        if not is_function_transformed():  # there nothing may be written
            self.adopt_writes()

    # -- gradients --

    def _watch(self, parameter: ReplicatedParameter) -> None:
        # Weak references: the garbage collector does not see those of such a hook, and would never free the model.
        model, watched = weakref.ref(self), weakref.ref(parameter)

        def ready(_: torch.Tensor) -> None:
            this, its = model(), watched()
            assert this is not None and its is not None
            this._gradient_ready(its)

        compute = parameter.compute
        if not (compute.is_floating_point() or compute.is_complex()):
            return
        trained = compute.requires_grad
        compute.requires_grad_(True)  # else no hook could be registered, which one needs when it is trained later
        compute.register_post_accumulate_grad_hook(ready)
        compute.requires_grad_(trained)

    def _begin_backward(self) -> None:
        self._in_backward, self._wrote = True, None
        self._arrange()
        if not self._is_guided:
            call_after_backward(self._end_of_backward)

    def _gradient_ready(self, parameter: ReplicatedParameter) -> None:
        if not self._in_backward:
            self._begin_backward()
        bucket = self._bucket_of[parameter]
        if self._backwards_seen is not None:
            self._backwards_seen.add(current_backward())
        if not self._last and (self._groups.communicate or self._take_gradient is None):
            self._keep(parameter)
            return
        self._complete = False
        if not self._groups.communicate:
            self._take_local(parameter)
            return
        if bucket in self._order[: self._launched]:
            if bucket not in self._late:
                self._late.append(bucket)
            return
        bucket.ready.add(parameter)
        deferred = self._at_the_end or self._backwards_seen is not None
        while not deferred and self._launched < len(self._order):
            bucket = self._order[self._launched]
            if len(bucket.ready) < len(bucket.parameters):
                break
            self._reduce(bucket)
            self._launched += 1

    def _keep(self, parameter: ReplicatedParameter) -> None:
        """Between micro-batches: 16-bit gradients are summed in fp32, others where autograd sums them."""
        gradient = held_gradient(parameter.compute)
        assert gradient is not None
        if gradient.dtype == master_dtype(gradient.dtype):
            return
        if parameter in self._accumulated:
            self._accumulated[parameter].add_(gradient)
        else:
            self._accumulated[parameter] = gradient.float()
        hold_gradient(parameter.compute, None)

    def _take_local(self, parameter: ReplicatedParameter) -> None:
        """Takes a gradient on one rank, where it needs no reduction."""
        if parameter.master is not parameter.compute:
            gradient = self._take(parameter)
            assert gradient is not None
            parameter.set_gradient(gradient.reshape(-1))
        elif self._take_gradient is not None:
            self._take_gradient(parameter.master)

    def _take(self, parameter: ReplicatedParameter) -> torch.Tensor | None:
        """Takes the parameter's gradient of all micro-batches since the last reduction."""
        gradient = held_gradient(parameter.compute) if parameter.given is None else parameter.given
        parameter.given = None
        hold_gradient(parameter.compute, None)
        earlier = self._accumulated.pop(parameter, None)
        if earlier is None:
            return gradient
        return earlier if gradient is None else earlier.add_(gradient)

    def _end_of_backward(self) -> None:
        self._in_backward = False
        if self._last and not (self._is_guided and self._final):
            self._finish()
        if self._finish_gradients is not None:
            self._finish_gradients()

    def _finish(self) -> None:
        self._arrange()
        if self._groups.communicate:
            for bucket in [*self._order[self._launched :], *self._late]:
                self._reduce(bucket)
            for reduction in self._in_flight:
                reduction.advance()
            while self._in_flight:
                self._collect(self._in_flight.popleft())
            self._launched = 0
            self._late.clear()
        else:  # parameters that had a gradient only in an earlier micro-batch
            for parameter in list(self._accumulated):
                self._take_local(parameter)
        if self._finish_gradients is not None:
            self._finish_gradients()
        if self._backwards_seen is not None:
            self._at_the_end = self._at_the_end or len(self._backwards_seen) > 1
            self._backwards_seen = None
        self._in_backward = False
        self._complete = True
        if not self._in_step:
            self._show_gradients()

    def _reduce(self, bucket: Bucket) -> None:
        while len(self._in_flight) >= self._most_in_flight:
            self._collect(self._in_flight.popleft())
        for reduction in self._in_flight:
            reduction.advance()
        gradients = {p: self._take(p) for p in bucket.parameters}
        scale = 1.0 if self._in_step else 1.0 / self._groups.data_ranks
        bucket.ready.clear()
        if self._wrote is None:  # the forward may have written some, too
            self._wrote = self._weights.are_written()
        wrote = self._wrote or bool(self._weights.written)
        self._in_flight.append(Reduction(bucket, gradients, self._groups, self._reduce_dtype, scale, wrote))

    def _collect(self, reduction: Reduction) -> None:
        reduction.finish()
        self.writers = reduction.writers

    # -- gradients as user code sees and sets them --

    def _show_gradients(self) -> None:
        """Makes ``p.grad`` show averaged gradients that the masters hold."""
        for p in self._all.values():
            if p.master is not p.compute and p.master.grad is not None and p not in self._shown_gradients:
                if isinstance(p.storage, FakeTensor):
                    return
                self._shown_gradients[p] = _ShownGradient(p)
                watch(p.compute, self._shown_gradients[p])

    def average_given_gradients(self) -> None:
        for p in self._shown_gradients:
            p.take_back_gradient()
        self._arrange()
        given = {p for p in self._bucket_of if p.has_given_gradient(self._groups.communicate)}
        if not given:
            return
        for bucket in self._order:
            members = given.intersection(bucket.parameters)
            if not members:
                continue
            if not self._groups.communicate:
                for p in members:
                    self._take_local(p)
                continue
            # Averaged gradients of the bucket stay out of the sum.
            averaged = {p: held_gradient(p.compute) for p in bucket.parameters if p not in members}
            for p in averaged:
                hold_gradient(p.compute, None)
            self._reduce(bucket)
            self._collect(self._in_flight.popleft())
            for p, gradient in averaged.items():
                hold_gradient(p.compute, gradient)
        if self._finish_gradients is not None:
            self._finish_gradients()
        self._show_gradients()

    # -- gathers --

    def _wait_before_forward(self, units: list[list[nn.Module]]) -> None:
        """Makes each unit's forward wait for the unit's gather, and the model's forward for all other parameters."""
        by_compute = {p.compute: p for p in self._all.values()}
        for unit in units:
            for module in unit:
                self._hook(module, {self._unit_of[by_compute[c]] for c in module.parameters() if c in by_compute})
        self._hook(self.model, set(self._unit_of.values()) - set(range(len(units))))
        self.model.register_state_dict_pre_hook(lambda *_: self.finish_gather())

    def _hook(self, module: nn.Module, units: set[int]) -> None:
        def wait(*_: Any) -> None:
            for unit in units:
                bucket = self._of_units.get(unit)
                if bucket is not None and (bucket.gathering or bucket.update_pending):
                    self._weights.wait(bucket)
            if module is self.model:
                self._weights.wait(self._frozen)

        if module is self.model:
            hook_root(module, RootRole.GATHERED_PARAMETERS, before=wait)
        else:
            module.register_forward_pre_hook(wait)
            call_before_methods(module, wait)


class _ShownGradient(Watch):
    """Shows the averaged gradient of a master, whole, as that of the parameter."""

    def __init__(self, parameter: ReplicatedParameter) -> None:
        self._parameter = parameter

    def gradient(self, parameter: nn.Parameter, held: torch.Tensor | None) -> torch.Tensor | None:
        return self._parameter.shown_gradient() if held is None else held

    def set_gradient(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> bool:
        return self._parameter.give_gradient(gradient)


@torch.no_grad()
def _copy(to: torch.Tensor, values: torch.Tensor) -> None:
    to.copy_(values)


def _layout(mesh: Mesh, level: int) -> tuple[DeviceMesh | None, Groups]:
    """The mesh over which parts are kept, and the groups over which gradients are averaged."""
    if level == 0 or mesh.degrees["dp_shard"] == 1:
        everyone = mesh.dp_group if mesh.dp_size > 1 else None
        return None, Groups(None, everyone, everyone, mesh.dp_size)
    replicate = mesh.group("dp_replicate") if mesh.degrees["dp_replicate"] > 1 else None
    return mesh.along("dp_shard"), Groups(mesh.group("dp_shard"), replicate, mesh.dp_group, mesh.dp_size)
