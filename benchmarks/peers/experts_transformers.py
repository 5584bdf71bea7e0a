"""transformers' all-to-all around its own experts; all other gradients are reduced after backward."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers.distributed import expert_parallel

from benchmarks.experts import OPTIMIZER, MixtureWork, loss_fn


def build(work: MixtureWork, rank: int, world_size: int) -> tuple[Callable[[], float], Callable[[], int]]:
    """A step of training, which returns its loss; and the bytes of rows that came from other ranks so far."""
    model, expert_weights, received = work.model(), set(), [0]
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("ep", "tp"))
    exchange = expert_parallel.all_to_all_single_autograd

    def counting(rows: Tensor, arriving: list[int], leaving: list[int], group: Any) -> Tensor:
        away = sum(arriving) - arriving[rank], sum(leaving) - leaving[rank]  # and gradients back
        received[0] += sum(away) * rows.size(-1) * rows.element_size()
        return exchange(rows, arriving, leaving, group)

    expert_parallel.all_to_all_single_autograd = counting
    for layer in model.model.layers:
        experts = layer.mlp.experts
        for name in ("gate_up_proj", "down_proj"):
            part = getattr(experts, name).detach().chunk(world_size)[rank].clone()
            setattr(experts, name, nn.Parameter(part))
            expert_weights.add(getattr(experts, name))
        experts.num_experts //= world_size
        experts.forward = expert_parallel.AllToAllEP(experts, mesh["ep"], mesh["tp"]).__call__
    optimizer = OPTIMIZER(model.parameters())
    inputs, targets = (part.chunk(world_size)[rank] for part in work.batch())

    def step() -> float:
        loss = loss_fn(model(input_ids=inputs), targets) / world_size
        loss.backward()
        for parameter in model.parameters():
            if parameter not in expert_weights:
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        return total.item()

    return step, lambda: received[0]
