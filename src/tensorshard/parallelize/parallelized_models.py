"""A model that a plan was applied to is not used in ways that would train nothing.

Its modules are marked, since a second plan would train nothing. Forwards cannot read a parameter as it was before the
plan. Places that the model's attributes lead to follow its parameters (:mod:`tensorshard.model.references`). But a
global variable, an attribute of a class, or an iterator may refer to an old one.
"""

import sys
from collections.abc import Callable, Iterable
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn

from tensorshard.common.words import with_article
from tensorshard.model.forward_contexts import RootRole, hook_root
from tensorshard.model.watched_parameters import METADATA, Watch, watch
from tensorshard.plan.plan import Plan
from tensorshard.torch_private.compilation import is_called_by_compiled_code
from tensorshard.torch_private.modules import called_module
from tensorshard.torch_private.process_groups import refuse_wrappers
from tensorshard.weights.initial import HeldTensors, TensorSource

_WHOLE = "build the model anew in one process, load engine.full_state_dict() of rank 0 into it, and take that one"
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


def refuse_other_uses(model: nn.Module, plan: Plan) -> None:
    """From now on, torch's wrappers for data parallelism, pickle, and what cannot record the forward of the laid-out
    `model` refuse it."""
    refuse_wrappers(
        [model, *(module for module in model.modules() if _has_tensors(module))],  # others may be another model's
        "DistributedDataParallel, fully_shard or replicate was called on a model that tensorshard.parallelize has laid "
        "out: the plan already shards it and averages its gradients over the data ranks. Use engine.model as it is, "
        "and say in the Plan what should be sharded (zero=, dp_shard=, dp_replicate=)",
    )
    vars(model)["__reduce_ex__"] = _refuse_pickle
    vars(model)["__prepare_scriptable__"] = _refuse_script  # torch.jit.script calls it
    if plan.pp == 1 and (plan.tp > 1 or (plan.zero == 3 and plan.shard_size > 1)):
        hook_root(model, RootRole.RECORDING, before=partial(_refuse_recording, plan))


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


def _refuse_script() -> Any:
    raise RuntimeError(f"torch.jit.script was called on the laid-out model, whose forward also communicates: {_WHOLE}")


def _refuse_recording(plan: Plan, *_: Any) -> None:
    """Called before a forward. torch.compile takes one at ZeRO 3, in pieces, and none of layers that tp has split."""
    if torch.jit.is_tracing() or torch.compiler.is_exporting():
        raise RuntimeError(
            f"torch.jit.trace, torch.export or torch.onnx was called on the laid-out model, and would record this "
            f"rank's part of it, under a plan with {'tp' if plan.tp > 1 else 'zero=3'}: {_WHOLE}"
        )
    if plan.tp > 1 and is_called_by_compiled_code():
        raise RuntimeError(
            f"torch.compile was called on the laid-out model (or on code that calls it), and does not look into the "
            f"layers that tp={plan.tp} splits: say Plan(compile=True), which compiles the blocks around them, and call "
            f"engine.model as it is"
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
            f"a forward of {with_article(type(module).__name__)} ({line}) reads parameter {self._name!r} "
            f"as it was before parallelize laid the model out, so that nothing would train it: it is held "
            f"where no attribute of the model leads to, such as a global variable or an attribute of a class. Read the "
            f"registered parameter, or keep it in an attribute of a module, in a list, dict, object or function there"
        )


def _reading_forward(frame: FrameType | None) -> tuple[nn.Module, str] | None:
    """The innermost marked module whose forward is running, and the line of the user's code that reads."""
    reader: FrameType | None = None
    while frame is not None:
        module = called_module(frame)
        if module is not None and is_parallelized(module):
            return module, "" if reader is None else f"{reader.f_code.co_filename}:{reader.f_lineno}"
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if reader is None and package not in ("torch", "tensorshard"):
            reader = frame
        frame = frame.f_back
    return None
