"""The user's module stays the user's until a plan is accepted: what it was like is kept, and put back on a refusal."""

from collections import OrderedDict
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import nn

from tensorshard.torch_private.fake_tensors import FakeTensor
from tensorshard.torch_private.modules import own_buffers, own_parameters

_TABLES = (dict, OrderedDict, list, set)


class UsersModules:
    """Surrounds the work of laying a model out; puts the modules given to :meth:`keep` back if an exception leaves it.

    Nothing is copied but references: no tensor of a kept module is written to before its plan is accepted, and the
    tensors are held until then in any case, since their values are still to be laid out. No other rank is asked.
    """

    def __init__(self) -> None:
        self._restore: list[Callable[[], None]] = []

    def __enter__(self) -> "UsersModules":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            for restore in reversed(self._restore):
                restore()
        self._restore.clear()

    def keep(self, model: nn.Module) -> None:
        """Notes what `model` is like: the attributes, tables and class of each module, what hangs on each tensor."""
        seen: dict[int, torch.Tensor] = {}
        for module in model.modules():
            self._restore.append(_module_restorer(module))
            for tensor in (*own_parameters(module).values(), *own_buffers(module).values()):
                if id(tensor) not in seen:
                    seen[id(tensor)] = tensor
                    self._restore.append(_attributes_restorer(vars(tensor)))


def is_just_built(model: nn.Module) -> bool:
    """Whether `model` was built by a constructor that is being recorded, and so belongs to nobody else."""
    return any(isinstance(t, FakeTensor) for t in (*model.parameters(), *model.buffers()))


def _module_restorer(module: nn.Module) -> Callable[[], None]:
    kind, attributes = type(module), _attributes_restorer(vars(module))

    def restore() -> None:
        if type(module) is not kind:
            from tensorshard.torch_private.fsdp import forget_fully_shard

            module.__class__ = kind
            forget_fully_shard(module)
        attributes()

    return restore


def _attributes_restorer(attributes: dict[str, Any]) -> Callable[[], None]:
    """Puts back the `attributes` of an object, and what was in those that are tables, lists or sets.

    The tables themselves stay: what removes a hook knows the one that the hook was put into.
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
