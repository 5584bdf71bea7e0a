"""What ``DistributedDataParallel`` averages and leaves alone, and models that no wrapper of torch may take."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, NoReturn

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.nn.parallel import DistributedDataParallel


def active_ddp_module() -> Any:
    """The ``DistributedDataParallel`` whose forward is running, or None.

    Why: a gather or scatter in that forward has to make up for the averaging of the gradients.

    Checked: torch 2.11 and 2.13.

    Public way: none.
    """
    return DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]


def ddp_ignored(module: nn.Module) -> list[str]:
    """Names of the parameters and buffers of `module` that ``DistributedDataParallel`` will ignore, whoever set them.

    Why: the list is set as a whole, so names that others have set must be kept.

    Checked: torch 2.11 and 2.13.

    Public way: none.
    """
    return list(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def set_ddp_ignored(module: nn.Module, names: list[str]) -> None:
    """Makes ``DistributedDataParallel`` ignore the parameters and buffers of `names` in `module`.

    Why: each rank holds another shard of a split parameter, which must not be averaged or broadcast.

    Checked: torch 2.11 and 2.13.

    Public way: none. PyTorch's DDP tutorials name this one.
    """
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)


def refuse_wrappers(modules: Iterable[nn.Module], message: str) -> None:
    """From now on, ``DistributedDataParallel``, ``fully_shard`` and ``replicate`` of one of `modules` raise `message`.

    Why: on top of a model that a plan was applied to, they fail in ways that do not say why, or reduce gradients twice.

    Checked: torch 2.13.

    Public way: none.
    """
    for module in modules:
        vars(module)["_ddp_params_and_buffers_to_ignore"] = _Refused(message)
        for key in (REGISTRY_KEY, STATE_KEY):
            vars(module)[key] = _RefusedTable(vars(module).get(key, {}))
            vars(module)[key].message = message


class _Refused:
    """What ``DistributedDataParallel`` makes a set of, as the first thing that it reads of a module."""

    def __init__(self, message: str) -> None:
        self._message = message

    def __iter__(self) -> NoReturn:
        raise RuntimeError(self._message)


class _RefusedTable(OrderedDict[Any, Any]):
    """Where torch looks up whether a module is wrapped already."""

    message: str

    def __contains__(self, key: object) -> NoReturn:
        raise RuntimeError(self.message)
