"""A sharded parameter that user code can read in full and write, as if it were a plain tensor.

torch's functions ask the class of their arguments what to do (``__torch_function__``). What they get here:

- Where gradients are recorded, a function reads the full parameter, as a forward does. The gradient is averaged over
  the data ranks together with the others.
- Else it computes on the shards where all of its tensors are sharded (an average of the weights, say), and on full
  tensors where some are plain.
- A write in place changes this rank's shard, also one to a view of the full tensor; plain tensors are cut to it.

Results that are sharded behave in the same way.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from tensorshard.comm.collectives import on_the_wire
from tensorshard.comm.sharding import distribute, local_shard, on_mesh_device
from tensorshard.model.tensors import another_takes_precedence
from tensorshard.model.watched_parameters import InUsersCode, Source, note_taken, run
from tensorshard.torch_private.dispatch import WithoutTorchFunctions, without_torch_functions_of_tensors
from tensorshard.torch_private.dtensor import DTensorWithDirectHooks, direct_attribute, shard_of
from tensorshard.torch_private.pytree import tree_map, tree_tensors
from tensorshard.torch_private.tensors import QUESTIONS, set_class, share_storage, tensor_version

_READER = "_tensorshard_reader"
_GRADIENT = "_whole_gradient"  # one that the user gave, until it is averaged over the data ranks


_stored_gradient: Any = DTensor.grad
# What does not read values, or is done for the shards.
NATIVE = frozenset(
    [
        *("size", "dim", "numel", "nelement", "ndimension", "stride", "storage_offset", "element_size"),
        *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_same_size", "is_pinned"),
        *("is_shared", "data_ptr", "untyped_storage", "storage", "get_device", "has_names", "requires_grad_"),
        *("retain_grad", "register_hook", "register_post_accumulate_grad_hook", "detach", "detach_"),
        *("backward", "__len__", "__repr__", "__hash__", "__format__", "__dir__", "__reduce_ex__"),
        *("__deepcopy__", "zeros_like", "ones_like", "empty_like", "full_like", "is_tensor", "is_storage"),
        *("result_type", "can_cast", "promote_types", "typename", "numel_", "share_memory_", "pin_memory"),
        *("is_inference", "__instancecheck__"),
        *QUESTIONS,
    ]
)
# What gives Python's or NumPy's values.
VALUES = frozenset(
    [
        *("tolist", "numpy", "item", "__array__", "__bool__", "__float__", "__int__", "__index__"),
        *("__complex__", "__contains__", "__iter__", "equal", "allclose", "is_nonzero"),
    ]
)
DRAWN = frozenset(
    [
        *("rand_like", "randn_like", "randint_like", "new_empty", "new_zeros", "new_ones", "new_full"),
        *("new_tensor",),
    ]
)
RANDOM = frozenset(
    [
        *("normal_", "uniform_", "trunc_normal_", "bernoulli_", "random_", "exponential_", "cauchy_"),
        *("log_normal_", "geometric_", "dropout_", "orthogonal_", "kaiming_uniform_", "kaiming_normal_"),
        *("xavier_uniform_", "xavier_normal_", "sparse_"),
    ]
)
# What gives a view of its argument, through which it may be written.
VIEWS = frozenset(
    [
        *("view", "view_as", "reshape", "reshape_as", "select", "__getitem__", "narrow", "transpose"),
        *("permute", "flatten", "unflatten", "squeeze", "unsqueeze", "chunk", "split", "unbind", "diagonal"),
        *("swapaxes", "swapdims", "movedim", "t", "ravel", "tensor_split", "hsplit", "vsplit", "unsafe_chunk"),
        *("unsafe_split", "as_strided", "split_with_sizes", "adjoint"),
    ]
)
COMPUTED_ATTRIBUTES = frozenset(["T", "mT", "H", "mH", "real", "imag"])
# What writes each element by itself, named without underscores.
ELEMENTWISE = frozenset(
    [
        *("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "iadd", "isub", "imul"),
        *("itruediv", "ipow", "pow", "copy", "zero", "fill", "clamp", "clip", "clamp_min", "clamp_max", "lerp"),
        *("addcmul", "addcdiv", "neg", "negative", "abs", "absolute", "sign", "sqrt", "rsqrt", "square", "exp"),
        *("log", "sigmoid", "tanh", "relu", "reciprocal", "round", "floor", "ceil", "trunc", "nan_to_num"),
        *("masked_fill", "floor_divide", "remainder", "fmod"),
    ]
)


class Reader(Protocol):
    """What a parameter asks of the model that it belongs to."""

    def read(self, parameter: DTensor) -> torch.Tensor:
        """The full parameter, with gradients where the parameter and the caller have them."""

    def set_gradient(self, parameter: DTensor, gradient: torch.Tensor) -> None:
        """Notes this rank's full `gradient`, which is averaged over the data ranks before the next update."""


def read_as_full(parameter: DTensor, reader: Reader) -> None:
    """Gives a sharded `parameter` the behaviour that this file is about. It stays the same object."""
    vars(parameter)[_READER] = _Held(reader)
    set_class(parameter, ShardedParameter)


def make_readable(tensor: Any) -> bool:
    """Makes a plain DTensor behave as a sharded parameter does; returns whether it was one."""
    if type(tensor) is not DTensor:
        return False
    set_class(tensor, ShardedParameter)
    return True


def make_plain(tensor: DTensor) -> None:
    """Undoes :func:`make_readable`."""
    if type(tensor) is ShardedParameter:
        set_class(tensor, DTensor)


class ReadInFull(InUsersCode):
    """Sharded parameters that the user's code reads in full, which no forward computes with.

    tensorshard's own code gets plain DTensors, without ``__torch_function__``, at the cost of an assignment each.

    Attributes:
        followers: called with whether the user's code runs from now on.
    """

    def __init__(self, parameters: Iterable[DTensor]) -> None:
        super().__init__()
        self._parameters = list(parameters)
        self.followers: list[Callable[[bool], None]] = []

    def switch(self, users_code: bool) -> None:
        before, after = (DTensor, ShardedParameter) if users_code else (ShardedParameter, DTensor)
        for parameter in self._parameters:
            if type(parameter) is before:  # else it is watched, too
                set_class(parameter, after)
        for follower in self.followers:
            follower(users_code)


class _Held:
    """A reader that copies of a parameter share."""

    def __init__(self, reader: Reader | None) -> None:
        self.reader = reader

    def __deepcopy__(self, memo: Any) -> "_Held":
        return self

    def __reduce__(self) -> Any:  # a parameter in a file has no model
        return _Held, (None,)


class ShardedParameter(DTensorWithDirectHooks):
    """A DTensor that mixes with plain tensors. See the top of this file."""

    requires_grad = direct_attribute("requires_grad")
    is_sparse = direct_attribute("is_sparse")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if len(types) > 1 and another_takes_precedence(types):
            return NotImplemented  # a tensor that is split along a sequence reads the full parameter
        return _KINDS[_kind(func)](func, args, kwargs or {})

    @property
    def grad(self) -> torch.Tensor | None:
        if _GRADIENT in (own := self.__dict__):
            return own[_GRADIENT]  # type: ignore[no-any-return]
        with WithoutTorchFunctions():
            return _mixable(_stored_gradient.__get__(self))  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            if value.shape != self.shape:
                raise RuntimeError(
                    f"a gradient of shape {list(value.shape)} was given to a parameter of shape {list(self.shape)}"
                )
            _reader_of(self).set_gradient(self, value)
            return
        self.__dict__.pop(_GRADIENT, None)
        make_readable(value)
        with WithoutTorchFunctions():
            _stored_gradient.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """The full tensor. The gradient of a parameter is averaged over the data ranks."""
        if grad_placements is None and torch.is_grad_enabled() and self.requires_grad:
            return _full(self)
        with without_torch_functions_of_tensors():
            return super().full_tensor(grad_placements=grad_placements)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _as_dtensor(lambda: DTensor.__reduce_ex__(self, protocol), self)  # type: ignore[misc]

    def __deepcopy__(self, memo: Any) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        copy = _as_dtensor(lambda: DTensor.__deepcopy__(self, memo), self)
        set_class(copy, ShardedParameter)
        memo[id(self)] = copy
        return copy


def _as_dtensor(action: Callable[[], Any], parameter: DTensor) -> Any:
    """Runs an `action` that does not know subclasses, and that shall not copy the parameter's model."""
    held = vars(parameter).pop(_READER, None)
    set_class(parameter, DTensor)
    try:
        return action()
    finally:
        set_class(parameter, ShardedParameter)
        if held is not None:
            vars(parameter)[_READER] = held


def _reader_of(parameter: DTensor) -> Reader:
    held = vars(parameter).get(_READER)
    if held is None or held.reader is None:
        raise RuntimeError(
            "a plain tensor was given as the gradient of a sharded tensor that is no parameter of the model; give one "
            "that is sharded, such as torch.zeros_like of it"
        )
    reader: Reader = held.reader
    return reader


def _native(func: Any, args: Any, kwargs: Any) -> Any:
    with WithoutTorchFunctions():
        return _mixable(func(*args, **kwargs))


def _take_data(func: Any, args: Any, kwargs: Any) -> Any:
    """``parameter.data``, through which it may be written."""
    if isinstance(args[0], nn.Parameter):
        note_taken(args[0])
    return _native(func, args, kwargs)


def _mixable(result: Any) -> Any:
    """Makes sharded results behave as parameters do."""
    if not make_readable(result) and isinstance(result, tuple | list):
        for each in result:
            make_readable(each)
    return result


def _full(tensor: Any) -> Any:
    """A DTensor in full; anything else as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    held = vars(tensor).get(_READER)
    if held is not None and held.reader is not None:
        return held.reader.read(tensor)
    with without_torch_functions_of_tensors():
        if tensor.requires_grad and torch.is_grad_enabled():
            return tensor.full_tensor()
        return on_mesh_device(tensor.detach()).full_tensor()  # type: ignore[arg-type]


def _compute(func: Any, args: Any, kwargs: Any) -> Any:
    """Computes something new: on shards, where that is possible and no gradient is recorded."""
    if kwargs.get("out") is not None:
        return _write(func, args, kwargs)
    leaves = tree_tensors((args, kwargs))
    if all(isinstance(leaf, DTensor) or leaf.numel() == 1 for leaf in leaves) and not _is_recorded(leaves):
        try:
            return _native(func, args, kwargs)
        except (RuntimeError, NotImplementedError, ValueError, IndexError, AssertionError):
            pass  # there is no rule for shards; if it is the caller's mistake, it fails again with full tensors
    return _compute_full(func, args, kwargs)


def _compute_full(func: Any, args: Any, kwargs: Any) -> Any:
    """Computes with full tensors. What is written to them, or later to a view that is returned, reaches the shards."""
    sources: dict[int, Source] = {}

    def full(leaf: Any) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        if id(leaf) not in sources:
            sources[id(leaf)] = _source(leaf, shares_numbers=_is_random(func))
        return sources[id(leaf)].base

    given, options = tree_map(full, (args, kwargs))
    same = {id(sources[id(leaf)].base): leaf for leaf in tree_tensors((args, kwargs)) if id(leaf) in sources}
    with without_torch_functions_of_tensors():
        return run(func, given, options, sources.values(), same)


def _source(target: DTensor, *, shares_numbers: bool) -> Source:
    """The full tensor of `target`.

    Args:
        shares_numbers: whether all ranks take what the first one writes, as they may have drawn other numbers.
    """

    def write(full: torch.Tensor) -> None:
        if shares_numbers:
            for axis in range(target.device_mesh.ndim):
                dist.broadcast(on_the_wire(full), group=target.device_mesh.get_group(axis), group_src=0)
        local = shard_of(target)
        local.copy_(local_shard(full, target.device_mesh, target.placements).view(local.shape))

    full = _full(target)
    if share_storage(full, shard_of(target)):  # with one rank
        full = full.clone()
    return Source(full, lambda: tensor_version(shard_of(target)), lambda: _full(target).detach(), write)


def _draw(func: Any, args: Any, kwargs: Any) -> Any:
    """New tensors, of which each rank has all: random numbers, say."""
    args, kwargs = tree_map(_empty_full, (args, kwargs))
    return func(*args, **kwargs)


def _empty_full(tensor: Any) -> Any:
    if not isinstance(tensor, DTensor):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device_mesh.device_type)


def _write(func: Any, args: Any, kwargs: Any) -> Any:
    """Writes into the first argument, or into ``out=``."""
    out = kwargs.get("out")
    target = out if out is not None else args[0] if args else next(iter(kwargs.values()))
    name: str = getattr(func, "__name__", "")
    if isinstance(target, list | tuple):
        return (
            _native(func, _cut_lists(args), kwargs)
            if any(isinstance(t, DTensor) for t in target)
            else (_compute_full(func, args, kwargs))
        )
    if not isinstance(target, DTensor):
        return _compute_full(func, args, kwargs)
    if target.requires_grad and torch.is_grad_enabled() and getattr(func, "__module__", None) != nn.init.__name__:
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    if name.strip("_") in ELEMENTWISE:
        args, kwargs = tree_map(lambda leaf: _cut(leaf, target), (args, kwargs))
        result = _native(func, args, kwargs)
        with without_torch_functions_of_tensors():
            increment_version(target.to_local().detach())  # operations on DTensors change their parts unnoticed
        return result
    with torch.no_grad():
        return _compute_full(func, args, kwargs)


def _cut(leaf: Any, like: DTensor) -> Any:
    """A plain tensor, of which every rank has all, cut as `like` is. Numbers and DTensors stay."""
    if not isinstance(leaf, torch.Tensor) or isinstance(leaf, DTensor) or leaf.dim() == 0:
        return leaf
    with without_torch_functions_of_tensors():
        cut = distribute(leaf.detach().expand(like.shape), like.device_mesh, like.placements)
        local = like.to_local()
        return cut if cut.to_local().device == local.device else cut.to(local.device)


def _cut_lists(args: Any) -> Any:
    first = args[0]

    def cut(one: Any) -> Any:
        if not isinstance(one, list | tuple) or len(one) != len(first):
            return one
        return [_cut(leaf, like) if isinstance(like, DTensor) else leaf for leaf, like in zip(one, first, strict=True)]

    return (first, *(cut(one) for one in args[1:]))


def _set(func: Any, args: Any, kwargs: Any) -> Any:
    """``parameter.data = value``: the parameter keeps its memory, which the next gather reads."""
    target, value = args
    if not isinstance(target, DTensor):
        with without_torch_functions_of_tensors():
            return func(target, _full(value))
    if value.shape != target.shape:
        raise RuntimeError(
            f"data of shape {list(value.shape)} was given to a sharded parameter of shape {list(target.shape)}"
        )
    with torch.no_grad():
        torch.Tensor.copy_(target, value)
    return None


def _differentiate(func: Any, args: Any, kwargs: Any) -> Any:
    raise RuntimeError(
        "torch.autograd.grad was called by parameters of engine.optimizer.param_groups, which no forward computes "
        "with: call it by those of engine.model.parameters()"
    )


def _is_recorded(leaves: list[torch.Tensor]) -> bool:
    return torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)


_KINDS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "native": _native,
    "data": _take_data,
    "compute": _compute,
    "full": _compute_full,
    "draw": _draw,
    "write": _write,
    "set": _set,
    "grad": _differentiate,
}


def _is_random(func: Any) -> bool:
    return getattr(func, "__name__", "") in RANDOM


@cache
def _kind(func: Any) -> str:
    name: str = getattr(func, "__name__", "")
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    if name == "__get__":
        return "data" if attribute == "data" else "full" if attribute in COMPUTED_ATTRIBUTES else "native"
    if name == "__set__":
        return "set" if attribute == "data" else "native"
    if func is torch.autograd.grad:
        return "grad"
    if name in NATIVE or name == "__delete__":
        return "native"
    if name in VALUES or name in VIEWS:
        return "full"
    if name in DRAWN:
        return "draw"
    return "write" if is_write(name) else "compute"


def is_write(name: str) -> bool:
    """Whether the function with this name writes into its first argument."""
    if name == "__setitem__":
        return True
    if name.startswith("__"):
        return name.startswith("__i") and name not in ("__index__", "__int__", "__iter__", "__invert__")
    return name.endswith("_") and name != "requires_grad_"
