"""Which batch normalizations can be synchronized exactly: their calls of ``batch_norm``, seen on a few samples."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from tensorshard.common.kinds import kind_of
from tensorshard.model.buffers import keeps_statistics
from tensorshard.model.fake_copies import copy_with, random_values
from tensorshard.model.forwards import runs_forward_of
from tensorshard.model.tensors import tensor_leaves
from tensorshard.torch_private.fake_tensors import unset_fake_temporarily
from tensorshard.torch_private.modules import BatchNormBase, clear_forward_hooks, own_buffers

INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
"""These normalize each sample by itself."""

_SAMPLES, _FEWER = 4, 2
_SIZES: tuple[tuple[int, ...], ...] = ((), (3,), (3, 3), (3, 3, 3))  # of the dimensions after samples and channels


@dataclass(frozen=True)
class Examined:
    """What a module does in a training forward.

    Args:
        calls_batch_norm: whether it calls torch's function, whose statistics can be taken over all ranks.
        samples_alone: whether a sample's output, apart from those calls, depends on that sample alone.
    """

    calls_batch_norm: bool
    samples_alone: bool


def check_batch_norms(model: nn.Module, *, ranks: int, data_ranks: int) -> None:
    """Refuses normalizations whose statistics could not be those of the whole batch.

    Args:
        model: built, or on the meta device.
        ranks: of the plan.
        data_ranks: the ranks over which a batch is divided.

    Raises:
        ValueError: a module that computes batch statistics by itself, or a subclass of ``nn.SyncBatchNorm`` that has a
            forward of its own.
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
        if data_ranks > 1 and (isinstance(module, BatchNormBase) or keeps_statistics(module)):
            examined = examine(module)
            if examined is not None and not examined.samples_alone:
                raise ValueError(by_hand(name, module))


def by_hand(name: str, module: nn.Module) -> str:
    """The message about a module whose statistics cannot be synchronized."""
    return (
        f"module {name!r} ({type(module).__name__}) computes statistics of its batch in a way of its own, so that each "
        f"data rank would normalize by its own samples alone; let its forward call torch.nn.functional.batch_norm or "
        f"super().forward, which are synchronized over the data ranks, or train with one data rank"
    )


def examine(module: nn.Module) -> Examined | None:
    """Runs a copy of `module`, with random weights, on a batch of small samples and on its first samples alone.

    During these runs, calls of ``batch_norm`` normalize by constants.

    Returns:
        None if it does not run on one tensor [samples, channels, ...].
    """
    channels = getattr(module, "num_features", None)
    if not isinstance(channels, int):
        channels = next((buffer.numel() for buffer in own_buffers(module).values() if buffer.dim() > 0), 1)
    broadcast: list[Examined] = []  # on inputs of fewer dimensions than it is made for, perhaps
    for size in _SIZES:
        shape = (_SAMPLES, channels, *size)
        try:
            with unset_fake_temporarily(), torch.no_grad(), torch.random.fork_rng(devices=[]):
                examined, keeps_shape = _examine(module, shape)
        except Exception:  # a module may raise anything on inputs that it was not made for
            continue
        if keeps_shape:
            return examined
        broadcast.append(examined)
    return broadcast[0] if broadcast else None


def _examine(module: nn.Module, shape: tuple[int, ...]) -> tuple[Examined, bool]:
    """What it does with an input of `shape`, and whether its output has that shape."""
    generator = torch.Generator().manual_seed(0)
    copied = copy_with(module, random_values(generator))
    copied.eval()
    copied.training = True  # not its submodules: dropout would draw, and norms are examined by themselves
    for inner in copied.modules():
        clear_forward_hooks(inner)
    input = torch.randn(shape, generator=generator)
    start = [buffer.clone() for buffer in copied.buffers()]
    runs = []
    with BatchNormCalls(_constants) as calls:
        for count in (_SAMPLES, _FEWER):
            with _unchanged_after(copied, start) as buffers:
                outputs = tensor_leaves(copied.forward(input[:count].clone()))
                runs.append(([output[:_FEWER] for output in outputs], [b.clone() for b in buffers]))
                keeps_shape = all(output.shape == (count, *shape[1:]) for output in outputs)
    examined = Examined(calls.count > 0, _same(runs[0][0], runs[1][0]) and _same(runs[0][1], runs[1][1]))
    return examined, keeps_shape


def _constants(
    input: torch.Tensor, running_mean: Any, running_var: Any, weight: Any, bias: Any, momentum: Any, eps: float
) -> torch.Tensor:
    channels = input.size(1)
    return F.batch_norm(
        input, input.new_full((channels,), 0.1), input.new_full((channels,), 1.5), weight, bias, eps=eps
    )


@contextmanager
def _unchanged_after(module: nn.Module, values: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """A context after which the buffers of `module` have their values again."""
    buffers = list(module.buffers())
    try:
        yield buffers
    finally:
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)


def _same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-6, equal_nan=True)
        for a, b in zip(one, other, strict=True)
    )


class BatchNormCalls(TorchFunctionMode):
    """A context in which `batch_norm` takes the place of torch's function in each call that uses batch statistics.

    Args:
        batch_norm: takes ``(input, running_mean, running_var, weight, bias, momentum, eps)``.

    Attributes:
        count: calls of torch's function so far, of either kind.
    """

    def __init__(self, batch_norm: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self._batch_norm = batch_norm
        self.count = 0

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
        self.count += 1
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
