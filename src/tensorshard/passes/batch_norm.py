"""Batch normalization over the whole batch, as one device would compute it, when data ranks hold parts of it.

A module's own forward runs. While it does, the function ``batch_norm`` that it calls takes its statistics from the
samples of all data ranks.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.comm.collectives import all_reduce_
from tensorshard.model.buffers import keeps_statistics
from tensorshard.model.forwards import Forward, Role, replace_forward, runs_forward_of, wrap_forward
from tensorshard.model.tensors import tensor_leaves
from tensorshard.passes.batch_norm_calls import BatchNormCalls
from tensorshard.passes.batch_norm_checks import INSTANCE_NORMS, by_hand, examine
from tensorshard.passes.compile import never_compiled
from tensorshard.passes.global_batch_norm import global_batch_norm
from tensorshard.torch_private.modules import BatchNormBase, check_batch_norm_input, own_buffers
from tensorshard.torch_private.tensors import tensor_version

_COUNTS = "_tensorshard_counts_samples"
"""An attribute of each synchronized module: whether its inputs have a part in the statistics."""

InstanceNorm = nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d


def synchronize_batch_norm(modules: Mapping[str, nn.Module], group: dist.ProcessGroup | None) -> None:
    """Makes every normalization among `modules` take and keep its training statistics over `group`.

    Args:
        modules: by name. That they can be synchronized has been checked
            (:func:`tensorshard.passes.batch_norm_checks.check_batch_norms`).
        group: the data ranks; None for one alone.
    """
    for name, module in modules.items():
        if runs_forward_of(module, nn.SyncBatchNorm):
            # nn.SyncBatchNorm's own forward synchronizes over the whole world, and only on GPUs.
            replace_forward(module, Role.LOCAL_STATISTICS, MethodType(BatchNormBase.forward, module))
        around = None if group is None else _synchronization(name, module, group)
        if around is not None:
            setattr(module, _COUNTS, True)
            wrap_forward(module, Role.SYNCHRONIZED_STATISTICS, around)


@contextmanager
def ignored_in_statistics(model: nn.Module) -> Iterator[None]:
    """A context in which what this rank's normalizations in `model` are given has no part in their statistics."""
    modules = [module for module in model.modules() if _COUNTS in vars(module)]
    for module in modules:
        setattr(module, _COUNTS, False)
    try:
        yield
    finally:
        for module in modules:
            setattr(module, _COUNTS, True)


def _synchronization(name: str, module: nn.Module, group: dist.ProcessGroup) -> Forward | None:
    """The context for the forward of `module`; None if it needs none."""
    if isinstance(module, INSTANCE_NORMS):
        return partial(_averaged, module, group) if module.track_running_stats else None
    if isinstance(module, BatchNormBase) and runs_forward_of(module, BatchNormBase, nn.SyncBatchNorm):
        return partial(_plain, module, group)
    if not keeps_statistics(module) and not isinstance(module, BatchNormBase):
        return None
    seen = examine(module)
    if seen is not None and not seen.calls_batch_norm:  # frozen statistics, say
        return None
    return partial(_synchronized, name, module, group)


def _plain(module: BatchNormBase, group: dist.ProcessGroup, forward: Forward, /, input: torch.Tensor) -> torch.Tensor:
    """The forward of torch's own classes. It is written out, so that it can be compiled."""
    if not module.training and not (module.running_mean is None and module.running_var is None):
        return forward(input)
    check_batch_norm_input(module, input)
    running_mean = running_var = None
    momentum: float | torch.Tensor | None = module.momentum
    if module.training and module.track_running_stats:
        running_mean, running_var = module.running_mean, module.running_var
        if module.num_batches_tracked is not None:
            module.num_batches_tracked.add_(1)
            if momentum is None:  # a plain average over all batches so far
                momentum = 1.0 / module.num_batches_tracked.double()
    share = 0.0 if momentum is None else momentum
    counts = getattr(module, _COUNTS)
    return global_batch_norm(
        input, running_mean, running_var, module.weight, module.bias, share, module.eps, group=group, counts=counts
    )


@never_compiled
def _synchronized(
    name: str, module: nn.Module, group: dist.ProcessGroup, forward: Forward, /, *args: Any, **kwargs: Any
) -> Any:
    """The forward of a subclass, whose calls of ``batch_norm`` see the samples of all ranks."""
    before = _running(module)
    with BatchNormCalls(partial(global_batch_norm, group=group, counts=getattr(module, _COUNTS))) as calls:
        output = forward(*args, **kwargs)
    if module.training and not calls.count and (isinstance(module, BatchNormBase) or _running(module) != before):
        raise ValueError(by_hand(name, module))
    return output


def _running(module: nn.Module) -> list[tuple[int, int]]:
    buffers = own_buffers(module)
    return [
        (id(buffers[key]), tensor_version(buffers[key])) for key in ("running_mean", "running_var") if key in buffers
    ]


@never_compiled
def _averaged(module: InstanceNorm, group: dist.ProcessGroup, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    """An instance normalization: each sample by itself, and running statistics that are a mean over all samples."""
    output = forward(*args, **kwargs)
    if module.training and module.track_running_stats:
        buffers = [buffer for buffer in (module.running_mean, module.running_var) if buffer is not None]
        input = tensor_leaves((args, kwargs))[0]
        unbatched = 2 + next(index for index, kind in enumerate(INSTANCE_NORMS) if isinstance(module, kind))
        samples = 1 if input.dim() == unbatched else input.size(0)
        samples = samples if getattr(module, _COUNTS) else 0
        with torch.no_grad():
            sums = torch.cat([*(buffer.reshape(-1) * samples for buffer in buffers), buffers[0].new_tensor([samples])])
            all_reduce_(sums, group, what="batch statistics")
            means = (sums[:-1] / sums[-1]).chunk(len(buffers))
            for buffer, mean in zip(buffers, means, strict=True):
                buffer.copy_(mean.view_as(buffer))
    return output
