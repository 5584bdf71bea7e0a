"""ZeRO 0, 1 and 2: every rank holds the whole parameters; gradients are averaged, optimizer states may be sharded.

A parameter's storage is padded to a multiple of the number of ranks, and the part that a rank updates is a view of it.
So the gather after an update writes straight into the parameters, and a reduction reads straight from the gradient that
autograd made. There are no flat copies of the model. (FSDP without resharding has a second copy of the parameters,
bucketed data parallelism one of the gradients.) Small or uneven parameters of a unit are sent in one packed message.

As with FSDP2, a module shows its master weights as parameters, except from the beginning of a forward to the end of the
backward that follows. So optimizers and ``clip_grad_norm_`` take ``model.parameters()``.
"""

import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tensorshard.comm.collectives import all_gather_into
from tensorshard.data_parallel.reduction import Bucket, Groups, Reduction
from tensorshard.data_parallel.replicated_parameter import ReplicatedParameter
from tensorshard.heads.under_plan.method_calls import call_before_heads
from tensorshard.mesh import Mesh
from tensorshard.modules.parameters import ParameterPlaces
from tensorshard.modules.running_statistics import keeps_statistics
from tensorshard.offload.slots import OffloadedMaster, Slots
from tensorshard.offload.update_behind import UpdateBehind
from tensorshard.sharded_model import ParameterSplit, ShardedModel, TakeGradient
from tensorshard.torch_private.autograd import call_after_backward
from tensorshard.torch_private.modules import own_parameters, set_parameter
from tensorshard.transforms.precision import master_dtype

# Reductions under way at once where gradients leave when they are reduced; more would keep more of them alive.
_IN_FLIGHT = 2


class ReplicatedModel(ShardedModel):
    """A model at ZeRO 0, 1 or 2: full parameters on every data rank, gradients averaged, states perhaps sharded.

    Args:
        model: the model on the meta device, its other transforms applied.
        values: name and full value of each parameter, one at a time.
        units: lists of modules whose parameters travel together.
        level: 0, 1 or 2.
        reduce_dtype: gradients are summed over the ranks in this type.
        slots: where master weights are kept that forwards do not compute with; None for the device.
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
        slots: Slots | None = None,
    ) -> None:
        super().__init__(model, split)
        self._level = level
        self._slots = slots
        self._device = torch.device(mesh.device_mesh.device_type)
        self._units = units
        self._behind: UpdateBehind | None = None
        self._to_follow: deque[Bucket] = deque()  # buckets whose update goes on, in the same order on all ranks
        self._copied: Container[torch.Tensor] = ()  # of these
        self._reduce_dtype = reduce_dtype
        self._shard_mesh, self._groups = _layout(mesh, level)
        everything = self._materialize(values, precision)
        self._parameters = {name: p for name, p in everything.items() if p.compute.requires_grad}
        self._frozen = Bucket([p for p in everything.values() if not p.compute.requires_grad])
        self._masters = {name: p.master for name, p in everything.items()}
        self._buckets = self._fill_buckets(units)
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        # Backward meets the units last to first.
        self._order = list(reversed(self._buckets))
        self._launched = 0
        self._in_flight: deque[Reduction] = deque()
        self._most_in_flight = len(self._buckets) if self._groups.shard is None else _IN_FLIGHT
        self._accumulated: dict[ReplicatedParameter, torch.Tensor] = {}
        self._in_backward = False
        self._in_step = False  # in a step of the Engine, which scales losses so that gradients only need to be summed
        self._complete = True  # the gradients of the last backward have been averaged
        self._last = True
        self._final = True  # the step's gradients are complete after its next backward
        self._interleaved = False
        # The backward of a batch normalization is a collective, too. If ranks use different parameters, their units are
        # ready at different times. So all reductions come at the end: all ranks then make the same calls in one order.
        self._at_the_end = self._groups.communicate and any(map(keeps_statistics, model.modules()))
        for parameter in self._parameters.values():
            self._watch(parameter)
        self._swaps = self._registrations()
        if self._swaps:
            self._show(computing=False)
            model.register_forward_pre_hook(lambda *_: self._show(computing=True), prepend=True)
            model.register_forward_hook(lambda *_: self._forward_over(), always_call=True)
        if self._groups.shard is not None:
            self._wait_before_forward(units)

    def held_numel(self) -> int:
        return sum(p.storage.numel() for p in [*self._parameters.values(), *self._frozen.parameters])

    def masters(self) -> dict[str, nn.Parameter]:
        return self._masters

    @property
    def gradient_divisor(self) -> int:
        return 1

    def discard_gradients(self) -> None:
        while self._in_flight:
            self._in_flight.popleft().finish()
        self._launched = 0
        self._accumulated.clear()
        for bucket in self._buckets:
            bucket.ready.clear()
        for parameter in self._parameters.values():
            parameter.compute.grad = None
        self._in_backward = False
        super().discard_gradients()

    def abandon_step(self) -> None:
        while self._in_flight:
            self._in_flight.popleft().abandon()
        self.discard_gradients()
        self._complete = True
        self._in_step = False
        self._interleaved = False
        self._show(computing=False)

    def begin_micro_batch(self, last: bool, *, average: bool = False) -> None:
        self._final = last
        self._last = last or (self._level == 2 and self._groups.shard is not None)
        self._complete = False
        self._in_step = not average

    @contextmanager
    def interleaved(self) -> Iterator[None]:
        self._interleaved = True
        self._show(computing=True)
        try:
            yield
        finally:
            self._interleaved = False
            self._show(computing=False)

    def finish_micro_batch(self) -> None:
        if self._last and not self._final:
            self._finish()

    def finish_backward(self) -> None:
        if not self._complete:
            self._finish()
        self._in_step = False

    def show_masters(self) -> None:
        self.finish_gather()
        self._show(computing=False)

    def watch_gradients(self, take: TakeGradient, finish: Callable[[], None]) -> None:
        super().watch_gradients(take, finish)
        self._most_in_flight = _IN_FLIGHT
        for parameter in self._parameters.values():
            parameter.take_gradient, parameter.finish_gradients = take, finish

    def offloaded_masters(self) -> dict[str, OffloadedMaster]:
        return {name: p.offloaded for name, p in self._parameters.items() if p.offloaded is not None}

    def all_gather_parameters(self, copied: Container[torch.Tensor] = ()) -> None:
        for bucket in self._buckets:
            self._publish(bucket, copied)

    def watch_updates(self, behind: UpdateBehind) -> None:
        self._behind = behind
        if self._groups.shard is None:  # else forwards already wait for gathers
            self._wait_before_forward(self._units)
        # Units that this forward did not call are gathered, too: another rank may have called them.
        self.model.register_forward_hook(lambda *_: self._follow(), always_call=True)

    def follow_behind(self, copied: Container[torch.Tensor] = ()) -> None:
        self._follow()
        self._copied = copied
        self._to_follow.extend(self._call_order)
        for bucket in self._to_follow:
            bucket.is_behind = True

    def _follow(self, last: Bucket | None = None) -> None:
        """Waits for updates and copies them to what forwards compute with, up to the bucket `last`; None for all."""
        while self._to_follow and (last is None or last.is_behind):
            assert self._behind is not None
            bucket = self._to_follow.popleft()
            bucket.is_behind = False
            self._behind.wait([p.master for p in bucket.parameters])
            self._publish(bucket, self._copied)

    def all_gather_loaded(self) -> None:
        self.all_gather_parameters()
        self._publish(self._frozen)

    # -- parameters --

    @torch.no_grad()
    def _materialize(
        self, values: Iterable[tuple[str, torch.Tensor]], precision: str
    ) -> dict[str, ReplicatedParameter]:
        """Replaces the parameters on the meta device by real ones. Ties are kept."""
        made: dict[str, ReplicatedParameter] = {}
        templates = dict(self.model.named_parameters())
        places = ParameterPlaces(self.model)
        for name, value in values:
            made[name] = ReplicatedParameter(name, value, templates[name], precision, self._shard_mesh, self._slots)
            places.replace(templates[name], made[name].compute)
        return made

    def _fill_buckets(self, units: list[list[nn.Module]]) -> list[Bucket]:
        """One bucket for each unit, and two more for parameters in no unit: those before the first unit, and the
        others."""
        by_compute = {p.compute: p for p in self._parameters.values()}
        unit_of: dict[ReplicatedParameter, int] = {}
        for index, unit in enumerate(units):
            for module in unit:
                for compute in module.parameters():
                    if compute in by_compute:
                        unit_of.setdefault(by_compute[compute], index)
        members: dict[int, list[ReplicatedParameter]] = {}
        seen_unit = False
        for p in self._parameters.values():
            seen_unit = seen_unit or p in unit_of
            members.setdefault(unit_of.get(p, len(units) if seen_unit else -1), []).append(p)
        return [Bucket(members[index]) for index in sorted(members)]

    def _registrations(self) -> list[tuple[nn.Module, str, ReplicatedParameter]]:
        """The places in modules where a master weight and what forwards compute with take turns."""
        everything = [*self._parameters.values(), *self._frozen.parameters]
        by_compute = {p.compute: p for p in everything if p.master is not p.compute}
        return [
            (module, name, by_compute[compute])
            for module in self.model.modules()
            for name, compute in own_parameters(module).items()
            if compute in by_compute
        ]

    def _show(self, computing: bool) -> None:
        for module, name, p in self._swaps:
            set_parameter(module, name, p.compute if computing else p.master)

    def _forward_over(self) -> None:
        # Else backward still needs them: recomputation runs the modules again.
        if not torch.is_grad_enabled() and not self._interleaved:
            self._show(computing=False)

    # -- gradients --

    def _watch(self, parameter: ReplicatedParameter) -> None:
        # Weak references: the garbage collector does not see those of such a hook, and would never free the model.
        model, watched = weakref.ref(self), weakref.ref(parameter)

        def ready(_: torch.Tensor) -> None:
            this, its = model(), watched()
            assert this is not None and its is not None
            this._gradient_ready(its)

        parameter.compute.register_post_accumulate_grad_hook(ready)

    def _gradient_ready(self, parameter: ReplicatedParameter) -> None:
        bucket = self._bucket_of[parameter]
        if bucket.gathering or bucket.is_behind:
            raise RuntimeError(
                f"parameter {parameter.name!r} was used before its update was over, or had arrived from the other "
                f"ranks, as the module that stands for its unit was never called itself; name the modules that are in "
                f"shard_units"
            )
        if not self._in_backward:
            self._in_backward = True
            call_after_backward(self._end_of_backward)
        if not self._last and (self._groups.communicate or self._take_gradient is None):
            self._keep(parameter)
            return
        self._complete = False
        if not self._groups.communicate:
            self._take_local(parameter)
            return
        self._bucket_of[parameter].ready.add(parameter)
        while not self._at_the_end and self._launched < len(self._order):
            bucket = self._order[self._launched]
            if len(bucket.ready) < len(bucket.parameters):
                break
            self._reduce(bucket)

    def _keep(self, parameter: ReplicatedParameter) -> None:
        """Between micro-batches: 16-bit gradients are summed in fp32, others where autograd sums them."""
        gradient = parameter.compute.grad
        assert gradient is not None
        if gradient.dtype == master_dtype(gradient.dtype):
            return
        if parameter in self._accumulated:
            self._accumulated[parameter].add_(gradient)
        else:
            self._accumulated[parameter] = gradient.float()
        parameter.compute.grad = None

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
        gradient, parameter.compute.grad = parameter.compute.grad, None
        earlier = self._accumulated.pop(parameter, None)
        if earlier is None:
            return gradient
        return earlier if gradient is None else earlier.add_(gradient)

    def _end_of_backward(self) -> None:
        self._in_backward = False
        self._end_backward()
        if self._finish_gradients is not None:
            self._finish_gradients()

    def _end_backward(self) -> None:
        if self._interleaved:  # the code that runs the backwards says when one is over
            return
        self._show(computing=False)
        if self._last:
            self._finish()

    def _finish(self) -> None:
        if self._groups.communicate:
            while self._launched < len(self._order):
                self._reduce(self._order[self._launched])
            for reduction in self._in_flight:
                reduction.advance()
            while self._in_flight:
                self._in_flight.popleft().finish()
            self._launched = 0
        else:  # parameters that had a gradient only in an earlier micro-batch
            for parameter in list(self._accumulated):
                self._take_local(parameter)
        if self._finish_gradients is not None:
            self._finish_gradients()
        self._complete = True

    def _reduce(self, bucket: Bucket) -> None:
        while len(self._in_flight) >= self._most_in_flight:
            self._in_flight.popleft().finish()
        for reduction in self._in_flight:
            reduction.advance()
        gradients = {p: self._take(p) for p in bucket.parameters}
        scale = 1.0 if self._in_step else 1.0 / self._groups.data_ranks
        bucket.ready.clear()
        self._launched += 1
        self._in_flight.append(Reduction(bucket, gradients, self._groups, self._reduce_dtype, scale))

    # -- parameters after an update --

    @torch.no_grad()
    def _publish(self, bucket: Bucket, copied: Container[torch.Tensor] = ()) -> None:
        self._wait(bucket)
        for p in bucket.parameters:
            if p.is_copy and p.master not in copied:
                local = p.local(p.master)
                p.storage[p.own][: local.numel()].copy_(local.reshape(-1))
        if self._groups.shard is not None:
            self._gather(bucket, self._groups.shard)

    def _gather(self, bucket: Bucket, group: dist.ProcessGroup) -> None:
        for p in bucket.alone:
            work = all_gather_into(p.storage, p.storage[p.own], group, async_op=True)
            assert work is not None
            bucket.gathering.append((work, None))
        packed = [p for p in bucket.packed if p.num_shards > 1]
        for dtype in sorted({p.storage.dtype for p in packed}, key=str):
            alike = [p for p in packed if p.storage.dtype == dtype]
            mine = torch.cat([p.storage[p.own] for p in alike])
            all_parts = mine.new_empty((group.size(), mine.numel()))
            work = all_gather_into(all_parts.view(-1), mine, group, async_op=True)
            assert work is not None
            bucket.gathering.append((work, (alike, all_parts)))

    @torch.no_grad()
    def _wait(self, bucket: Bucket) -> None:
        if bucket.is_behind:
            self._follow(bucket)
        for work, unpack in bucket.gathering:
            work.wait()
            if unpack is None:
                continue
            parameters, all_parts = unpack
            pieces = all_parts.split([p.chunk for p in parameters], dim=1)
            for p, piece in zip(parameters, pieces, strict=True):
                p.storage.view(p.num_shards, p.chunk).copy_(piece)
        bucket.gathering.clear()

    def _wait_before_forward(self, units: list[list[nn.Module]]) -> None:
        """Makes each unit's forward wait for the unit's gather, and the model's forward for all other parameters."""
        bucket_of = {p.master: bucket for bucket in self._buckets for p in bucket.parameters}
        in_units: set[int] = set()
        for unit in units:
            for module in unit:
                buckets = {id(bucket_of[m]): bucket_of[m] for m in module.parameters() if m in bucket_of}
                in_units.update(buckets)
                self._hook(module, list(buckets.values()))
        rest = [bucket for bucket in self._buckets if id(bucket) not in in_units]
        self._call_order = [*rest, *(bucket for bucket in self._buckets if id(bucket) in in_units)]
        self._hook(self.model, [*rest, self._frozen])
        self.model.register_state_dict_pre_hook(lambda *_: self.finish_gather())

    def _hook(self, module: nn.Module, buckets: list[Bucket]) -> None:
        def wait(*_: Any) -> None:
            for bucket in buckets:
                if bucket.gathering or bucket.is_behind:
                    self._wait(bucket)

        module.register_forward_pre_hook(wait)
        if module is not self.model:
            call_before_heads(module, wait)

    def finish_gather(self) -> None:
        for bucket in [*self._buckets, self._frozen]:
            self._wait(bucket)


def _layout(mesh: Mesh, level: int) -> tuple[DeviceMesh | None, Groups]:
    """The mesh over which parts are kept, and the groups over which gradients are averaged."""
    if level == 0 or mesh.degrees["dp_shard"] == 1:
        return None, Groups(None, mesh.dp_group if mesh.dp_size > 1 else None, mesh.dp_size)
    replicate = mesh.group("dp_replicate") if mesh.degrees["dp_replicate"] > 1 else None
    return mesh.along("dp_shard"), Groups(mesh.group("dp_shard"), replicate, mesh.dp_size)
