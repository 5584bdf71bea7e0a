"""One process against ranks that are threads: outputs, gradients and buffers."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from simulated_ranks import simulate
from torch import nn

from tensorshard.context_parallel import ContextGroup, SequenceLayout, contiguous, cut, from_positions, whole, zigzag


def scattered(length: int, size: int) -> SequenceLayout:
    """A random permutation of the positions."""
    order = torch.randperm(length, generator=torch.Generator().manual_seed(1))
    return from_positions([part.numpy() for part in order.tensor_split(size)])


LAYOUTS = {"contiguous": contiguous, "zigzag": zigzag, "scattered": scattered}


def loss_and_gradients(model: nn.Module, loss: torch.Tensor, ranks: int = 1) -> Any:
    (loss / ranks).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return loss.detach(), gradients, {name: buffer.clone() for name, buffer in model.named_buffers()}


def check_model(
    model: nn.Module,
    batch: dict[str, Any],
    dims: dict[str, int],
    *,
    loss_of: Callable[..., torch.Tensor] = lambda model, batch: model(**batch),
    size: int = 2,
    layout: Any = contiguous,
    bound: float = 1e-9,
    backward_outside: bool = False,
    refetches: bool = False,
    neighbours: int | None = None,
) -> ContextGroup:
    """Compares a model on `size` ranks, on which ``batch[name]`` is cut along ``dims[name]``, with one process."""
    model = model.double()
    batch = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in batch.items()}
    torch.manual_seed(3)
    alone = copy.deepcopy(model)
    loss, gradients, buffers = loss_and_gradients(alone, loss_of(alone, batch))
    copies = [copy.deepcopy(model) for _ in range(size)]

    def on_rank(group: ContextGroup) -> Any:
        if group.rank == 0:
            torch.manual_seed(3)
        group.refetches, group.neighbours = refetches, neighbours or size
        with group.active():
            given = {
                key: cut(value, dims[key], layout(value.shape[dims[key]], size)) if key in dims else value
                for key, value in batch.items()
            }
            loss = whole(loss_of(copies[group.rank], given))
            if not backward_outside:
                return (*loss_and_gradients(copies[group.rank], loss, size), group)
        return (*loss_and_gradients(copies[group.rank], loss, size), group)

    results = simulate(size, on_rank)
    scale = max(float(gradient.abs().max()) for gradient in gradients.values() if gradient is not None)
    for result in results:
        assert abs(result[0] - loss) <= bound * abs(loss), f"loss {float(result[0])}, not {float(loss)}"
        for name, buffer in buffers.items():
            torch.testing.assert_close(result[2][name], buffer, rtol=bound, atol=bound)
    for name, gradient in gradients.items():
        parts = [result[1][name] for result in results if result[1][name] is not None]
        if gradient is None:
            assert not any(part.any() for part in parts), f"{name} has no gradient"
            continue
        assert parts, f"{name} has no gradient on any rank"
        error = float((sum(parts) - gradient).abs().max()) / max(float(gradient.abs().max()), 1e-3 * scale)
        assert error <= bound, f"the gradient of {name} differs by {error}"
    return results[0][3]
