"""A model that a plan was applied to is not used in ways that would train nothing.

Its modules are marked, since a second plan would train nothing. Forwards cannot read a parameter as it was before the
plan. Places that the model's attributes lead to follow its parameters (:mod:`tensorshard.model.references`). But a
global variable, an attribute of a class, or an iterator may refer to an old one.
"""

import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from torch import nn

from tensorshard.model.watched_parameters import METADATA, Watch, watch
from tensorshard.torch_private.modules import MODULE_CALLS
from tensorshard.torch_private.process_groups import refuse_wrappers
from tensorshard.weights.files.export import own_class
from tensorshard.weights.initial import HeldTensors, TensorSource

_MARK = "_tensorshard_parallelized_by"


def mark_parallelized(models: Iterable[nn.Module], by: str) -> None:
    """Marks every module of `models` that has tensors. Others may be shared with another model.

    Args:
        by: the name of the function that applied a plan, for the error of :func:`check_not_parallelized`.
    """
    for model in models:
        for module in model.modules():
            if _has_tensors(module):
                vars(module)[_MARK] = by


def refuse_other_uses(model: nn.Module) -> None:
    """From now on, torch's wrappers for data parallelism, and pickle, refuse the laid-out `model`."""
    refuse_wrappers(
        [model, *(module for module in model.modules() if _has_tensors(module))],  # others may be another model's
        "DistributedDataParallel, fully_shard or replicate was called on a model that tensorshard.parallelize has laid "
        "out: the plan already shards it and averages its gradients over the data ranks. Use engine.model as it is, "
        "and say in the Plan what should be sharded (zero=, dp_shard=, dp_replicate=)",
    )
    vars(model)["__reduce_ex__"] = _refuse_pickle


def _refuse_pickle(protocol: Any) -> Any:
    """What ``pickle`` calls; ``copy.deepcopy``, which does so too, is answered as without it."""
    caller = sys._getframe(1)
    if caller.f_globals.get("__name__") == "copy":
        copied = caller.f_locals["x"]
        kind: Any = type(copied)
        return kind.__reduce_ex__(copied, protocol)
    raise TypeError(
        "the laid-out model was given to pickle (as by torch.save(model)): it holds process groups and this rank's "
        "part of the weights, and no other process could read it. Call engine.save(path) for a checkpoint, "
        "engine.save_pretrained(path) for safetensors, or engine.full_state_dict() on every rank, for torch.save on "
        "rank 0"
    )


def _has_tensors(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None


def is_parallelized(module: nn.Module) -> bool:
    """Whether `module` is, or belongs to, a model that a plan was applied to."""
    return _MARK in vars(module)


def check_not_parallelized(model: nn.Module) -> None:
    """Refuses a model if a plan was applied to it, or to one of its modules.

    Raises:
        ValueError: a plan was applied, whether or not its Engine still exists.
    """
    for name, module in model.named_modules():
        by = vars(module).get(_MARK)
        if by is not None:
            what = f"module {name!r} of the model" if name else "the model"
            raise ValueError(
                f"{what} is laid out already, by {by}, and a model can be laid out only once. Build a new model, or "
                f"give parallelize the callable that builds it. To go on with these weights, engine.save() them and "
                f"load() them under the other plan, or load the old engine's full_state_dict() into the new model"
            )


def refuse_old_parameters(source: TensorSource) -> None:
    """From now on, forwards of marked models cannot read the trained parameters that were those of `source`."""
    if isinstance(source, HeldTensors):
        for name, tensor in source.held().items():
            if isinstance(tensor, nn.Parameter):
                watch(tensor, _Replaced(name))


class _Replaced(Watch):
    def __init__(self, name: str) -> None:
        self._name = name

    def before_use(self, parameter: nn.Parameter, function: Callable[..., Any]) -> None:
        if function in METADATA or not parameter.requires_grad:
            return
        reader = _reading_forward(sys._getframe(1))
        if reader is None:
            return
        module, line = reader
        raise RuntimeError(
            f"a forward of a {own_class(module).__name__} ({line}) reads parameter {self._name!r} as it was before "
            f"parallelize laid the model out, so that nothing would train it: it is held where no attribute of the "
            f"model leads to, such as a global variable or an attribute of a class. Read the registered parameter, or "
            f"keep it in an attribute of a module, in a list, dict, object or function there"
        )


def _reading_forward(frame: FrameType | None) -> tuple[nn.Module, str] | None:
    """The innermost marked module whose forward is running, and the line of the user's code that reads."""
    reader: FrameType | None = None
    while frame is not None:
        if frame.f_code in MODULE_CALLS and is_parallelized(frame.f_locals["self"]):
            line = "" if reader is None else f"{reader.f_code.co_filename}:{reader.f_lineno}"
            return frame.f_locals["self"], line
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if reader is None and package not in ("torch", "tensorshard"):
            reader = frame
        frame = frame.f_back
    return None
