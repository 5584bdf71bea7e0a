"""One parameter that is split over tensor-parallel ranks, or sharded as well, and what functions do with it whole."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.distributed.tensor import DTensor

from tensorshard.comm import differentiable as collectives
from tensorshard.comm.sharding import distribute_like, on_mesh_device
from tensorshard.model.watched_parameters import Source, Watch, WrittenThrough, run, watches_of
from tensorshard.tensor_parallel.apply.tensor_split import TensorSplit
from tensorshard.torch_private.dispatch import without_torch_functions_of_tensors
from tensorshard.torch_private.dtensor import shard_of
from tensorshard.torch_private.pytree import tree_leaves, tree_map_only
from tensorshard.torch_private.tensors import object_attributes, tensor_version


class FullView(Watch):
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
        self.cuts = split.cuts(name)
        self._split, self._is_users_call = split, is_users_call

    def __deepcopy__(self, memo: dict[int, Any]) -> "FullView":
        return self

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """The whole of which each rank gives its `part`. A collective."""
        return self._split.full(self.name, part, self.shape)

    def sum_gradients(self, whole: torch.Tensor) -> torch.Tensor:
        """The gradient of the whole: the sum of the ranks', where they have different samples."""
        return collectives.reduce(whole, self._split.group) if self._split.of_data_ranks else whole

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of `whole`, in memory of its own."""
        return self._split.local(self.name, whole)

    def call(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        if function in _OF_THE_OBJECT or not self._is_users_call():
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
            axis = "ep" if self._split.of_data_ranks else "tp"
            raise RuntimeError(
                f"parameter {self.name!r} was read outside of the model's forward while autograd records, as a penalty "
                f"on the weights does, under a plan with {axis}={self._split.size} and zero=3, where its gradient "
                f"could not be counted once: use zero=0, 1 or 2 with {axis}; under torch.no_grad() it can be read"
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
    """The whole, from the ranks' parts; all of them compute the same with it, or each with its own samples."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, view: FullView) -> torch.Tensor:
        ctx.view = view
        return view.gather(part)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return PartOf.apply(ctx.view.sum_gradients(grads[0]), ctx.view), None


class PartOf(Function):
    """This rank's part of what all ranks hold."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, view: FullView) -> torch.Tensor:
        ctx.view = view
        return view.cut(whole)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Gathered.apply(grads[0], ctx.view), None


# -- what functions do with whole parameters --

_T: Any = torch.Tensor


_OF_THE_OBJECT = frozenset(
    [
        *object_attributes(),
        *(_T.requires_grad_, _T.register_hook, _T.register_post_accumulate_grad_hook, _T.retain_grad, _T.backward),
        *(_T.data_ptr, _T.untyped_storage, _T.storage, _T.storage_offset, _T.is_shared, _T.is_pinned, _T.get_device),
        *(_T.is_floating_point, _T.is_complex, _T.element_size, _T.is_inference, torch.is_floating_point),
        *(torch.is_complex, torch.autograd.backward, torch.is_inference, _T.is_signed),
    ]
)
"""They ask for the tensor as an object, its type or its place in autograd's graph. A part answers as the whole does."""

_OF_SHAPES = frozenset(
    [
        *(_T.shape.__get__, _T.ndim.__get__, _T.nbytes.__get__, _T.itemsize.__get__),
        *(_T.size, _T.dim, _T.ndimension, _T.numel, _T.nelement, _T.__len__, torch.numel),
        *(torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.rand_like, torch.randn_like),
        *(_T.new_zeros, _T.new_ones, _T.new_empty, _T.new_full, _T.new_tensor),
    ]
)
"""They need the shape, type and device only."""

_SET_DATA = _T.data.__set__
_REPRESENTATION = _T.__repr__

_ELEMENTWISE = frozenset(
    [
        *(_T.zero_, _T.fill_, _T.copy_, _T.add_, _T.sub_, _T.mul_, _T.div_, _T.neg_, _T.abs_, _T.sign_, _T.pow_),
        *(_T.clamp_, _T.clamp_min_, _T.clamp_max_, _T.clip_, _T.sqrt_, _T.exp_, _T.tanh_, _T.sigmoid_, _T.relu_),
        *(_T.lerp_, _T.addcmul_, _T.addcdiv_, _T.nan_to_num_, _T.round_, _T.masked_fill_, _T.reciprocal_, _T.rsqrt_),
        *(_T.__iadd__, _T.__isub__, _T.__imul__, _T.__itruediv__),
    ]
)
"""They change a tensor in place, each element by itself."""

_WITHOUT_GRAPH = frozenset([_T.data.__get__, _T.detach, torch.detach])
"""They return the tensor out of autograd's graph."""


def _view_of(value: Any) -> FullView | None:
    """The watch that makes `value` look whole, if it is a split parameter."""
    if not isinstance(value, nn.Parameter):
        return None
    return next((w for w in watches_of(value) if isinstance(w, FullView)), None)


def _call(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """``function(*args, **kwargs)`` with whole parameters."""
    first: Any = args[0] if args else None
    own = _view_of(first)
    if function is torch.autograd.grad:
        return _autograd_gradients(args, kwargs)
    if own is not None:
        if function in _OF_SHAPES:
            with without_torch_functions_of_tensors():
                return function(first.new_empty(()).expand(own.shape), *args[1:], **kwargs)
        if function == _SET_DATA:
            value = args[1]
            return own.write(first, value._plain if isinstance(value, WrittenThrough) else value)
        if function == _REPRESENTATION:
            return f"Parameter of shape {list(own.shape)}, of which each tensor-parallel rank holds a part"
        plain = not isinstance(first, DTensor)
        if plain and function in _ELEMENTWISE and _on_parts(function, own, args, kwargs):
            return first
    sources: dict[int, Source] = {}
    graph = torch.is_grad_enabled() and function not in _WITHOUT_GRAPH

    def whole(parameter: nn.Parameter) -> torch.Tensor:
        view = _view_of(parameter)
        if view is None:
            return parameter
        if id(parameter) not in sources:
            with without_torch_functions_of_tensors():
                sources[id(parameter)] = view.source(parameter, graph=graph and parameter.requires_grad)
        return sources[id(parameter)].base

    given, options = tree_map_only(nn.Parameter, whole, (tuple(args), kwargs))
    parameters = {id(p): p for p in tree_leaves((args, kwargs)) if id(p) in sources}
    same = {id(source.base): parameters[key] for key, source in sources.items()}
    return run(function, given, options, sources.values(), same)


def _on_parts(function: Callable[..., Any], own: FullView, args: Any, kwargs: dict[str, Any]) -> bool:
    """Does an element by element operation on this rank's part; False if it needs what other ranks have."""

    def part(value: Any) -> Any:
        if isinstance(value, WrittenThrough):
            value = value._plain
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return value
        view = _view_of(value)
        if view is not None:
            return value if (view.cuts, view.shape) == (own.cuts, own.shape) else None
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
    if any((view := _view_of(parameter)) and view.is_sharded for parameter in wanted):
        raise RuntimeError(
            "torch.autograd.grad was asked for gradients of parameters that zero=3 shards, and forwards compute with "
            "gathered ones: call engine.backward(loss) and read p.grad, or use zero=0, 1 or 2"
        )
    given, wanted_plain, rest, options = tree_map_only(
        WrittenThrough, lambda leaf: leaf._plain, (outputs, wanted, others, kwargs)
    )
    with without_torch_functions_of_tensors():
        gradients = torch.autograd.grad(given, wanted_plain, *rest, **options)
    return tuple(_full_gradient(_view_of(p), gradient) for p, gradient in zip(wanted, gradients, strict=True))


def _full_gradient(view: FullView | None, gradient: torch.Tensor | None) -> torch.Tensor | None:
    if view is None or gradient is None:
        return gradient
    if gradient.dim() > len(view.shape):  # is_grads_batched
        return torch.stack([_Gathered.apply(row, view) for row in gradient])
    return _Gathered.apply(gradient, view)
