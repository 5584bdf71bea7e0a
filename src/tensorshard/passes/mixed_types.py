"""Code that mixes 16-bit parameters or activations with fp32 buffers, where torch's functions want one type.

Under a 16-bit precision parameters are 16 bits wide and buffers are not. Arithmetic, products and attention take both.
Some functions do not: norms, ``lerp``, writing by an index; and products where the code switches autocast off, as
routers and norms in fp32 do. In modules whose code uses these, their arguments are given one type: the wider, or that
of the tensor that is written to.
"""

from collections.abc import Iterable
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tensorshard.model.forwards import Forward, Role, wrap_forward
from tensorshard.model.reachable_state import forward_classes, used_by_forwards
from tensorshard.torch_private.modules import own_buffers
from tensorshard.torch_private.pytree import tree_leaves, tree_map

_NARROW = (torch.bfloat16, torch.float16)

_NORMS = (
    "layer_norm", "group_norm", "batch_norm", "instance_norm", "rms_norm", "native_layer_norm", "native_group_norm",
    "native_batch_norm",
)  # fmt: skip
"""Functions whose weights have one type, which may be wider than that of what is normalized."""

_SAME_TYPE = (
    "lerp", "dot", "vdot", "mv", "addmv", "tensordot", "bilinear", "cross", "heaviside",
    "searchsorted", "bucketize", "cdist",
)  # fmt: skip
"""Functions and methods that want one type, and return it."""

_INTO = ("index_add", "index_copy", "index_put", "scatter", "scatter_add", "scatter_reduce", "masked_scatter", "put")
"""Those that write values into a copy of their first argument; with ``_`` at the end, into the argument itself."""

_PRODUCTS = (
    "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "einsum", "inner", "conv1d", "conv2d", "conv3d",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "scaled_dot_product_attention", "prelu", "chain_matmul",
    "__matmul__", "__rmatmul__", "multi_head_attention_forward",
)  # fmt: skip
"""Those that autocast gives one type, where it is on."""

_WITHOUT_AUTOCAST = ("autocast", "custom_fwd", "autocast_instance")
_WRITES = (*(f"{name}_" for name in _INTO), "lerp_")
_NAMES = frozenset((*_NORMS, *_SAME_TYPE, *_INTO, *_WRITES, *_WITHOUT_AUTOCAST, "addmv_"))


def give_one_type(modules: Iterable[nn.Module]) -> None:
    """Makes the functions that want one type get it in those of `modules` whose code uses them."""
    uses: dict[type[nn.Module], tuple[bool, bool]] = {}
    for module in modules:
        cls = type(module)
        if cls not in uses:
            code = used_by_forwards(forward_classes(cls))
            uses[cls] = not _NAMES.isdisjoint(code.names), code.writes_items
        calls, writes_items = uses[cls]
        # ``buffer[index] = h`` is an assignment without a name.
        if calls or (writes_items and any(b.is_floating_point() for b in own_buffers(module).values())):
            wrap_forward(module, Role.ONE_TYPE, _with_one_type)


def _with_one_type(forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    with OneType():
        return forward(*args, **kwargs)


class OneType(TorchFunctionMode):
    """Inside, functions that want one type get it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        rule = _rules().get(func)
        if rule is not None and (rule != "product" or not _is_autocast_on(args, kwargs)):
            args, kwargs = _in_one_type(rule, args, kwargs)
        return func(*args, **kwargs)


def _in_one_type(rule: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    types = {t.dtype for t in _floating(args, kwargs)}
    if len(types) < 2 or types.isdisjoint(_NARROW):
        return args, kwargs
    if rule == "write":
        target = args[0] if args else next(_floating(args, kwargs))
        if not (isinstance(target, torch.Tensor) and target.is_floating_point()):
            return args, kwargs
        wanted = target.dtype
    else:
        wanted = torch.promote_types(*types) if len(types) == 2 else torch.float32
    if rule == "norm" and args:
        return (args[0], *tree_map(partial(_cast, wanted), args[1:])), tree_map(partial(_cast, wanted), kwargs)
    return tree_map(partial(_cast, wanted), (args, kwargs))


def _floating(args: Any, kwargs: Any) -> Any:
    return (v for v in tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor) and v.is_floating_point())


def _cast(dtype: torch.dtype, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != dtype:
        return value.to(dtype)
    return value


def _is_autocast_on(args: Any, kwargs: Any) -> bool:
    device = next((t.device.type for t in _floating(args, kwargs)), "cpu")
    return torch.is_autocast_enabled(device)


@cache
def _rules() -> dict[Any, str]:
    """The rule of each function: "norm", "same", "write" or "product"."""
    places = (torch, torch.Tensor, F, torch.linalg)
    rules = {}
    for names, rule in (
        (_NORMS, "norm"),
        (_SAME_TYPE, "same"),
        (_INTO, "write"),
        (_WRITES, "write"),
        (_PRODUCTS, "product"),
    ):
        for name in names:
            rules.update({getattr(place, name): rule for place in places if hasattr(place, name)})
    rules[torch.Tensor.__setitem__] = "write"
    rules[torch.Tensor.addmv_] = "write"
    return rules
