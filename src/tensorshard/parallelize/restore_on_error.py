"""A refused plan leaves the user's module unchanged: its state is noted before, and restored on an error."""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import nn

from tensorshard.model.references import references_to
from tensorshard.torch_private.fake_tensors import FakeTensor
from tensorshard.torch_private.modules import own_buffers, own_parameters

_TABLES = (dict, OrderedDict, list, set)


class RestoreOnError:
    """A context for applying a plan. If an exception leaves it, it restores the modules given to :meth:`note`.

    It copies only references. No tensor of such a module is written to before the plan is accepted, and all stay in
    memory until then in any case, since their values are still needed. It does not communicate with other ranks.
    """

    def __init__(self) -> None:
        self._restore: list[Callable[[], None]] = []

    def __enter__(self) -> "RestoreOnError":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            for restore in reversed(self._restore):
                restore()
        self._restore.clear()

    def note(self, model: nn.Module) -> None:
        """Notes the state of `model`: the attributes and class of each module, and the attributes of each tensor."""
        seen: dict[int, torch.Tensor] = {}
        for module in model.modules():
            self._restore.append(_module_restorer(module))
            for tensor in (*own_parameters(module).values(), *own_buffers(module).values()):
                if id(tensor) not in seen:
                    seen[id(tensor)] = tensor
                    self._restore.append(_attributes_restorer(vars(tensor)))
        for place, _ in references_to(model, lambda tensor: id(tensor) in seen):
            self._restore.append(partial(place.put, place.get()))


def is_just_built(model: nn.Module) -> bool:
    """Whether `model` comes from a constructor that is being recorded. Then it is not the user's."""
    return any(isinstance(t, FakeTensor) for t in (*model.parameters(), *model.buffers()))


def _module_restorer(module: nn.Module) -> Callable[[], None]:
    kind, attributes = type(module), _attributes_restorer(vars(module))

    def restore() -> None:
        module.__class__ = kind
        attributes()

    return restore


def _attributes_restorer(attributes: dict[str, Any]) -> Callable[[], None]:
    """Returns what restores the `attributes` of an object, and the contents of those that are dicts, lists or sets.

    These containers themselves stay the same objects: the handle that removes a hook refers to the dict of the hook.
    """
    before = dict(attributes)
    contents = [(value, value.copy()) for value in before.values() if type(value) in _TABLES]

    def restore() -> None:
        attributes.clear()
        attributes.update(before)
        for value, content in contents:
            value.clear()
            if isinstance(value, list):
                value.extend(content)
            else:
                value.update(content)

    return restore
