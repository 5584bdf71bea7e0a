"""Mixed precision: the type of computation, and what stays in fp32 with any type (Micikevicius et al. 2018).

Also here: code that mixes 16-bit parameters or activations with fp32 buffers, where torch's functions want one type.

Under a 16-bit precision parameters are 16 bits wide and buffers are not. Arithmetic, products and attention take both.
Some functions do not: norms, ``lerp``, writing by an index; and products where the code switches autocast off, as
routers and norms in fp32 do. In modules whose code uses these, their arguments are given one type: the wider, or that
of the tensor that is written to.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import ParametrizationList
from torch.overrides import TorchFunctionMode

from tensorshard.model.forwards import Forward, Role, replace_forward, runs_forward_of, wrap_forward
from tensorshard.model.model_errors import explained_types
from tensorshard.model.reachable_state import forward_classes, used_by_forwards
from tensorshard.torch_private.modules import NormBase, own_buffers, own_parameters, set_parameter, spectral_norm_hooks
from tensorshard.torch_private.pytree import tree_leaves, tree_map

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_PER_SAMPLE = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_NORMS = (*_PER_SAMPLE, NormBase)
_NARROW = (torch.bfloat16, torch.float16)

_NORM_FUNCTIONS = (
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
_NAMES = frozenset((*_NORM_FUNCTIONS, *_SAME_TYPE, *_INTO, *_WRITES, *_WITHOUT_AUTOCAST, "addmv_"))


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that the optimizer updates a parameter of `dtype` in: fp32 at least."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def held_dtype(parameter: torch.Tensor) -> torch.dtype:
    """The type in which the values of `parameter` are kept: that of its master, or its own if it is frozen."""
    return master_dtype(parameter.dtype) if parameter.requires_grad else parameter.dtype


def compute_dtype(dtype: torch.dtype, precision: str) -> torch.dtype:
    """The type in which forward computes with a parameter whose master is of `dtype`."""
    return DTYPES[precision] if dtype == torch.float32 else dtype


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """The context that a forward runs in.

    Raises:
        MixedTypesError: inside, an operation was given tensors of different types.
    """
    return nullcontext() if precision == "fp32" else _autocast(precision, device)


@contextmanager
def _autocast(precision: str, device: torch.device) -> Iterator[None]:
    with explained_types(precision), torch.autocast(device.type, DTYPES[precision]):
        yield


def widen_output(output: Any) -> Any:
    """`output` with 16-bit tensors cast to fp32, so that losses are computed in fp32."""
    return tree_map(_widen, output)


def keep_norms_fp32(modules: Iterable[nn.Module]) -> None:
    """Makes norms among `modules`, and modules that compute a weight from parameters, compute from fp32 parameters.

    Norms are torch's normalization layers and subclasses, whose own forwards run; autocast casts their inputs. They
    cost little, their sums lose most in 16 bits, and some kernels refuse weights narrower than the statistics. Weights
    are computed by parametrizations and spectral norms, whose vectors stay fp32 too.
    """
    for module in modules:
        if runs_forward_of(module, *_PER_SAMPLE):
            # With another self, the module is not changed meanwhile, so a recomputed block is compiled in one piece.
            replace_forward(module, Role.FP32, MethodType(type(module).forward, _WideParameters(module)))
        elif isinstance(module, _NORMS):
            wrap_forward(module, Role.FP32, partial(_from_fp32, [module]))
        elif isinstance(module, ParametrizationList):
            wrap_forward(module, Role.FP32, partial(_without_autocast, module))
        for hook in spectral_norm_hooks(module):
            compute = partial(_without_autocast, module, hook.compute_weight)
            vars(hook)["compute_weight"] = compute  # the hook is the module's, and is copied with it


def _without_autocast(module: nn.Module, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    """Calls `forward` all in fp32. `module` and its children hold the parameters that it reads."""
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    with torch.autocast(device.type, enabled=False):
        return _from_fp32(list(module.modules()), forward, *args, **kwargs)


def _from_fp32(modules: list[nn.Module], forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    """Calls `forward` while the parameters of `modules`, without those of their children, are read as fp32."""
    before = [(module, name, parameter) for module in modules for name, parameter in own_parameters(module).items()]
    for module, name, parameter in before:
        set_parameter(module, name, _widen(parameter))
    try:
        return forward(*args, **kwargs)
    finally:
        for module, name, parameter in before:
            set_parameter(module, name, parameter)


def check_supported(precision: str, device: torch.device) -> None:
    """Raises if the device cannot compute in `precision`.

    Raises:
        ValueError: a small product, forward and backward, fails on the device.
    """
    if precision == "fp32":
        return
    try:
        with torch.enable_grad():
            weight = torch.ones(8, 8, dtype=DTYPES[precision], device=device, requires_grad=True)
            nn.functional.linear(nn.functional.layer_norm(weight, (8,)), weight).sum().backward()
    except RuntimeError as error:
        raise ValueError(
            f"precision={precision!r} does not work on {device.type} ({error}); use 'fp32'"
            + (" or 'bf16'" if precision == "fp16" else "")
        ) from error


class _WideParameters:
    """Replaces a norm as ``self``, and gives its parameters as fp32."""

    def __init__(self, norm: nn.Module) -> None:
        self._norm = norm

    def __getattr__(self, name: str) -> Any:
        return _widen(getattr(self._norm, name))


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16):
        return value.float()
    return value


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
        (_NORM_FUNCTIONS, "norm"),
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
