"""One parameter that is split over tensor-parallel ranks, or sharded as well, and what functions do with it whole."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.distributed.tensor import DTensor

from tensorshard.comm.sharding import distribute_like, on_mesh_device
from tensorshard.modules.watched_parameters import Watch, watches_of
from tensorshard.modules.written_through import Source, WrittenThrough, run
from tensorshard.tensor_parallel.apply import part_operations
from tensorshard.tensor_parallel.apply.tensor_split import TensorSplit
from tensorshard.torch_private.dispatch import without_torch_functions_of_tensors
from tensorshard.torch_private.dtensor import shard_of
from tensorshard.torch_private.pytree import tree_leaves, tree_map_only
from tensorshard.torch_private.tensors import tensor_version


class WholeParameter(Watch):
    """How one parameter looks whole.

    Args:
        shape: of the full parameter.
        is_users_call: whether the code that asks is to get the whole.
        is_sharded: whether ZeRO 3 shards the part.
    """

    stays_in_copies = True
    is_outermost = True

    def __init__(
        self, name: str, split: TensorSplit, shape: torch.Size, is_users_call: Callable[[], bool], is_sharded: bool
    ) -> None:
        self.name, self.shape, self.is_sharded = name, shape, is_sharded
        self.layout = split.layout(name)
        self._split, self._is_users_call = split, is_users_call

    def __deepcopy__(self, memo: dict[int, Any]) -> "WholeParameter":
        return self

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """The whole of which each rank gives its `part`. A collective."""
        return self._split.full(self.name, part, self.shape)

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of `whole`, in memory of its own."""
        return self._split.local(self.name, whole)

    def call(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        if function in part_operations.OF_THE_OBJECT or not self._is_users_call():
            return NotImplemented
        return _call(function, args, kwargs)

    def gradient(self, parameter: nn.Parameter, held: torch.Tensor | None) -> torch.Tensor | None:
        if held is None or not self._is_users_call():
            return held
        return self.shown(held)

    def held_gradient(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None or not self._is_users_call():
            return gradient
        if isinstance(gradient, DTensor):
            return gradient
        if gradient.shape != self.shape:
            raise RuntimeError(
                f"a gradient of shape {list(gradient.shape)} was assigned to {self.name!r} of shape {list(self.shape)}"
            )
        if isinstance(gradient, WrittenThrough):
            gradient = gradient._plain
        part = self.cut(gradient)
        return distribute_like(part, parameter) if isinstance(parameter, DTensor) else part

    def source(self, held: torch.Tensor, *, graph: bool) -> Source:
        """The whole of what this rank has as `held`."""
        if graph and self.is_sharded:
            raise RuntimeError(
                f"parameter {self.name!r} was read outside of the model's forward while autograd records, as a penalty "
                f"on the weights does, under a plan with tp={self._split.size} and zero=3, where its gradient could "
                f"not be counted once: use zero=0, 1 or 2 with tp; under torch.no_grad() it can be read"
            )
        base = _Gathered.apply(held, self) if graph else self._read(held)
        return Source(base, partial(_version, held), partial(self._read, held), partial(self._store, held))

    def shown(self, held: torch.Tensor) -> torch.Tensor:
        """A tensor that is the whole of `held`, and writes to it."""
        source = self.source(held, graph=held.requires_grad)
        return WrittenThrough.of(source.base, source)

    @torch.no_grad()
    def _read(self, held: torch.Tensor) -> torch.Tensor:
        with without_torch_functions_of_tensors():
            part = held.detach()
            return self.gather(on_mesh_device(part).full_tensor() if isinstance(part, DTensor) else part)

    def _store(self, held: torch.Tensor, whole: torch.Tensor) -> None:
        with without_torch_functions_of_tensors():
            part = self.cut(whole)
            if self.is_sharded and not isinstance(held, DTensor):
                raise RuntimeError(
                    f"parameter {self.name!r} was written to between a forward and its backward, where zero=3 shows a "
                    f"gathered copy: write to it after the backward"
                )
            if isinstance(held, DTensor):
                note_write = getattr(held, "note_write", None)  # the data ranks compare what was written
                if note_write is not None:
                    note_write(part)
                shard_of(held).copy_(distribute_like(part, held).to_local())
            else:
                held.copy_(part)

    def write(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Writes the whole `value` to `parameter`.

        Raises:
            RuntimeError: it has another shape.
        """
        if value.shape != self.shape:
            raise RuntimeError(
                f"a tensor of shape {list(value.shape)} was assigned to the data of {self.name!r}, whose shape is "
                f"{list(self.shape)}, and whose memory is split over tensor-parallel ranks: assign one of its shape"
            )
        with torch.no_grad():
            self._store(parameter, value)


def _version(held: torch.Tensor) -> int:
    """Counts changes of `held`: of a DTensor those that DTensor makes, and those of the shard itself."""
    with without_torch_functions_of_tensors():
        return tensor_version(held) + (tensor_version(shard_of(held)) if isinstance(held, DTensor) else 0)


class _Gathered(Function):
    """The whole, from the ranks' parts; all of them compute the same with it."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, watching: WholeParameter) -> torch.Tensor:
        ctx.watching = watching
        return watching.gather(part)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return PartOf.apply(grads[0], ctx.watching), None


class PartOf(Function):
    """This rank's part of what all ranks hold."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, watching: WholeParameter) -> torch.Tensor:
        ctx.watching = watching
        return watching.cut(whole)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Gathered.apply(grads[0], ctx.watching), None


# -- what functions do with whole parameters --


def _whole_watch(value: Any) -> WholeParameter | None:
    """The watch that makes `value` look whole, if it is a split parameter."""
    if not isinstance(value, nn.Parameter):
        return None
    return next((w for w in watches_of(value) if isinstance(w, WholeParameter)), None)


def _call(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """``function(*args, **kwargs)`` with whole parameters."""
    first: Any = args[0] if args else None
    own = _whole_watch(first)
    if function is torch.autograd.grad:
        return _autograd_gradients(args, kwargs)
    if own is not None:
        if function in part_operations.OF_SHAPES:
            with without_torch_functions_of_tensors():
                return function(first.new_empty(()).expand(own.shape), *args[1:], **kwargs)
        if function == part_operations.SET_DATA:
            value = args[1]
            return own.write(first, value._plain if isinstance(value, WrittenThrough) else value)
        if function == part_operations.REPRESENTATION:
            return f"Parameter of shape {list(own.shape)}, of which each tensor-parallel rank holds a part"
        plain = not isinstance(first, DTensor)
        if plain and function in part_operations.ELEMENTWISE and _on_parts(function, own, args, kwargs):
            return first
    sources: dict[int, Source] = {}
    graph = torch.is_grad_enabled() and function not in part_operations.WITHOUT_GRAPH

    def whole(parameter: nn.Parameter) -> torch.Tensor:
        watching = _whole_watch(parameter)
        if watching is None:
            return parameter
        if id(parameter) not in sources:
            with without_torch_functions_of_tensors():
                sources[id(parameter)] = watching.source(parameter, graph=graph and parameter.requires_grad)
        return sources[id(parameter)].base

    given, options = tree_map_only(nn.Parameter, whole, (tuple(args), kwargs))
    parameters = {id(p): p for p in tree_leaves((args, kwargs)) if id(p) in sources}
    same = {id(source.base): parameters[key] for key, source in sources.items()}
    return run(function, given, options, sources.values(), same)


def _on_parts(function: Callable[..., Any], own: WholeParameter, args: Any, kwargs: dict[str, Any]) -> bool:
    """Does an element by element operation on this rank's part; False if it needs what other ranks have."""

    def part(value: Any) -> Any:
        if isinstance(value, WrittenThrough):
            value = value._plain
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return value
        watching = _whole_watch(value)
        if watching is not None:
            return value if (watching.layout, watching.shape) == (own.layout, own.shape) else None
        return own.cut(value) if type(value) is torch.Tensor and value.shape == own.shape else None

    given = [part(value) for value in args]
    options = {key: part(value) for key, value in kwargs.items()}
    for before, after in zip((*args, *kwargs.values()), (*given, *options.values()), strict=True):
        if before is not None and after is None:
            return False
    with without_torch_functions_of_tensors():
        function(*given, **options)
    return True


def _autograd_gradients(args: Any, kwargs: dict[str, Any]) -> Any:
    """``torch.autograd.grad``: the gradients of whole parameters are whole."""
    outputs, inputs, *others = args
    several = isinstance(inputs, tuple | list)
    wanted = list(inputs) if several else [inputs]
    if any((watching := _whole_watch(parameter)) and watching.is_sharded for parameter in wanted):
        raise RuntimeError(
            "torch.autograd.grad was asked for gradients of parameters that zero=3 shards, and forwards compute with "
            "gathered ones: call engine.backward(loss) and read p.grad, or use zero=0, 1 or 2"
        )
    given, wanted_plain, rest, options = tree_map_only(
        WrittenThrough, lambda leaf: leaf._plain, (outputs, wanted, others, kwargs)
    )
    with without_torch_functions_of_tensors():
        found = torch.autograd.grad(given, wanted_plain, *rest, **options)
    return tuple(_whole_gradient(_whole_watch(p), gradient) for p, gradient in zip(wanted, found, strict=True))


def _whole_gradient(watching: WholeParameter | None, gradient: torch.Tensor | None) -> torch.Tensor | None:
    if watching is None or gradient is None:
        return gradient
    if gradient.dim() > len(watching.shape):  # is_grads_batched
        return torch.stack([_Gathered.apply(row, watching) for row in gradient])
    return _Gathered.apply(gradient, watching)
