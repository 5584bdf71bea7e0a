"""Code around each forward of a model, wherever it is called. Hooks run it, outside of all replaced forwards."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from tensorshard.model.forwards import Role, roles_of


def as_hook(method: Callable[..., Any]) -> Callable[..., Any]:
    """A plain function that calls `method`.

    ``copy.deepcopy`` of a module keeps functions among its hooks as they are. Of a bound method it would copy the
    object, with the ranks' process groups.
    """

    def call(*args: Any) -> Any:
        return method(*args)

    return call


def surround_forwards(model: nn.Module, context: Callable[[], AbstractContextManager[object]]) -> None:
    """Runs each forward of `model`, with its other hooks, within a ``context()``, which also ends after an error."""
    opened: list[ExitStack] = []

    def enter(*_: object) -> None:
        opened.append(ExitStack())
        opened[-1].enter_context(context())

    def leave(*_: object) -> None:
        if opened:
            opened.pop().close()

    model.register_forward_pre_hook(enter, prepend=True)
    model.register_forward_hook(leave, always_call=True)


def surround_parts(
    model: nn.Module, context: Callable[[], AbstractContextManager[object]], is_wanted: Callable[[], bool]
) -> None:
    """Runs calls of the modules in `model`, and of its other methods, within a ``context()``.

    Modules in a compiled block are left out, as hooks on them would be compiled.

    Args:
        is_wanted: false within the model's own forward, which has the context already.
    """
    opened: list[tuple[nn.Module, ExitStack]] = []

    def enter(module: nn.Module, _: Any) -> None:
        if is_wanted():
            opened.append((module, ExitStack()))
            opened[-1][1].enter_context(context())

    def leave(module: nn.Module, *_: Any) -> None:
        if opened and opened[-1][0] is module:
            opened.pop()[1].close()

    compiled = [m for m in model.modules() if not roles_of(m).isdisjoint({Role.COMPILATION, Role.INNER_COMPILATION})]
    within = {inner for block in compiled for inner in block.modules() if inner is not block}
    for module in model.modules():
        if module is not model and module not in within:
            module.register_forward_pre_hook(enter, prepend=True)
            module.register_forward_hook(leave, always_call=True)
    for name in _own_methods(type(model)):
        if name not in vars(model):  # deep copies of a partial object call the method of the copied model
            method = MethodType(getattr(type(model), name), model)
            vars(model)[name] = partial(_within, as_hook(context), as_hook(is_wanted), method)


def _own_methods(cls: type) -> list[str]:
    """Public methods that `cls` has beside those of ``nn.Module``."""
    names = {
        name
        for base in cls.__mro__
        if base is not nn.Module and issubclass(base, nn.Module)
        for name, value in vars(base).items()
        if isinstance(value, FunctionType)
    }
    return sorted(name for name in names if not name.startswith("_") and not hasattr(nn.Module, name))


def _within(
    context: Callable[[], AbstractContextManager[object]],
    is_wanted: Callable[[], bool],
    method: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not is_wanted():
        return method(*args, **kwargs)
    with context():
        return method(*args, **kwargs)
