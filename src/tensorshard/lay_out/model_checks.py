"""Checks that a model suits a plan, before any of it is allocated."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tensorshard.data_parallel.batch_norm_checks import check_batch_norms
from tensorshard.heads.under_plan.head_checks import check_heads
from tensorshard.heads.update.updated_parameter import UpdatedParameter
from tensorshard.lay_out.laid_out_mark import check_not_laid_out
from tensorshard.lay_out.parallel_layers import check_split_by_hand, split_by_hand
from tensorshard.layers.parallel_module import ParallelModule
from tensorshard.modules.blocks import select_modules
from tensorshard.modules.shared_memory import check_own_memory
from tensorshard.plan import Plan
from tensorshard.torch_private.tensors import count_gradient_hooks
from tensorshard.transforms.precision import master_dtype


def check_model(model: nn.Module, plan: Plan, *, split: str = "refused", ranks: Sequence[int] = ()) -> None:
    """Refuses what would fail, or be ignored, once training has begun.

    Args:
        model: built, or on the meta device.
        plan: a resolved plan.
        split: what to do with parallel layers that were built by hand. "refused": refuse them. "tp": accept those that
            are split over the plan's tensor-parallel ranks. "outside": accept those that are split over ranks outside
            of the plan.
        ranks: the plan's own ranks, for "outside".

    Raises:
        ValueError: there is a module that is laid out already, a parameter that cannot be trained or laid out, that has
            hooks, or whose memory another one uses too, a layer that is split already, a module with sparse gradients,
            a batch normalization that cannot be synchronized, nothing to train, a head that does a plan's work, or a
            name in ``plan.shard_units`` that no module has.
    """
    check_not_laid_out(model)
    _check_not_wrapped(model)
    check_heads(model)
    if split == "tp" and plan.tp > 1:
        check_split_by_hand(model, plan)
    else:
        _check_not_split(model, plan, ranks if split == "outside" else ())
    for name, parameter in model.named_parameters():
        _check_parameter(name, parameter)
        _check_parameter_hooks(name, parameter)
    check_own_memory(model)
    # Parameters of a head with update= do not require a gradient yet.
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad or isinstance(p, UpdatedParameter)}
    if not trained:
        raise ValueError(
            "no parameter of the model requires a gradient, so there is nothing to train; call requires_grad_() on "
            "those that should be"
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise ValueError(
                f"module {name!r} is an {type(module).__name__} with sparse=True, but only dense gradients can be "
                f"averaged over ranks; build it with sparse=False"
            )
    if plan.shards_parameters:
        _check_fully_shardable(model, trained)
    data_ranks = plan.dp_replicate * plan.dp_shard
    check_batch_norms(model, ranks=data_ranks * plan.tp * plan.pp * plan.cp, data_ranks=data_ranks)
    if isinstance(plan.shard_units, list):
        select_modules(model, plan.shard_units)


def _check_not_wrapped(model: nn.Module) -> None:
    for name, module in model.named_modules():
        what = f"module {name!r}" if name else "the model"
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise ValueError(
                f"{what} is a {type(module).__name__}, which averages gradients by itself, as a plan does: give the "
                f"module inside of it, model.module"
            )
        if type(module).__name__ == "OptimizedModule":  # by its name, since importing the class takes seconds
            raise ValueError(
                f"{what} is an OptimizedModule of torch.compile, which was compiled for full parameters: give the "
                f"model that was compiled, and Plan(compile=True)"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{what} is a {type(module).__name__} of TorchScript, whose forwards cannot be laid out: give the "
                f"plain nn.Module that it was made of"
            )


def _check_not_split(model: nn.Module, plan: Plan, ranks: Sequence[int]) -> None:
    for name, module in model.named_modules():
        if isinstance(module, ParallelModule) and module.dim is not None and not _is_whole(module.group, ranks):
            raise ValueError(
                f"module {name!r} is a {type(module).__name__} that is split over {module.mesh.size()} ranks already, "
                f"but a plan makes its own groups (here tp={plan.tp}) and splits layers by itself: give the "
                f"model with plain layers; or build it before parallelize, with tp={module.mesh.size()}; or train it "
                f"without a Plan. group_sharded_parallel takes it with "
                f"group=tensorshard.distributed.get_data_parallel_group()"
            )
    for name, mark in split_by_hand(model).items():
        if mark.group is None or not _is_whole(mark.group, ranks):
            raise ValueError(
                f"{name!r} is marked as split, which this plan does not know of: give the model with whole parameters, "
                f"or train it without a Plan"
            )


def _is_whole(group: dist.ProcessGroup, ranks: Sequence[int]) -> bool:
    """Whether all of `ranks` hold the same part of what is split over `group`: only this rank of them is in it."""
    members = set(dist.get_process_group_ranks(group))
    return len(members) == 1 or (bool(ranks) and members.intersection(ranks) == {dist.get_rank()})


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, DTensor):
        raise ValueError(
            f"parameter {name!r} is a DTensor, so the model was laid out already; give the original model, or the "
            f"callable that builds it"
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


def _check_parameter_hooks(name: str, parameter: nn.Parameter) -> None:
    if count_gradient_hooks(parameter):
        raise ValueError(
            f"parameter {name!r} has a hook (register_hook, register_post_accumulate_grad_hook), but a plan lays "
            f"parameters out anew, and the hook would never be called; hook the module that reads it "
            f"(register_full_backward_hook), or change gradients before each update by "
            f"engine.register_gradient_hook(hook)"
        )


def _check_fully_shardable(model: nn.Module, trained: dict[str, nn.Parameter]) -> None:
    by_dtype = {master_dtype(p.dtype): name for name, p in trained.items()}
    if len(by_dtype) > 1:
        examples = " and ".join(f"{name!r} ({_short(dtype)})" for dtype, name in by_dtype.items())
        raise ValueError(
            f"zero=3 gathers parameters of one type together, but the model trains parameters of several, such as "
            f"{examples}; convert them to one type, or use zero=2"
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
