"""Ring attention by hand, after Liu et al. 2023: keys and values go round, and partial results are merged in fp32.

As short as it can be: it passes keys and values on once they are repeated for all heads of queries.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist

from benchmarks.sequences import SequenceWork

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

_received = [0]


def _passed_on(tensor: Tensor) -> Tensor:
    """What the rank before this one has passed on."""
    rank, size = dist.get_rank(), dist.get_world_size()
    arrived = torch.empty_like(tensor)
    sending = dist.isend(tensor.contiguous(), (rank + 1) % size)
    receiving = dist.irecv(arrived, (rank - 1) % size)
    assert sending is not None and receiving is not None
    sending.wait()
    receiving.wait()
    _received[0] += arrived.nbytes
    return arrived


class _RingAttention(torch.autograd.Function):
    """Causal attention of this rank's queries ``[batch, heads, positions, width]``, the r-th part of the sequence."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rank, size, part = dist.get_rank(), dist.get_world_size(), torch.stack([k, v])
        out, log_sum = _forward(q, k, v, is_causal=True)  # log_sum: [batch, heads, positions]
        for distance in range(1, size):
            part = _passed_on(part)
            if rank >= distance:  # of an earlier part; later ones are masked
                other, other_sum = _forward(q, part[0], part[1])
                total = torch.logaddexp(log_sum, other_sum)
                weight, other_weight = ((each - total).exp().unsqueeze(-1) for each in (log_sum, other_sum))
                out, log_sum = out * weight + other * other_weight, total
        ctx.save_for_backward(q, k, v, out, log_sum)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        q, k, v, out, log_sum = ctx.saved_tensors
        rank, size, part = dist.get_rank(), dist.get_world_size(), torch.stack([k, v])
        gradient = gradient.contiguous()
        of_q, *of_keys = _backward(gradient, q, k, v, out, log_sum, 0.0, True)
        travelling = torch.stack(of_keys)
        for distance in range(1, size):
            part, travelling = _passed_on(torch.cat([part, travelling])).chunk(2)
            if rank >= distance:
                more_q, *more = _backward(gradient, q, part[0], part[1], out, log_sum, 0.0, False)
                of_q, travelling = of_q + more_q, travelling + torch.stack(more)
        of_k, of_v = _passed_on(travelling) if size > 1 else travelling
        return of_q, of_k, of_v


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    return _RingAttention.apply(query, key, value).transpose(1, 2), None


def build(work: SequenceWork, rank: int, world_size: int) -> tuple[Callable[[], float], Callable[[], int]]:
    """A step of training, which returns its loss; and the bytes that attention has received so far."""
    from transformers import AttentionInterface

    AttentionInterface.register("ring", _attention)
    model = work.model()
    model.set_attn_implementation("ring")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs, targets = (tensor.chunk(world_size, 1)[rank] for tensor in work.batch())
    positions = torch.arange(work.length).chunk(world_size)[rank].unsqueeze(0)

    def step() -> float:
        logits = model(input_ids=inputs, position_ids=positions).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / work.length
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        return total.item()

    return step, lambda: _received[0]
