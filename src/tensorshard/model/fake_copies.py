"""Copies of modules, on fake or real tensors, that share nothing with the original and do not copy its weights."""

import itertools
from collections.abc import Callable, Container, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from tensorshard.model.blocks import use_placeholder_outputs
from tensorshard.model.copies import copy_module
from tensorshard.model.global_state import restored_globals
from tensorshard.model.parameters import STATISTICS
from tensorshard.model.quantized import hold_as_bytes, is_quantized
from tensorshard.model.tensors import map_tensors_once
from tensorshard.torch_private.dispatch import TorchDispatchMode
from tensorshard.torch_private.fake_results import QuickFakeTensorMode
from tensorshard.torch_private.fake_tensors import NEEDS_VALUES, FakeTensor, FakeTensorMode, without_fake_kernel_reports

# The most parameters of a copy with values: they take 2 GB.
_LARGEST_REAL_COPY = 500_000_000

# Matrices of at least this many elements can be made compact: 4 MB.
_LARGE_MATRIX = 1 << 20
# The next row of a compact matrix begins this many elements further on: a prime, which no size of a layer is.
_COMPACT_STRIDE = 17

# The next matrix begins this many numbers after the one before: a prime, which no size of a layer is.
_POOL_STRIDE = 1009

# After this many numbers a pool repeats itself: 64 MB. This, too, is a prime, so that no two rows or columns are equal.
_POOL_PERIOD = 16_777_213

_Module = TypeVar("_Module", bound=nn.Module)
_Mode = TypeVar("_Mode", bound=TorchDispatchMode)


def copy_with(module: _Module, tensor_for: Callable[[str, torch.Tensor], torch.Tensor]) -> _Module:
    """A deep copy of `module` in which ``tensor_for(name, tensor)`` replaces each parameter and buffer.

    Ties are kept: for a tensor with several names, `tensor_for` is called once, with the first. Quantized tensors, of
    several behind one name, are those of `module`.
    """
    memo: dict[int, torch.Tensor] = {}
    for named in (module.named_parameters(), module.named_buffers()):
        for name, tensor in named:
            if is_quantized(tensor):
                memo[id(tensor)] = tensor
                continue
            value = tensor_for(name, tensor)
            memo[id(tensor)] = (
                nn.Parameter(value, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
            )
    return copy_module(module, memo)


def keep_padding(model: nn.Module) -> None:
    """Keeps torch's encoders from dropping padding in evaluation: that makes nested tensors, which cannot be faked."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def make_fake_copy(model: _Module, fake: FakeTensorMode, device: torch.device, *, values: bool = True) -> _Module:
    """A copy whose parameters take no memory; with `values`, buffers keep theirs where they have any."""

    def value(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return _sample(tensor, fake, device, values=values and not isinstance(tensor, nn.Parameter))

    copied = copy_with(model, value)
    hold_as_bytes(
        copied, empty=lambda size: value("", nn.Parameter(torch.empty(size, dtype=torch.uint8), requires_grad=False))
    )
    keep_padding(copied)
    return copied


def make_sample(inputs: Any, fake: FakeTensorMode, device: torch.device, *, values: bool = True) -> Any:
    """`inputs` for a fake copy. A tensor that occurs twice is copied once. With `values`, values are copied if any."""
    return map_tensors_once(lambda tensor: _sample(tensor, fake, device, values=values), inputs)


def follow_run(
    model: _Module,
    inputs: Any,
    follow: Callable[[FakeTensorMode, _Module, Any], _Mode],
    run: Callable[[_Module, Any, _Mode], None],
) -> _Mode:
    """Runs a copy of `model` on fake tensors. If that fails, as where it asks for values or for the exact type of a
    tensor, runs it on real ones, unless it is too large.

    The copy is on the CPU, in evaluation, with gradients. All parameters require them: without gradients, some modules
    take shortcuts past their layers.

    Fake tensors have no values. So the run holds for all values: code that takes a shortcut for some values (no mask
    where nothing is masked) takes the long way. Experts return placeholders
    (:func:`tensorshard.model.blocks.use_placeholder_outputs`). Real tensors are random, the same on every
    rank, and show what the model does with these values.

    Args:
        follow: makes the dispatch mode that follows the run, from the copy and its inputs.
        run: runs the copy on its inputs.

    Returns:
        The mode that followed the run.

    Raises:
        Exception: whatever the model raises.
    """
    with restored_globals(model), torch.enable_grad():
        try:
            return _run_fake(model, inputs, follow, run)
        except Exception as error:
            is_of_fakes = isinstance(error, (*NEEDS_VALUES, AssertionError, AttributeError, TypeError))
            if not is_of_fakes or sum(parameter.numel() for parameter in model.parameters()) > _LARGEST_REAL_COPY:
                raise
        return _run_real(model, inputs, follow, run)


def _run_fake(model: _Module, inputs: Any, follow: Any, run: Any) -> Any:
    fake, device = QuickFakeTensorMode(), torch.device("cpu")
    with without_fake_kernel_reports(), fake:  # inputs may be guessed, and a wrong guess is no error
        copied = make_fake_copy(model, fake, device, values=False)
        use_placeholder_outputs(copied)
        _prepare(copied)
        samples = make_sample(inputs, fake, device, values=False)
        mode = follow(fake, copied, samples)
        with mode:
            run(copied, samples, mode)
    return mode


def _run_real(model: _Module, inputs: Any, follow: Any, run: Any) -> Any:
    values = random_values(torch.Generator().manual_seed(0))
    copied = copy_with(model, values)
    keep_padding(copied)
    _prepare(copied)
    samples = map_tensors_once(lambda tensor: values("", tensor), inputs)
    mode = follow(FakeTensorMode(), copied, samples)
    with torch.random.fork_rng(devices=[]), mode:
        run(copied, samples, mode)
    return mode


def _prepare(copied: nn.Module) -> None:
    copied.eval()  # some models return nothing in training
    for parameter in copied.parameters():
        parameter.requires_grad_(parameter.is_floating_point())


def _sample(tensor: torch.Tensor, fake: FakeTensorMode, device: torch.device, *, values: bool) -> torch.Tensor:
    if values and not (tensor.is_meta or isinstance(tensor, FakeTensor)):
        return tensor.detach().to(device, copy=True)  # the model may change it in place
    with fake:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def mixed_mask(shape: Sequence[int]) -> torch.Tensor:
    """A mask under which each row attends to something, whether True means to attend or to ignore."""
    return sum(torch.meshgrid(*map(torch.arange, shape), indexing="ij"), start=torch.zeros(())) % 2 == 0


def random_values(
    generator: torch.Generator, kernels: Container[str] = ()
) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """Values that make a wrong split visible: they are as large as trained weights', with biases, and norms not all 1.

    Buffers keep their values if they have any, except for running statistics, which look like those after training.
    Floating-point types become fp32, since comparisons are most exact in it.

    Args:
        kernels: names of the weights of convolutions [channels, channels, ...].
    """

    def value(name: str, tensor: torch.Tensor) -> torch.Tensor:
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        statistics = tensor.is_floating_point() and name.endswith(STATISTICS)
        has_values = not tensor.is_meta and not isinstance(tensor, FakeTensor)
        if not isinstance(tensor, nn.Parameter) and has_values and not statistics:
            return tensor.detach().to("cpu", dtype, copy=True)
        if not tensor.is_floating_point():
            if dtype == torch.bool and tensor.ndim > 1:
                return mixed_mask(tensor.shape)
            return torch.ones(tensor.shape, dtype=dtype)  # nothing is masked, and every index is 1
        noise = torch.randn(tensor.shape, generator=generator)
        if not isinstance(tensor, nn.Parameter) and tensor.ndim < 2:
            return noise.abs_().add_(0.5)  # it may be a variance, a frequency or a count
        if tensor.ndim < 2:
            return noise.mul_(0.3).add_(1.0 if name.endswith("weight") else 0.0)
        if name in kernels:
            return noise.mul_(1.5 / tensor[0].numel() ** 0.5)
        return noise.mul_(_scale(tensor.shape))

    return value


def gentle_values(
    values: Callable[[str, torch.Tensor], torch.Tensor],
) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """As `values`, but vectors are positive, and matrices small: for code that takes roots, or is deep."""

    def value(name: str, tensor: torch.Tensor) -> torch.Tensor:
        made = values(name, tensor)
        if not isinstance(tensor, nn.Parameter) or not made.is_floating_point():
            return made
        return made.abs_().add_(0.1) if made.ndim < 2 else made.mul(0.3)

    return value


def compact_values(
    generator: torch.Generator, values: Callable[[str, torch.Tensor], torch.Tensor]
) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """As `values`, but rows of large matrices overlap in memory: each begins soon after the one before.

    So a matrix takes a few percent of its memory. No two rows or columns are equal. Computing with the wrong ones is
    off by as much as with independent random numbers.
    """

    def value(name: str, tensor: torch.Tensor) -> torch.Tensor:
        large = isinstance(tensor, nn.Parameter) and tensor.ndim == 2 and tensor.numel() >= _LARGE_MATRIX
        if not large or not tensor.is_floating_point() or tensor.shape[1] < 2 * _COMPACT_STRIDE:
            return values(name, tensor)
        rows, columns = tensor.shape
        noise = torch.randn((rows - 1) * _COMPACT_STRIDE + columns, generator=generator)
        noise.mul_(_scale(tensor.shape))
        return noise.as_strided((rows, columns), (_COMPACT_STRIDE, 1))

    return value


def pooled_values(
    generator: torch.Generator, values: Callable[[str, torch.Tensor], torch.Tensor], model: nn.Module
) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """As `values`, but large matrices of `model` are overlapping pieces of the same random numbers.

    Each begins somewhere else, so no two are equal. Together they take little more memory than the largest. Unlike
    those of :func:`compact_values`, each is contiguous.
    """
    matrices = [parameter for parameter in model.parameters() if is_large_matrix(parameter)]
    sizes: dict[float, int] = {}
    for parameter in matrices:
        scale = _scale(parameter.shape)
        sizes[scale] = max(sizes.get(scale, 0), parameter.numel())
    pools: dict[float, torch.Tensor] = {}
    begins = itertools.count(_POOL_STRIDE, _POOL_STRIDE)

    def value(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter) or not is_large_matrix(tensor):
            return values(name, tensor)
        scale, begin = _scale(tensor.shape), next(begins)
        if scale not in pools:
            room = sizes[scale] + _POOL_STRIDE * (len(matrices) + 1)
            noise = torch.randn(min(room, _POOL_PERIOD), generator=generator).mul_(scale)
            pools[scale] = torch.cat([noise] * (room // len(noise)) + [noise[: room % len(noise)]])
        return pools[scale][begin : begin + tensor.numel()].view(tensor.shape)

    return value


def is_large_matrix(parameter: torch.Tensor) -> bool:
    """Whether it is large enough for :func:`pooled_values` to put it into the shared memory."""
    return parameter.ndim == 2 and parameter.numel() >= _LARGE_MATRIX and parameter.is_floating_point()


def _scale(shape: Sequence[int]) -> float:
    """Somewhat above the usual scale of a matrix, so that attention is far from uniform."""
    return 1.5 / max(1, min(shape[-2:])) ** 0.5
