"""Checks the arguments of ``parallelize`` and that a model suits a plan, before anything is allocated.

Also here: models with parallel layers that were built by hand, under a Plan: their groups are its tensor-parallel
ranks.

Such layers call their collectives themselves. So nothing is searched for, and no forward is replaced. The Plan only
needs to know how their parameters are split: for ZeRO, the norm of the gradients, and checkpoints.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tensorshard.comm.marks import ParallelMark
from tensorshard.comm.world import default_device
from tensorshard.common.words import kind_of
from tensorshard.engine.combined_optimizer import ByParameter
from tensorshard.engine.loss_terms import takes_model
from tensorshard.layers.parallel_module import ParallelModule, layout_of
from tensorshard.model.blocks import select_modules
from tensorshard.model.parameters import check_own_memory
from tensorshard.model.quantized import is_quantized, quantized_parameters
from tensorshard.model.trains_itself import own_rules, self_training
from tensorshard.parallelize.parallelized_models import check_not_parallelized
from tensorshard.passes.batch_norm import check_batch_norms
from tensorshard.plan.plan import Plan
from tensorshard.tensor_parallel.apply.tensor_split import TensorSplit
from tensorshard.tensor_parallel.table.layouts import Layout, check_can_split
from tensorshard.weights.initial.source import named_tensors


def check_arguments(model: Any, plan: Any, optimizer: Any, loss_fn: Any, seed: Any) -> None:
    """Refuses arguments of :func:`tensorshard.parallelize` of the wrong kind.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"plan is {kind_of(plan)}; it must be a tensorshard.Plan")
    _check_is_model(model)
    if isinstance(optimizer, Mapping):
        ByParameter(optimizer)
    elif isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer):
        raise TypeError(
            f"optimizer is {kind_of(optimizer)}; it must be a callable from parameters to an optimizer, such "
            f"as functools.partial(torch.optim.AdamW, lr=3e-4), because the parameters it updates do not exist yet, or "
            f"a dict of such callables by patterns of parameter names"
        )
    if not callable(loss_fn):
        raise TypeError(f"loss_fn is {kind_of(loss_fn)}; it must be a callable (output, targets) -> loss")
    if isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module):
        raise TypeError(
            f"loss_fn is the class {loss_fn.__name__} itself; it must be an object of it: pass {loss_fn.__name__}()"
        )
    _check_takes_two(loss_fn)
    check_stages(loss_fn, plan)
    _check_has_no_parameters(loss_fn)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise (ValueError if isinstance(seed, int) else TypeError)(
            f"seed is {seed!r}; it must be an integer of at least 0, the same on every rank"
        )


def as_device(device: torch.device | str) -> torch.device:
    """The device that the user named for this rank: "cuda" is the one that it has set, or else that of its local rank.

    Raises:
        ValueError: the device does not exist, or not on this machine.
    """
    try:
        named = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"there is no device {device!r}; use 'cpu' or 'cuda', or leave device out") from error
    if named.type not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r} was given; plans run on 'cpu' or 'cuda'")
    if named.type == "cpu":
        return torch.device("cpu")  # Accelerate calls it "cpu:0", which fake tensors take for another device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise ValueError(f"device {device!r} was given, but there is no CUDA device here; use 'cpu', or leave it out")
    if named.index is not None and named.index >= count:
        raise ValueError(f"device {device!r} was given, but there are {count} CUDA devices here, from 'cuda:0' on")
    if named.index is not None:
        return named
    chosen = torch.cuda.current_device()  # by the user; 0 if nobody has chosen one
    return torch.device("cuda", chosen) if chosen else default_device()


def _check_is_model(model: Any) -> None:
    if isinstance(model, str):
        raise TypeError(
            f"model is a str; it must be an nn.Module or a callable that returns one. For weights in files give "
            f"tensorshard.from_pretrained({model!r})"
        )
    if not callable(model):
        raise TypeError(f"model is {kind_of(model)}; it must be an nn.Module or a callable that returns one")
    if isinstance(model, nn.Module):
        return
    missing = _refused_call(model)
    if missing is not None:
        raise TypeError(
            f"{getattr(model, '__name__', type(model).__name__)} was given as the model, and is called as model() "
            f"({missing}); pass its arguments with functools.partial(...) or a lambda"
        )


def check_stages(loss_fn: Any, plan: Plan) -> None:
    """Refuses a loss function that calls a model of which each rank has some stages.

    Raises:
        ValueError: it takes the model, and the plan has a pipeline.
        TypeError: it takes the model, but not first.
    """
    if takes_model(loss_fn) and plan.pp > 1:
        raise ValueError(
            f"loss_fn takes the model and pp={plan.pp} was given, but no rank of a pipeline has all of the model, so "
            f"none can call it: set pp=1 (tp and zero=3 split the model, too), or give a loss_fn(output, targets)"
        )


def _check_takes_two(loss_fn: Any) -> None:
    called = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    refused = _refused_call(called, None, None)
    if refused is not None:
        raise TypeError(
            f"loss_fn takes {inspect.signature(called)}, and is called as loss_fn(output, targets), or loss_fn(model, "
            f"batch) if its first parameter is called 'model' ({refused}); if the model computes its own loss, pass "
            f"lambda output, targets: output"
        )


def _check_has_no_parameters(loss_fn: Any) -> None:
    names = [name for name, _ in loss_fn.named_parameters()] if isinstance(loss_fn, nn.Module) else []
    if names:
        raise ValueError(
            f"loss_fn is {kind_of(loss_fn)} with parameters ({', '.join(names[:3])}), which the Engine would "
            f"not train, split or save: make it the model's last layer, called with the targets in the model's "
            f"forward, pass (inputs, targets) as inputs, and loss_fn=lambda output, targets: output"
        )


def _refused_call(function: Callable[..., Any], *args: Any) -> str | None:
    """Why ``function(*args)`` does not fit its signature; None if it does, or if the signature is not known."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of functions in C
        return None
    try:
        signature.bind(*args)
    except TypeError as error:
        return str(error)
    return None


def check_model(
    model: nn.Module, plan: Plan, *, split: str = "refused", ranks: Sequence[int] = (), frozen: bool = False
) -> None:
    """Refuses what would fail, or be ignored, once training has begun.

    Args:
        model: built, or on the meta device.
        plan: a resolved plan.
        split: what to do with parallel layers that were built by hand. "refused": refuse them. "tp": accept those that
            are split over the plan's tensor-parallel ranks. "outside": accept those that are split over ranks outside
            of the plan.
        ranks: the plan's own ranks, for "outside".
        frozen: whether nothing of it will be trained.

    Raises:
        ValueError: there is a module that is laid out already, a parameter that cannot be trained or laid out, that has
            hooks, or whose memory another one uses too, a layer that is split already, a module with sparse gradients,
            a batch normalization that cannot be synchronized, nothing to train, a head that does a plan's work, or a
            name in ``plan.shard_units`` that no module has.
    """
    check_not_parallelized(model)
    _check_not_wrapped(model)
    for name, module in self_training(model).items():
        if frozen:
            raise ValueError(
                f"module {name!r} is {kind_of(module)}, which trains itself, and parallelize_frozen takes a model of "
                f"which nothing is trained: build it without update="
            )
        module.check_under_plan(name)
    if split == "tp" and plan.tp > 1:
        check_split_by_hand(model, plan)
    else:
        _check_unsplit(model, plan, ranks if split == "outside" else ())
    held = quantized_parameters(model)
    for name, parameter in model.named_parameters():
        if name not in held:
            _check_parameter(name, parameter)
    check_own_memory(model)
    # Parameters that a module updates by its own rule do not require a gradient yet.
    by_rule = {model.get_parameter(name) for rule in own_rules(model) for name in rule.parameters}
    trained = {n: p for n, p in model.named_parameters() if not frozen and (p.requires_grad or p in by_rule)}
    if not trained and not frozen:
        raise ValueError(
            "no parameter of the model requires a gradient, so there is nothing to train; call requires_grad_() on "
            "those that should be, or lay it out with tensorshard.parallelize_frozen"
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise ValueError(
                f"module {name!r} is {kind_of(module)} with sparse=True, but only dense gradients can be "
                f"averaged over ranks; build it with sparse=False"
            )
    data_ranks = plan.dp_replicate * plan.dp_shard
    check_batch_norms(model, ranks=data_ranks * plan.tp * plan.pp * plan.cp, data_ranks=data_ranks)
    if isinstance(plan.shard_units, list):
        select_modules(model, plan.shard_units)


def _check_not_wrapped(model: nn.Module) -> None:
    for name, module in model.named_modules():
        what = f"module {name!r}" if name else "the model"
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise ValueError(
                f"{what} is {kind_of(module)}, which averages gradients by itself, as a plan does: give the "
                f"module inside of it, model.module"
            )
        if type(module).__name__ == "OptimizedModule":  # by its name, since importing the class takes seconds
            raise ValueError(
                f"{what} is an OptimizedModule of torch.compile, which was compiled for full parameters: give the "
                f"model that was compiled, and Plan(compile=True)"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{what} is {kind_of(module)} of TorchScript, whose forwards cannot be laid out: give the "
                f"plain nn.Module that it was made of"
            )


def _check_unsplit(model: nn.Module, plan: Plan, ranks: Sequence[int]) -> None:
    for name, module in model.named_modules():
        if isinstance(module, ParallelModule) and module.dim is not None and not _is_full(module.group, ranks):
            raise ValueError(
                f"module {name!r} is {kind_of(module)} that is split over {module.mesh.size()} ranks already, "
                f"but a plan makes its own groups (here tp={plan.tp}) and splits layers by itself: give the "
                f"model with plain layers; or build it before parallelize, with tp={module.mesh.size()}; or train it "
                f"without a Plan. group_sharded_parallel takes it with "
                f"group=tensorshard.distributed.get_data_parallel_group()"
            )
    for name, mark in split_by_hand(model).items():
        if mark.group is None or not _is_full(mark.group, ranks):
            raise ValueError(
                f"{name!r} is marked as split, which this plan does not know of: give the model with whole parameters, "
                f"or train it without a Plan"
            )


def _is_full(group: dist.ProcessGroup, ranks: Sequence[int]) -> bool:
    """Whether all of `ranks` hold the same part of what is split over `group`: only this rank of them is in it."""
    members = set(dist.get_process_group_ranks(group))
    return len(members) == 1 or (bool(ranks) and members.intersection(ranks) == {dist.get_rank()})


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, DTensor):
        raise ValueError(
            f"parameter {name!r} is a DTensor, so the model was laid out already; give the original model, or the "
            f"callable that builds it"
        )
    if is_quantized(parameter):
        what = f"parameter {name!r} is {kind_of(parameter)}, which keeps several tensors (integers and their scales)"
        if parameter.requires_grad:
            raise ValueError(
                f"{what} behind one name, and requires a gradient, but an optimizer updates plain tensors: freeze it "
                f"with requires_grad_(False), and train adapters beside it, or dequantize it"
            )
        raise ValueError(
            f"{what} in a form that is not known here (known are subclasses with __tensor_flatten__, as torchao's, "
            f"and the 4 bits of bitsandbytes): dequantize it, or hold integers and scales in buffers of a linear layer "
            f"of your own, which keep their types under every plan"
        )
    if not parameter.is_floating_point():
        kind = "complex numbers" if parameter.is_complex() else "no gradient"
        remedy = (
            "keep the real and the imaginary part (torch.view_as_real) as the parameter"
            if parameter.is_complex()
            else "register it as a buffer, which is saved all the same"
        )
        raise ValueError(
            f"parameter {name!r} is of type {_short(parameter.dtype)}, which has {kind}; parameters must be real "
            f"floating-point tensors: {remedy}"
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def split_by_hand(model: nn.Module) -> dict[str, ParallelMark]:
    """How parameters and buffers of `model` are split, by their names. Those that are not split are left out."""
    marks = {name: layout_of(tensor) for name, tensor in named_tensors(model)}
    return {name: mark for name, mark in marks.items() if mark is not None and mark.dim is not None}


def check_split_by_hand(model: nn.Module, plan: Plan) -> None:
    """Refuses a model with parallel layers that `plan` cannot take as they are.

    Args:
        plan: a resolved plan of all ranks.

    Raises:
        ValueError: layers over other ranks than the plan's tensor-parallel ones; a plan that would split layers or a
            sequence, or cut a pipeline; a parameter whose full size is not known; a dimension of fewer elements than
            there are ranks.
    """
    for name, mark in split_by_hand(model).items():
        if mark.group is None or mark.size is None or mark.dim is None:
            raise ValueError(
                f"{name!r} is marked as split, but not of what size and over which ranks: register it with size= and "
                f"group="
            )
        first = dist.get_rank() // plan.tp * plan.tp
        ranks = dist.get_process_group_ranks(mark.group)
        expected = list(range(first, first + plan.tp))
        if ranks != expected:
            raise ValueError(
                f"{name!r} is split over the ranks {ranks} already, but this plan's tensor-parallel ranks, with "
                f"tp={plan.tp}, are {expected}: use tp={len(ranks)} where the layers' groups "
                f"are those of tensorshard.distributed.init_process_group({len(ranks)}), or give the model with plain "
                f"layers"
            )
        refused = {"pp": plan.pp > 1, "tp_plan": plan.tp_plan is not None, "sequence_parallel": plan.sequence_parallel}
        for field, given in refused.items():
            if given:
                raise ValueError(
                    f"{name!r} is split by hand, and this plan has {field}={getattr(plan, field)!r}, which needs "
                    f"layers that it splits itself: leave {field} out, or give the model with plain layers"
                )
        check_can_split(_layout(mark), len(ranks), name)


@dataclass(frozen=True)
class _ByHand:
    """The source of a :class:`TensorSplit` that was built by hand."""

    names: tuple[str, ...]

    def describe(self) -> str:
        """A sentence that says what is split."""
        return "split by hand: " + ", ".join(self.names)


def tensor_split_of(marks: Mapping[str, ParallelMark], group: dist.ProcessGroup) -> TensorSplit:
    """The layouts of what is split by hand."""
    layouts = {name: _layout(mark) for name, mark in marks.items()}
    return TensorSplit(layouts, group, _ByHand(tuple(layouts)))


def _layout(mark: ParallelMark) -> Layout:
    assert mark.dim is not None and mark.size is not None  # check_split_by_hand refuses others
    return Layout(mark.dim, (mark.size,))
