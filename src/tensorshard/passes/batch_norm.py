"""Batch normalization over the whole batch, as one device would compute it, when data ranks hold parts of it.

A module's own forward runs. While it does, the function ``batch_norm`` that it calls takes its statistics from the
samples of all data ranks. The formulas are those of Ioffe & Szegedy 2015. Statistics take two passes (mean, then the
squared distance from it), because one pass cancels badly in fp32.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from tensorshard.comm.collectives import all_reduce_
from tensorshard.common.never_compiled import never_compiled
from tensorshard.common.words import kind_of
from tensorshard.model.forwards import Forward, Role, replace_forward, runs_forward_of, unwrap_forward, wrap_forward
from tensorshard.model.parameters import keeps_statistics
from tensorshard.model.tensors import tensor_leaves
from tensorshard.torch_private.modules import BatchNormBase, check_batch_norm_input

_COUNTS = "_tensorshard_counts_samples"
"""Of each synchronized module: whether its inputs have a part in the statistics; None where these are constants."""

InstanceNorm = nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
"""These normalize each sample by itself."""


def synchronize_batch_norm(modules: Mapping[str, nn.Module], group: dist.ProcessGroup | None) -> None:
    """Makes every normalization among `modules` take and keep its training statistics over `group`.

    Args:
        modules: by name. That they can be synchronized has been checked
            (:func:`tensorshard.passes.batch_norm.check_batch_norms`).
        group: the data ranks; None for one alone.
    """
    for module in modules.values():
        if runs_forward_of(module, nn.SyncBatchNorm):
            # nn.SyncBatchNorm's own forward synchronizes over the whole world, and only on GPUs.
            replace_forward(module, Role.LOCAL_STATISTICS, MethodType(BatchNormBase.forward, module))
        around = None if group is None else _synchronization(module, group)
        if around is not None:
            setattr(module, _COUNTS, True)
            wrap_forward(module, Role.SYNCHRONIZED_STATISTICS, around)


@contextmanager
def ignored_in_statistics(model: nn.Module) -> Iterator[None]:
    """A context in which what this rank's normalizations in `model` are given has no part in their statistics."""
    with _counting(model.modules(), False):
        yield


@contextmanager
def constant_statistics(modules: Sequence[nn.Module]) -> Iterator[None]:
    """A context in which batch normalizations among `modules` normalize by constants, and keep no statistics."""
    by_themselves = {
        module: None
        for module in modules
        if _COUNTS not in vars(module) and (isinstance(module, BatchNormBase) or keeps_statistics(module))
    }
    with ExitStack() as stack:
        for module in by_themselves:
            wrap_forward(module, Role.SYNCHRONIZED_STATISTICS, _by_constants)
            stack.callback(unwrap_forward, module, Role.SYNCHRONIZED_STATISTICS)
        stack.enter_context(_counting(modules, None))
        yield


@contextmanager
def _counting(modules: Iterable[nn.Module], counts: bool | None) -> Iterator[None]:
    synchronized = [module for module in modules if _COUNTS in vars(module)]
    for module in synchronized:
        setattr(module, _COUNTS, counts)
    try:
        yield
    finally:
        for module in synchronized:
            setattr(module, _COUNTS, True)


def _synchronization(module: nn.Module, group: dist.ProcessGroup) -> Forward | None:
    """The context for the forward of `module`; None if it needs none."""
    if isinstance(module, INSTANCE_NORMS):
        return partial(_averaged, module, group) if module.track_running_stats else None
    if isinstance(module, BatchNormBase) and runs_forward_of(module, BatchNormBase, nn.SyncBatchNorm):
        return partial(_plain, module, group)
    if not keeps_statistics(module) and not isinstance(module, BatchNormBase):
        return None
    return partial(_synchronized, module, group)


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
def _synchronized(module: nn.Module, group: dist.ProcessGroup, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    """The forward of a subclass, whose calls of ``batch_norm`` see the samples of all ranks."""
    with BatchNormCalls(partial(global_batch_norm, group=group, counts=getattr(module, _COUNTS))):
        return forward(*args, **kwargs)


@never_compiled
def _by_constants(forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    """The forward of a normalization that no rank synchronizes."""
    with BatchNormCalls(_constants):
        return forward(*args, **kwargs)


@never_compiled
def _averaged(module: InstanceNorm, group: dist.ProcessGroup, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    """An instance normalization: each sample by itself, and running statistics that are a mean over all samples."""
    output = forward(*args, **kwargs)
    if module.training and module.track_running_stats and getattr(module, _COUNTS) is not None:
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


@never_compiled
def global_batch_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    momentum: float | torch.Tensor,
    eps: float,
    group: dist.ProcessGroup,
    counts: bool | None = True,
) -> torch.Tensor:
    """``F.batch_norm(..., training=True)``, where every rank of `group` has a part of the batch. A collective of
    `group`.

    Args:
        input: [samples, channels, ...]; ranks may have different numbers of samples.
        running_mean, running_var: [channels], updated in place; None if none are kept.
        weight, bias: [channels].
        momentum: the share of this batch in the running statistics; a tensor of one element, or a number.
        counts: whether `input` has a part in the statistics; else it is only normalized by them. None to normalize by
            constants.
    """
    if counts is None:
        return _constants(input, None, None, weight, bias, 0.0, eps)
    with torch.no_grad():
        mean, variance, count = _statistics(input if counts else input[:0], group)
        unbiased = variance * (count / (count - 1))
        for running, value in ((running_mean, mean), (running_var, unbiased)):
            if running is not None:
                share = momentum.to(running.dtype) if isinstance(momentum, torch.Tensor) else momentum
                running.lerp_(value.to(running.dtype), share)
    weight = None if weight is None else _wide(weight)
    bias = None if bias is None else _wide(bias)
    return _Normalize.apply(input, weight, bias, mean, variance, count, eps, group, counts)


def _statistics(input: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean and biased variance of each channel [C] and the number of values a channel has, over the group."""
    dims = _reduced(input)
    wide = _wide(input)
    sums = torch.cat([wide.sum(dims), wide.new_full((1,), input.numel() / input.size(1))])
    all_reduce_(sums, group, what="batch statistics")
    count = sums[-1]
    mean = sums[:-1] / count
    squares = (wide - _as_channels(mean, input)).square_().sum(dims)
    all_reduce_(squares, group, what="batch statistics")
    return mean, squares / count, count


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        variance: torch.Tensor,
        count: torch.Tensor,
        eps: float,
        group: dist.ProcessGroup,
        counts: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight, mean, variance, count)
        ctx.eps, ctx.group, ctx.counts = eps, group, counts
        return F.batch_norm(input, mean, variance, weight, bias, training=False, eps=eps)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        input, weight, mean, variance, count = ctx.saved_tensors
        dims = _reduced(input)
        grad = _wide(grad_outputs[0])
        inverse_std = torch.rsqrt(variance + ctx.eps)
        normalized = (_wide(input) - _as_channels(mean, input)) * _as_channels(inverse_std, input)
        grad_bias = grad.sum(dims)
        grad_weight = (grad * normalized).sum(dims)
        sums = torch.cat([grad_bias, grad_weight])
        all_reduce_(sums, ctx.group, what="batch statistics")
        mean_grad, mean_product = (sums / count).chunk(2)
        scale = inverse_std if weight is None else inverse_std * weight
        _, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if not ctx.counts:  # the statistics are constants for it
            mean_product, mean_grad = torch.zeros_like(mean_product), torch.zeros_like(mean_grad)
        grad_input = normalized.mul_(_as_channels(mean_product, input)).add_(_as_channels(mean_grad, input))
        grad_input = grad.sub(grad_input).mul_(_as_channels(scale, input)).to(input.dtype)
        grad_parameters = grad_weight if needs_weight else None, grad_bias if needs_bias else None
        return grad_input, *grad_parameters, None, None, None, None, None, None


def _reduced(input: torch.Tensor) -> list[int]:
    """All dimensions except 1, that of the channels."""
    return [dim for dim in range(input.dim()) if dim != 1]


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _as_channels(values: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    return values.view([1, -1] + [1] * (input.dim() - 2))


def check_batch_norms(model: nn.Module, *, ranks: int, data_ranks: int) -> None:
    """Refuses normalizations that would synchronize by themselves, over other ranks than those that share the batch.

    Args:
        model: built, or on the meta device.
        ranks: of the plan.
        data_ranks: the ranks over which a batch is divided.

    Raises:
        ValueError: a subclass of ``nn.SyncBatchNorm`` that has a forward of its own.
    """
    for name, module in model.named_modules():
        if runs_forward_of(module, BatchNormBase, nn.SyncBatchNorm) or isinstance(module, INSTANCE_NORMS):
            continue
        if isinstance(module, nn.SyncBatchNorm) and ranks > 1:
            raise ValueError(
                f"module {name!r} is {kind_of(module)}, an nn.SyncBatchNorm with a forward of its own, which "
                f"would synchronize over all {ranks} ranks by itself, and not over the plan's {data_ranks} data ranks; "
                f"derive it from nn.BatchNorm1d, 2d or 3d, which a plan synchronizes"
            )


def _constants(
    input: torch.Tensor, running_mean: Any, running_var: Any, weight: Any, bias: Any, momentum: Any, eps: float
) -> torch.Tensor:
    channels = input.size(1)
    return F.batch_norm(
        input, input.new_full((channels,), 0.1), input.new_full((channels,), 1.5), weight, bias, eps=eps
    )


class BatchNormCalls(TorchFunctionMode):
    """A context in which `batch_norm` takes the place of torch's function in each call that uses batch statistics.

    Args:
        batch_norm: takes ``(input, running_mean, running_var, weight, bias, momentum, eps)``.
    """

    def __init__(self, batch_norm: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self._batch_norm = batch_norm

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            return self._functional(*args, **kwargs)
        if func is torch.batch_norm:
            return self._native(*args, **kwargs)
        return func(*args, **kwargs)

    # The arguments of torch's two functions, by their names.

    def _functional(
        self,
        input: torch.Tensor,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        if training:
            return self._batch_norm(input, running_mean, running_var, weight, bias, momentum, eps)
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)

    def _native(
        self,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
        cudnn_enabled: bool,
    ) -> torch.Tensor:
        return self._functional(input, running_mean, running_var, weight, bias, training, momentum, eps)
