"""A module's own tensors, hooks and conversions; base classes of its layers.

`BatchNormBase`, `NormBase`, `DropoutBase`: the base classes of batch normalizations, of batch and instance
normalizations, and of dropouts, in all dimensions.

Why: users' layers derive from them, and so do layers that later versions of torch add.

Checked: torch 2.13 and 2.15.

Public way: a tuple of all public classes, which misses such layers.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.modules.dropout import _DropoutNd as DropoutBase
from torch.nn.utils.spectral_norm import SpectralNorm

from tensorshard.torch_private.patches import replaced

__all__ = [
    "CONVOLUTIONS",
    "RECURRENT_LISTS",
    "REFERENCES",
    "TABLES",
    "TRANSPOSED_CONVOLUTIONS",
    "BatchNormBase",
    "ConvertibleModule",
    "DropoutBase",
    "NormBase",
    "arguments_of_call",
    "buffer_at",
    "buffer_names",
    "buffer_table",
    "called_module",
    "check_batch_norm_input",
    "clear_forward_hooks",
    "clear_hooks",
    "every_module",
    "forward_hook_tables",
    "forward_hooks",
    "forward_pre_hooks",
    "has_backward_hooks",
    "move_hooks_outward",
    "overrides_convolution",
    "own_buffers",
    "own_modules",
    "own_parameters",
    "parameter_at",
    "refresh_recurrent_weights",
    "registrations",
    "replace_forward_hooks",
    "reset_method",
    "set_buffer",
    "set_parameter",
    "spectral_norm_hooks",
    "truncated_normal_replaced",
    "without_values",
]

_CALLS = frozenset((nn.Module._call_impl.__code__, nn.Module._wrapped_call_impl.__code__))
_LOADS = frozenset((nn.Module._load_from_state_dict.__code__, nn.Module._apply.__code__))


def called_module(frame: FrameType, *, or_loaded: bool = False) -> nn.Module | None:
    """The module whose call `frame` runs, around its forward; None if it is another frame.

    Args:
        or_loaded: whether the loading of its state dict, and the conversion of its tensors, count, too.

    Why: in a traceback, such a frame stands for the file of the module's class. In the stack, it tells who reads.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    if frame.f_code in _CALLS or (or_loaded and frame.f_code in _LOADS):
        module: nn.Module = frame.f_locals["self"]
        return module
    return None


def arguments_of_call(frame: FrameType) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and the named arguments of the call in a frame of :func:`called_module`.

    Why: an error says what the module that failed was called with.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    return frame.f_locals["args"], frame.f_locals["kwargs"]


def spectral_norm_hooks(module: nn.Module) -> list[SpectralNorm]:
    """The hooks of :func:`torch.nn.utils.spectral_norm`, which compute a weight before each forward of `module`.

    Why: their weights are computed from others, in a type of their own.

    Checked: torch 2.13 and 2.15.

    Public way: none; the class has no documented name.
    """
    return [hook for hook in forward_pre_hooks(module) if isinstance(hook, SpectralNorm)]


TABLES = ("_parameters", "_buffers", "_modules")
"""Where a module's ``__dict__`` keeps what is registered; every other entry is a plain attribute."""

REFERENCES = "_tensorshard_references"
"""Where a module's ``__dict__`` keeps references to what it registers. See ``model/references.py``."""

RECURRENT_LISTS = ("_flat_weights", "_flat_weight_refs")
"""Attributes of ``nn.RNNBase`` that hold its parameters. It compares them with the parameters before each forward.

Why: they need not follow the parameters.

Checked: torch 2.13 and 2.15.

Public way: none.
"""

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED_CONVOLUTIONS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
"""They are split as convolutions are, in 1, 2 and 3 dimensions."""


def overrides_convolution(module: nn.Module) -> bool:
    """Whether the class of `module` computes the convolution in its own way, inside of the forward of torch's class.

    Why: such a class (one that standardizes its weights, say) inherits torch's forward, which calls its own method.

    Checked: torch 2.13 and 2.15.

    Public way: none; a subclass could be told from its base by ``type(module)`` alone.
    """
    bases = [cls for cls in (*CONVOLUTIONS, *TRANSPOSED_CONVOLUTIONS) if isinstance(module, cls)]
    return any(type(module)._conv_forward is not cls._conv_forward for cls in bases)  # type: ignore[attr-defined]


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are registered on `module` itself, by the names they have there.

    Why: ties have to be found under both names, and a class may override ``named_parameters``.

    Checked: torch 2.13 and 2.15.

    Public way: ``named_parameters(recurse=False, remove_duplicate=False)``, where a class does not override it.
    """
    return {name: parameter for name, parameter in module._parameters.items() if parameter is not None}


def registrations(modules: Iterable[nn.Module]) -> list[dict[str, Any]]:
    """For each of `modules`, the dicts in which it registers its parameters and its submodules: not copies.

    Why: what user code registers later has to be noticed in every step, at no cost.

    Checked: torch 2.13 and 2.15.

    Public way: ``named_parameters()`` and ``named_children()``, which take a tenth of a millisecond a block.
    """
    return [table for module in modules for table in (module._parameters, module._modules)]


def has_functional_weights(tables: Iterable[dict[str, Any]]) -> bool:
    """Whether ``torch.func.functional_call`` has put tensors into these dicts of parameters (:func:`registrations`).

    Why: only that call knows them, and they are gone when backward computes a forward again.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    return any(type(tensor) is torch.Tensor for table in tables for tensor in table.values())


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that are registered on `module` itself, by the names they have there.

    Why: as for :func:`own_parameters`.

    Checked: torch 2.13 and 2.15.

    Public way: ``named_buffers(recurse=False, remove_duplicate=False)``, where a class does not override it.
    """
    return {name: buffer for name, buffer in module._buffers.items() if buffer is not None}


def buffer_table(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The dict in which `module` registers its buffers: not a copy.

    Why: a forward may register buffers, which is undone where the forward runs again.

    Checked: torch 2.13 and 2.15.

    Public way: ``named_buffers(recurse=False)`` and ``register_buffer``, which cannot take a buffer away again.
    """
    return module._buffers


def own_modules(module: nn.Module) -> dict[str, nn.Module]:
    """The modules that are registered on `module` itself, by the names they have there. Writing changes the module.

    Why: as for :func:`own_parameters`; modules of a pipeline's other ranks are left out of ``named_modules``.

    Checked: torch 2.13 and 2.15.

    Public way: ``named_children()``, to read, where a class does not override it and no module occurs twice.
    """
    return module._modules  # type: ignore[return-value]


def every_module(model: nn.Module) -> dict[str, nn.Module]:
    """Every module of `model` by the first of its names, in the order of ``named_modules()``.

    Why: as for :func:`own_modules`.

    Checked: torch 2.13 and 2.15.

    Public way: ``named_modules()``, where no module overrides it.
    """
    modules: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def visit(path: str, module: nn.Module | None) -> None:
        if module is None or id(module) in seen:
            return
        seen.add(id(module))
        modules[path] = module
        for name, inner in own_modules(module).items():
            visit(f"{path}.{name}" if path else name, inner)

    visit("", model)
    return modules


def parameter_at(module: nn.Module, name: str) -> torch.Tensor | None:
    """What is registered as the parameter ``module.name``, if anything is. It may be a tensor computed from one.

    Why: before each forward it is looked up whether a caller has replaced a parameter, as ``functional_call`` does.

    Checked: torch 2.13 and 2.15.

    Public way: ``getattr``, where the class does not override ``__getattr__``.
    """
    return module._parameters.get(name)


def set_parameter(module: nn.Module, name: str, value: torch.Tensor | None) -> None:
    """Sets ``module.name``, a parameter, to `value`, which may be a tensor computed from it, or None.

    Why: a forward runs on parameters whose gradients are summed over ranks, or of which this rank holds a part.

    Checked: torch 2.13 and 2.15.

    Public way: ``setattr``, where `value` is an ``nn.Parameter`` and the class neither overrides ``__setattr__`` nor
    parametrizes the parameter; ``torch.func.functional_call``, around a whole forward.
    """
    places = module.__dict__.get(REFERENCES)
    if places is not None:
        places.replace(name, module._parameters.get(name), value)
    module._buffers.pop(name, None)  # torch makes it one where a parametrization of a tensor in its place ends
    module._parameters[name] = value  # type: ignore[assignment]


def refresh_recurrent_weights(module: nn.Module) -> None:
    """Makes a recurrent layer (``nn.LSTM`` and the like) compute with its present parameters.

    Why: the layer keeps a list of them, which :func:`set_parameter` does not change.

    Checked: torch 2.13 and 2.15.

    Public way: ``setattr``, which only takes an ``nn.Parameter``.
    """
    if isinstance(module, nn.RNNBase):
        module._flat_weights = [module._parameters.get(name) for name in module._flat_weights_names]


def buffer_names(module: nn.Module) -> list[str]:
    """The names under which `module` itself registers buffers, including those whose buffer is None.

    Why: a forward may put a tensor where there was none, and a repeated forward must find none again.

    Checked: torch 2.13 and 2.15.

    Public way: none; ``named_buffers`` leaves out buffers that are None.
    """
    return list(module._buffers)


def buffer_at(module: nn.Module, name: str) -> torch.Tensor | None:
    """The buffer that `module` has registered as `name`; None if there is none.

    Why: as for :func:`buffer_names`.

    Checked: torch 2.13 and 2.15.

    Public way: ``getattr``, where the class does not override ``__getattr__``.
    """
    return module._buffers.get(name)


def set_buffer(module: nn.Module, name: str, value: torch.Tensor | None) -> None:
    """Sets ``module.name``, a buffer, to `value`. Whether it is persistent does not change.

    Why: a meta model gets its real buffers.

    Checked: torch 2.13 and 2.15.

    Public way: ``setattr``, where the class does not override ``__setattr__``.
    """
    places = module.__dict__.get(REFERENCES)
    if places is not None:
        places.replace(name, module._buffers.get(name), value)
    module._buffers[name] = value


def clear_forward_hooks(module: nn.Module) -> None:
    """Removes the hooks that are called after the forward of `module`.

    Why: a pipeline stage that is not the last does not return the output that they are for.

    Checked: torch 2.13 and 2.15.

    Public way: ``RemovableHandle.remove()``, for whoever registered them.
    """
    module._forward_hooks.clear()


def clear_hooks(module: nn.Module, kept: Callable[[Any], bool] = lambda hook: False) -> None:
    """Removes the hooks that are called before and after forward and backward of `module`, but those to be `kept`.

    Why: the stand-in for a module of another stage gets other values than the hooks are for.

    Checked: torch 2.13 and 2.15.

    Public way: ``RemovableHandle.remove()``, for whoever registered them.
    """
    hooks: tuple[dict[int, Any], ...] = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    for table in hooks:
        for number in [number for number, hook in table.items() if not kept(hook)]:
            del table[number]


def forward_pre_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """The hooks that are called before the forward of `module`, in their order.

    Why: some compute a weight, and must do so in fp32.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    return list(module._forward_pre_hooks.values())


def forward_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """The hooks that are called before or after the forward of `module`.

    Why: those of the user may not be called for parts of a batch.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    return [hook for table in forward_hook_tables(module) for hook in table.values()]


def forward_hook_tables(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """The dicts in which `module` registers hooks before and after its forward: not copies.

    Why: a forward may register hooks, once, which is undone where the forward was a trial.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    return module._forward_pre_hooks, module._forward_hooks


def replace_forward_hooks(module: nn.Module, make: Callable[[Any, bool], Any]) -> None:
    """Puts ``make(hook, takes_output)`` in the place of each hook that is called before or after the forward.

    Why: what a hook of the user's gets is changed, and its handle and its place among the hooks stay.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    for hooks, takes_output in zip(forward_hook_tables(module), (False, True), strict=True):
        for number, hook in list(hooks.items()):
            hooks[number] = make(hook, takes_output)


def move_hooks_outward(module: nn.Module, before: int | None, after: int | None) -> None:
    """Makes the hook of number `before` the first before the forward of `module`, and `after` the last after it.

    Why: what surrounds what is to be a stated order, not that of the registrations.

    Checked: torch 2.13 and 2.15.

    Public way: ``RemovableHandle.remove()`` and another registration, which deep copies of a module do not survive.
    """
    if before in module._forward_pre_hooks:
        module._forward_pre_hooks.move_to_end(before, last=False)  # type: ignore[attr-defined]
    if after in module._forward_hooks:
        module._forward_hooks.move_to_end(after)  # type: ignore[attr-defined]


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether `module` has hooks that are called before or after its backward.

    Why: the hooks join its outputs, or its inputs, in one node of the graph, which a pipeline cannot cut.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    return bool(module._backward_hooks or module._backward_pre_hooks)


def check_batch_norm_input(module: BatchNormBase, input: torch.Tensor) -> None:
    """Raises ValueError, as the forward of `module` would, if it does not take `input`'s number of dimensions.

    Why: batch normalization over ranks replaces that forward.

    Checked: torch 2.13 and 2.15.

    Public way: the forward itself, but it also computes.
    """
    module._check_input_dim(input)


def reset_method(module: nn.Module) -> Callable[[], object] | None:
    """The method that gives the own parameters of `module` their initial values; None if there is no such method.

    Why: this is the convention for models on the meta device. The method of ``nn.MultiheadAttention`` begins with an
    underscore.

    Checked: torch 2.13 and 2.15.

    Public way: ``reset_parameters``, which all of torch's other layers have.
    """
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


@contextmanager
def truncated_normal_replaced(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Inside, ``nn.init.trunc_normal_`` uses ``make(torch's own function)``.

    Why: it reads what it has drawn, which a recorded constructor cannot do.

    Checked: torch 2.13 and 2.15.

    Public way: replacing ``nn.init.trunc_normal_``, which misses code that imported it by name.
    """
    with replaced(nn.init, "_no_grad_trunc_normal_", make):
        yield


class ConvertibleModule(nn.Module):
    """A module that is told before and after its tensors are converted (by ``to``, ``cuda``, ``half``, ...).

    Why: parameters of a special class must be plain ones while torch replaces them.

    Checked: torch 2.13 and 2.15.

    Public way: none. ``to`` and the like can be overridden, but not those of the model around it, which call this one.
    """

    def before_conversion(self) -> None:
        """Called before the conversion."""

    def after_conversion(self) -> None:
        """Called after the conversion."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.before_conversion()
        super()._apply(fn, recurse)
        self.after_conversion()
        return self


def without_values(module: nn.Module) -> nn.Module:
    """A copy of `module` and those in it, of the same classes, on the meta device, without hooks.

    Other attributes are shared with the original.

    Why: code that only asks for names and classes can be run on it, while ``copy.deepcopy`` would copy the weights.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    tensors: dict[int, torch.Tensor] = {}
    modules: dict[int, nn.Module] = {}

    def tensor(value: torch.Tensor | None) -> torch.Tensor | None:
        if value is not None and id(value) not in tensors:
            empty = torch.empty(value.shape, dtype=value.dtype, device="meta")
            is_parameter = isinstance(value, nn.Parameter)
            tensors[id(value)] = nn.Parameter(empty, requires_grad=value.requires_grad) if is_parameter else empty
        return None if value is None else tensors[id(value)]

    def copied(original: nn.Module) -> nn.Module:
        if id(original) in modules:
            return modules[id(original)]
        made = modules[id(original)] = object.__new__(type(original))
        for name, value in vars(original).items():
            if name in ("_parameters", "_buffers"):
                vars(made)[name] = {key: tensor(held) for key, held in value.items()}
            elif name == "_modules":
                vars(made)[name] = {key: None if held is None else copied(held) for key, held in value.items()}
            elif "_hooks" in name and isinstance(value, dict):
                vars(made)[name] = type(value)()
            elif isinstance(value, partial) and hasattr(type(original), name):
                continue  # it surrounds a method of the original
            elif name not in ("forward", "__deepcopy__"):
                vars(made)[name] = value
        return made

    return copied(module)
