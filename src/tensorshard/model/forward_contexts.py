"""Code around each forward of a model, wherever it is called. Hooks run it, outside of all replaced forwards.

Several parts of tensorshard put code around the forward of a whole model. Each says which :class:`RootRole` its code
has, and the order of the roles decides what runs around what, as in :mod:`tensorshard.model.forwards`.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from enum import IntEnum, auto
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from tensorshard.common.never_compiled import never_compiled
from tensorshard.model.forwards import Role, roles_of
from tensorshard.torch_private.modules import move_hooks_outward

_RECORD = "_tensorshard_root_hooks"  # the key in a module's __dict__


class RootRole(IntEnum):
    """What code around the forward of a whole model, or of a stage, is for, from the innermost to the outermost.

    Further in are those that the user registered before the plan was applied; further out are later ones.
    """

    SEQUENCES_LINKED = auto()
    """Blocks of sequence parallelism hand each other this rank's positions."""
    SPLIT_SEQUENCES = auto()
    """Inputs are cut along the sequence over the ranks of context parallelism."""
    GATHERED_PARAMETERS = auto()
    """The forward waits for parameters that are being gathered."""
    DATA_PARALLEL = auto()
    """Data parallelism is told that a forward begins and ends."""
    OFFLOADED_PARAMETERS = auto()
    """Offloaded parameters are read, from the first unit on."""
    RANDOM_STREAMS = auto()
    """Random numbers come from the Engine's streams."""
    SAME_NUMBERS = auto()
    """Random numbers belong to the samples of the forward."""
    CACHE_OFF = auto()
    """In training, no keys and values are cached."""
    COMPILE_LOG = auto()
    """Compilation is announced and timed."""
    TRANSFERS = auto()
    """After a forward without gradients, ranks hear of failed transfers to other tiers."""
    BACKGROUND_UPDATE = auto()
    """The forward waits for updates that go on in the background. After it, those of unused units are taken over."""
    OWN_COLLECTIVES = auto()
    """Collective calls of the model's own code are noticed in the first forward."""
    INDEPENDENT_SAMPLES = auto()
    """What the first forward is given is noted, to be run again with other samples."""
    WHOLE_BATCH = auto()
    """Balance losses that the model calls see the tokens of the whole batch."""
    PRECISION = auto()
    """A forward that the user calls computes in the plan's type."""
    MANUAL_LOOP = auto()
    """Inputs, outputs and errors of a forward that the user calls are checked."""
    LOADED_WEIGHTS = auto()
    """Weights that a state dict has loaded are copied to what forwards compute with."""
    WHOLE_PARAMETERS = auto()
    """All code further in gets parts of parameters that are split over tensor-parallel ranks."""
    RECORDING = auto()
    """Code that would record the forward of a part of the model is refused."""


def hook_root(
    model: nn.Module,
    role: RootRole,
    *,
    before: Callable[..., Any] | None = None,
    after: Callable[..., Any] | None = None,
    always: bool = False,
    with_kwargs: bool = False,
) -> None:
    """Calls hooks before and after each forward of `model`, in the place that `role` has among others.

    Args:
        before, after: called as torch calls hooks. What is hooked later for the same role is further out.
        always: whether `after` is called after an error, too.
        with_kwargs: whether hooks get keyword arguments.
    """
    ids: list[int | None] = [None, None]
    if before is not None:
        ids[0] = model.register_forward_pre_hook(_plain(before), prepend=True, with_kwargs=with_kwargs).id
    if after is not None:
        ids[1] = model.register_forward_hook(_plain(after), always_call=always, with_kwargs=with_kwargs).id
    record: list[tuple[RootRole, list[int | None]]] = vars(model).setdefault(_RECORD, [])
    record.append((role, ids))
    record.sort(key=lambda hooked: hooked[0])
    for further_out in (hooked for hooked in record if hooked[0] > role):
        move_hooks_outward(model, *further_out[1])


def surround_root(model: nn.Module, role: RootRole, context: Callable[[], AbstractContextManager[object]]) -> None:
    """Runs each forward of `model` within a ``context()``, which also ends after an error, in the place of `role`."""
    enter, leave = _entering(context)
    hook_root(model, role, before=enter, after=leave, always=True)


def _plain(hook: Callable[..., Any]) -> Callable[..., Any]:
    return never_compiled(hook if isinstance(hook, FunctionType) else as_hook(hook))


def as_hook(method: Callable[..., Any]) -> Callable[..., Any]:
    """A plain function that calls `method`.

    ``copy.deepcopy`` of a module keeps functions among its hooks as they are. Of a bound method it would copy the
    object, with the ranks' process groups.
    """

    def call(*args: Any) -> Any:
        return method(*args)

    return call


def _entering(
    context: Callable[[], AbstractContextManager[object]],
) -> tuple[Callable[..., None], Callable[..., None]]:
    opened: list[ExitStack] = []

    def enter(*_: object) -> None:
        opened.append(ExitStack())
        opened[-1].enter_context(context())

    def leave(*_: object) -> None:
        if opened:
            opened.pop().close()

    return enter, leave


Context = Callable[[str, Any, Any], AbstractContextManager[object]]


def surround_parts(model: nn.Module, context: Context, is_wanted: Callable[[], bool]) -> dict[str, Callable[[], None]]:
    """Runs calls of the modules in `model`, and of its other methods, within a ``context(name, args, kwargs)``.

    Modules in a compiled block are left out, as hooks on them would be compiled.

    Args:
        context: is given the name of the module or method, and what it is called with.
        is_wanted: false within the model's own forward, which has the context already.

    Returns:
        What undoes this, by names.
    """
    opened: list[tuple[nn.Module, ExitStack]] = []
    undo: dict[str, Callable[[], None]] = {}

    def enter(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if is_wanted():
            opened.append((module, ExitStack()))
            opened[-1][1].enter_context(context(name, args, kwargs))

    def leave(module: nn.Module, *_: Any) -> None:
        if opened and opened[-1][0] is module:
            opened.pop()[1].close()

    compiled = [m for m in model.modules() if not roles_of(m).isdisjoint({Role.COMPILATION, Role.INNER_COMPILATION})]
    within = {inner for block in compiled for inner in block.modules() if inner is not block}
    for name, module in model.named_modules():
        if module is not model and module not in within:
            handles = (
                module.register_forward_pre_hook(partial(enter, name), prepend=True, with_kwargs=True),
                module.register_forward_hook(leave, always_call=True),
            )
            undo[name] = partial(_remove, handles)
    for name in _own_methods(type(model)):
        # Deep copies of a partial object call the method of the copied model.
        method = vars(model).get(name, MethodType(getattr(type(model), name), model))
        vars(model)[name] = partial(_within, as_hook(partial(context, name)), as_hook(is_wanted), method)
        undo[name] = partial(vars(model).pop, name, None)
    return undo


def _remove(handles: Iterable[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


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
    context: Callable[[Any, Any], AbstractContextManager[object]],
    is_wanted: Callable[[], bool],
    method: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not is_wanted():
        return method(*args, **kwargs)
    with context(args, kwargs):
        return method(*args, **kwargs)
