"""ZeRO 0, 1 and 2: every rank holds the whole parameters; gradients are averaged, optimizer states may be sharded.

A parameter's storage is padded to a multiple of the ranks, and the part that a rank updates is a view of it. So the
gather after an update writes straight into the parameters, and a reduction reads straight from the gradient that
autograd made: no flat copies of the model exist, which is what this has over wrapping FSDP with parameters left
unsharded (a second copy of the parameters) and over bucketed data parallelism (a second copy of the gradients).
Small or uneven parameters of a unit travel packed together.

As with FSDP2, a module shows its masters as parameters, but for the time from the beginning of a forward to the end of
the backward that follows: so ``model.parameters()`` is what an optimizer or ``clip_grad_norm_`` should be given.
"""

import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._guards import detect_fake_mode
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tensorshard.distributed.collectives import advance, all_gather_into, all_reduce_, reduce_scatter_into
from tensorshard.mesh import Mesh
from tensorshard.transforms.assign import ParameterPlaces, like
from tensorshard.transforms.precision import compute_dtype, master_dtype
from tensorshard.transforms.shard import ShardedModel
from tensorshard.transforms.tensor_split import TensorSplit

# A tensor of at least this many bytes travels by itself, without being copied.
_ALONE_BYTES = 1 << 16
# Reductions under way at once; more would keep more gradients alive.
_IN_FLIGHT = 2


class _Parameter:
    """One parameter: what forward computes with, and the part of it that this rank updates."""

    def __init__(
        self, name: str, value: torch.Tensor, template: nn.Parameter, precision: str, shard_mesh: DeviceMesh | None
    ) -> None:
        self.name = name
        self.parts = 1 if shard_mesh is None or value.dim() == 0 else shard_mesh.size()
        index = 0 if self.parts == 1 else shard_mesh.get_local_rank()  # type: ignore[union-attr]
        wide = master_dtype(value.dtype)
        narrow = compute_dtype(wide, precision)
        rows = value.size(0) if value.dim() else 1
        self.chunk_rows = -(-rows // self.parts)
        row = value[0].numel() if value.dim() and rows else 1
        self.chunk = self.chunk_rows * row
        self.even = self.chunk * self.parts == value.numel()

        self.storage = torch.zeros(self.chunk * self.parts, dtype=narrow, device=value.device)
        whole = self.storage[: value.numel()].view(value.shape)
        whole.copy_(value)
        self.compute = like(template, whole)
        self.own = slice(index * self.chunk, (index + 1) * self.chunk)
        if shard_mesh is None and narrow == wide:
            self.master = self.compute
            return
        first = min(index * self.chunk_rows, rows)
        mine = slice(first, min(first + self.chunk_rows, rows))
        if narrow == wide:
            local = whole[mine] if value.dim() else whole
        else:
            local = (value[mine] if value.dim() else value).to(wide).clone()
        if self.parts > 1:
            assert shard_mesh is not None
            shard: Any = DTensor.from_local(
                local, shard_mesh, [Shard(0)], run_check=False, shape=value.shape, stride=whole.stride()
            )
            self.master = like(template, shard)
        else:
            self.master = like(template, local)

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of a master or of its gradient."""
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def scatter_into(self, message: torch.Tensor, gradient: torch.Tensor) -> None:
        """Copies the whole `gradient` into `message` [parts, chunk], where row r is what rank r will keep."""
        flat = gradient.reshape(-1)
        if self.parts == 1:  # a parameter that is not sharded: every row is the whole
            message.copy_(flat.view(1, -1).expand_as(message))
            return
        if not self.chunk:
            return
        rows = flat.numel() // self.chunk
        message[:rows].copy_(flat[: rows * self.chunk].view(rows, self.chunk))
        if rows < message.size(0):
            rest = flat[rows * self.chunk :]
            message[rows, : rest.numel()].copy_(rest)

    def set_gradient(self, flat: torch.Tensor) -> None:
        """Adds `flat`, this rank's part of the averaged gradient with its padding, to the master's gradient."""
        local = self.local(self.master.detach())
        part = flat[: local.numel()].view(local.shape)
        if self.master.grad is not None:
            self.local(self.master.grad).add_(part)
        elif isinstance(self.master, DTensor):
            self.master.grad = DTensor.from_local(
                part,
                self.master.device_mesh,
                self.master.placements,
                run_check=False,
                shape=self.master.shape,
                stride=self.master.stride(),
            )
        else:
            self.master.grad = part


@dataclass(frozen=True)
class _Groups:
    """Who averages gradients with whom."""

    shard: dist.ProcessGroup | None  # each keeps a part of the sum
    sum: dist.ProcessGroup | None  # each keeps the same
    data_ranks: int

    @property
    def parts(self) -> int:
        return 1 if self.shard is None else self.shard.size()

    @property
    def communicate(self) -> bool:
        return self.data_ranks > 1


class _Bucket:
    """The parameters of one unit, and the transfers that concern them."""

    def __init__(self, parameters: list[_Parameter]) -> None:
        self.parameters = parameters
        self.alone = [p for p in parameters if p.even and p.storage.nbytes >= _ALONE_BYTES]
        self.packed = [p for p in parameters if p not in self.alone]
        self.ready: set[_Parameter] = set()
        self.gathering: list[tuple[dist.Work, Any]] = []


class ReplicatedModel(ShardedModel):
    """See the module's docstring.

    Args:
        model: the model on the meta device, its other transforms applied.
        values: name and full value of each parameter, one at a time.
        units: lists of modules whose parameters travel together.
        level: 0, 1 or 2.
        reduce_dtype: gradients are summed over the ranks in this type.
    """

    def __init__(
        self,
        model: nn.Module,
        values: Iterable[tuple[str, torch.Tensor]],
        units: list[list[nn.Module]],
        mesh: Mesh,
        split: TensorSplit,
        *,
        level: int,
        precision: str,
        reduce_dtype: torch.dtype,
    ) -> None:
        super().__init__(model, split)
        self._level = level
        self._reduce_dtype = reduce_dtype
        self._shard_mesh, self._groups = _layout(mesh, level)
        everything = self._materialize(values, precision)
        self._parameters = {name: p for name, p in everything.items() if p.compute.requires_grad}
        self._frozen = _Bucket([p for p in everything.values() if not p.compute.requires_grad])
        self._masters = {name: p.master for name, p in everything.items()}
        self._buckets = self._fill_buckets(units)
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        # Backward meets the units last to first.
        self._order = list(reversed(self._buckets))
        self._launched = 0
        self._in_flight: deque[_Reduction] = deque()
        self._accumulated: dict[_Parameter, torch.Tensor] = {}
        self._in_backward = False
        self._in_step = False  # of the Engine, which weighs losses so that gradients need only be summed
        self._complete = True  # the gradients of the last backward have been averaged
        self._last = True
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

    def begin_micro_batch(self, last: bool) -> None:
        self._last = last or (self._level == 2 and self._groups.shard is not None)
        self._complete = False
        self._in_step = True

    def finish_backward(self) -> None:
        if not self._complete:
            self._finish()
        self._in_step = False

    def publish_update(self) -> None:
        for bucket in self._buckets:
            self._publish(bucket)

    def publish_load(self) -> None:
        self.publish_update()
        self._publish(self._frozen)

    # -- parameters --

    @torch.no_grad()
    def _materialize(self, values: Iterable[tuple[str, torch.Tensor]], precision: str) -> dict[str, _Parameter]:
        """Puts real parameters in the place of the meta ones, ties kept."""
        made: dict[str, _Parameter] = {}
        templates = dict(self.model.named_parameters())
        places = ParameterPlaces(self.model)
        for name, value in values:
            made[name] = _Parameter(name, value, templates[name], precision, self._shard_mesh)
            places.replace(templates[name], made[name].compute)
        return made

    def _fill_buckets(self, units: list[list[nn.Module]]) -> list[_Bucket]:
        """One bucket a unit; what stands before the first unit and what stands after it are two more."""
        by_compute = {p.compute: p for p in self._parameters.values()}
        unit_of: dict[_Parameter, int] = {}
        for index, unit in enumerate(units):
            for module in unit:
                for compute in module.parameters():
                    if compute in by_compute:
                        unit_of.setdefault(by_compute[compute], index)
        members: dict[int, list[_Parameter]] = {}
        seen_unit = False
        for p in self._parameters.values():
            seen_unit = seen_unit or p in unit_of
            members.setdefault(unit_of.get(p, len(units) if seen_unit else -1), []).append(p)
        return [_Bucket(members[index]) for index in sorted(members)]

    def _registrations(self) -> list[tuple[nn.Module, str, _Parameter]]:
        """Where what is computed with and what is updated take turns."""
        everything = [*self._parameters.values(), *self._frozen.parameters]
        by_compute = {p.compute: p for p in everything if p.master is not p.compute}
        return [
            (module, name, by_compute[compute])
            for module in self.model.modules()
            for name, compute in module._parameters.items()
            if compute in by_compute
        ]

    def _show(self, computing: bool) -> None:
        for module, name, p in self._swaps:
            module._parameters[name] = p.compute if computing else p.master

    def _forward_over(self) -> None:
        if not torch.is_grad_enabled():  # else backward still needs them: recomputation runs the modules again
            self._show(computing=False)

    # -- gradients --

    def _watch(self, parameter: _Parameter) -> None:
        # Weak, because the garbage collector does not see what such a hook refers to, and so would never free a model.
        model, watched = weakref.ref(self), weakref.ref(parameter)

        def ready(_: torch.Tensor) -> None:
            this, its = model(), watched()
            assert this is not None and its is not None
            this._gradient_ready(its)

        parameter.compute.register_post_accumulate_grad_hook(ready)

    def _gradient_ready(self, parameter: _Parameter) -> None:
        if self._bucket_of[parameter].gathering:
            raise RuntimeError(
                f"parameter {parameter.name!r} was used before its update had arrived from the other ranks, as the "
                f"module that stands for its unit was never called itself; name the modules that are in shard_units"
            )
        if not self._in_backward:
            self._in_backward = True
            Variable._execution_engine.queue_callback(self._end_of_backward)
        if not self._last:
            self._keep(parameter)
            return
        self._complete = False
        if not self._groups.communicate:
            self._take_local(parameter)
            return
        self._bucket_of[parameter].ready.add(parameter)
        while self._launched < len(self._order):
            bucket = self._order[self._launched]
            if len(bucket.ready) < len(bucket.parameters):
                break
            self._reduce(bucket)

    def _keep(self, parameter: _Parameter) -> None:
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

    def _take_local(self, parameter: _Parameter) -> None:
        """Without other ranks the gradient is final as it is."""
        if parameter.master is not parameter.compute:
            gradient = self._take(parameter)
            assert gradient is not None
            parameter.set_gradient(gradient.to(parameter.master.dtype).view(-1))

    def _take(self, parameter: _Parameter) -> torch.Tensor | None:
        """The gradient of all micro-batches since the last reduction; the parameter gives it up."""
        gradient, parameter.compute.grad = parameter.compute.grad, None
        earlier = self._accumulated.pop(parameter, None)
        if earlier is None:
            return gradient
        return earlier if gradient is None else earlier.add_(gradient)

    def _end_of_backward(self) -> None:
        self._in_backward = False
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
        else:  # what had a gradient in an earlier micro-batch alone
            for parameter in list(self._accumulated):
                self._take_local(parameter)
        self._complete = True

    def _reduce(self, bucket: _Bucket) -> None:
        while len(self._in_flight) >= _IN_FLIGHT:
            self._in_flight.popleft().finish()
        for reduction in self._in_flight:
            reduction.advance()
        gradients = {p: self._take(p) for p in bucket.parameters}
        scale = 1.0 if self._in_step else 1.0 / self._groups.data_ranks
        bucket.ready.clear()
        self._launched += 1
        self._in_flight.append(_Reduction(bucket, gradients, self._groups, self._reduce_dtype, scale))

    # -- parameters after an update --

    @torch.no_grad()
    def _publish(self, bucket: _Bucket) -> None:
        self._wait(bucket)
        for p in bucket.parameters:
            if p.master is not p.compute and p.storage.dtype != p.master.dtype:
                local = p.local(p.master)
                p.storage[p.own][: local.numel()].copy_(local.reshape(-1))
        if self._groups.shard is not None:
            self._gather(bucket, self._groups.shard)

    def _gather(self, bucket: _Bucket, group: dist.ProcessGroup) -> None:
        for p in bucket.alone:
            work = all_gather_into(p.storage, p.storage[p.own], group, async_op=True)
            assert work is not None
            bucket.gathering.append((work, None))
        packed = [p for p in bucket.packed if p.parts > 1]
        for dtype in sorted({p.storage.dtype for p in packed}, key=str):
            alike = [p for p in packed if p.storage.dtype == dtype]
            mine = torch.cat([p.storage[p.own] for p in alike])
            all_parts = mine.new_empty((group.size(), mine.numel()))
            work = all_gather_into(all_parts.view(-1), mine, group, async_op=True)
            assert work is not None
            bucket.gathering.append((work, (alike, all_parts)))

    @torch.no_grad()
    def _wait(self, bucket: _Bucket) -> None:
        for work, unpack in bucket.gathering:
            work.wait()
            if unpack is None:
                continue
            parameters, all_parts = unpack
            pieces = all_parts.split([p.chunk for p in parameters], dim=1)
            for p, piece in zip(parameters, pieces, strict=True):
                p.storage.view(p.parts, p.chunk).copy_(piece)
        bucket.gathering.clear()

    def _wait_before_forward(self, units: list[list[nn.Module]]) -> None:
        """Each unit's gather must be over when its forward begins; the rest's when the model's does."""
        bucket_of = {p.master: bucket for bucket in self._buckets for p in bucket.parameters}
        in_units: set[int] = set()
        for unit in units:
            for module in unit:
                buckets = {id(bucket_of[m]): bucket_of[m] for m in module.parameters() if m in bucket_of}
                in_units.update(buckets)
                self._hook(module, list(buckets.values()))
        rest = [bucket for bucket in self._buckets if id(bucket) not in in_units]
        self._hook(self.model, [*rest, self._frozen])
        self.model.register_state_dict_pre_hook(lambda *_: self.finish_gather())

    def _hook(self, module: nn.Module, buckets: list[_Bucket]) -> None:
        def wait(*_: Any) -> None:
            for bucket in buckets:
                if bucket.gathering:
                    self._wait(bucket)

        module.register_forward_pre_hook(wait)

    def finish_gather(self) -> None:
        for bucket in [*self._buckets, self._frozen]:
            self._wait(bucket)


class _Reduction:
    """The averaging of one bucket's gradients over the data ranks, under way.

    A parameter that had no gradient on any rank must end with none, as on one device, while one that had some on
    another rank ends with that one's share. So the packed message ends with a count for each parameter of the ranks
    that had a gradient; it is read only where this rank had none.
    """

    def __init__(
        self,
        bucket: _Bucket,
        gradients: dict[_Parameter, torch.Tensor | None],
        groups: _Groups,
        dtype: torch.dtype,
        scale: float,
    ) -> None:
        self._groups = groups
        self._scale = scale
        self._bucket = bucket
        self._missing = {p for p, gradient in gradients.items() if gradient is None}
        self._alone: list[tuple[_Parameter, Any, torch.Tensor]] = []
        for p in bucket.alone:
            gradient = gradients[p]
            if gradient is None:
                gradient = torch.zeros_like(p.compute)
            message = gradient.to(_travelling(gradient.dtype, dtype)).contiguous()
            self._alone.append((p, *self._start(message.view(-1))))
        self._packed = self._start(self._pack(gradients, dtype))

    def _pack(self, gradients: dict[_Parameter, torch.Tensor | None], dtype: torch.dtype) -> torch.Tensor:
        """[ranks of the shard group, parts of the packed parameters and the counts], flattened."""
        bucket, parts = self._bucket, self._groups.parts
        for p in bucket.packed:
            dtype = _travelling(p.compute.dtype, dtype)
        chunk = sum(p.chunk for p in bucket.packed)
        message = torch.zeros(
            (parts, chunk + len(bucket.parameters)), dtype=dtype, device=bucket.parameters[0].storage.device
        )
        offset = 0
        for p in bucket.packed:
            gradient = gradients[p]
            if gradient is not None:
                p.scatter_into(message[:, offset : offset + p.chunk], gradient)
            offset += p.chunk
        for i, p in enumerate(bucket.parameters):
            if gradients[p] is not None:
                message[:, chunk + i] = 1.0
        return message.view(-1)

    def _start(self, message: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """Starts the sum of `message`; returns the transfer and where this rank's part of the sum will be."""
        groups = self._groups
        if groups.shard is None:
            assert groups.sum is not None
            return all_reduce_(message, groups.sum, async_op=True), message
        part = message.new_empty(message.numel() // groups.parts)
        work = reduce_scatter_into(part, message, groups.shard, async_op=True)
        if groups.sum is not None:
            assert work is not None
            work.wait()
            work = all_reduce_(part, groups.sum, async_op=True)
        return work, part

    @torch.no_grad()
    def advance(self) -> None:
        """Starts the second half of transfers that go in two."""
        for _, work, _ in self._alone:
            advance(work)
        advance(self._packed[0])

    @torch.no_grad()
    def finish(self) -> None:
        """Waits, and hands each master its gradient."""
        self.advance()  # all second halves under way before the first is waited for
        bucket = self._bucket
        work, packed = self._packed
        work.wait()
        absent = self._missing
        if absent and detect_fake_mode(packed) is None:  # fake tensors have no counts; there, all ranks are alike
            counts = packed[packed.numel() - len(bucket.parameters) :].tolist()
            absent = {p for p, count in zip(bucket.parameters, counts, strict=True) if count < 0.5}
        if self._scale != 1.0:
            packed.mul_(self._scale)
        offset = 0
        for p in bucket.packed:
            if p not in absent:
                p.set_gradient(packed[offset : offset + p.chunk].to(p.master.dtype))
            offset += p.chunk
        for p, work, part in self._alone:
            work.wait()
            if self._scale != 1.0:
                part.mul_(self._scale)
            if p not in absent:
                p.set_gradient(part.to(p.master.dtype))


def _travelling(dtype: torch.dtype, requested: torch.dtype) -> torch.dtype:
    """The type that gradients of `dtype` are summed in: the requested one, unless the model is fp64."""
    return dtype if dtype == torch.float64 else requested


def _layout(mesh: Mesh, level: int) -> tuple[DeviceMesh | None, _Groups]:
    """Over which mesh parts are kept, and who averages with whom."""
    if level == 0 or mesh.degrees["dp_shard"] == 1:
        return None, _Groups(None, mesh.dp_group if mesh.dp_size > 1 else None, mesh.dp_size)
    replicate = mesh.group("dp_replicate") if mesh.degrees["dp_replicate"] > 1 else None
    return mesh.along("dp_shard"), _Groups(mesh.group("dp_shard"), replicate, mesh.dp_size)
