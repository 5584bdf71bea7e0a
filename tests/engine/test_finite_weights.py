"""Weights stay finite whatever a step meets: gradients are looked at in every step, under every plan."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import tensorshard as ts
from tensorshard.engine.engine import NonFiniteLossError

ADAMW = partial(torch.optim.AdamW, lr=0.1)


class _Poison(torch.autograd.Function):
    """Passes values on; a gradient of infinity comes back where the first of them is above 100."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        ctx.factor = torch.where(inputs.max() > 100, torch.inf, 1.0)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * ctx.factor, None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("average", torch.zeros(8), persistent=False)  # of a rank's own samples

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            self.average = self.average * 0.9 + 0.1 * x.detach().float().mean(0)
        return x + self.down(torch.relu(self.up(x)))


class Poisoned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.clamp(max=3.0)
        for block in self.blocks:
            h = block(h)
        return self.dropout(_Poison.apply(h, x))


def _batch(step: int, poisoned: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, t = torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)
    if poisoned:
        x[-1, 0] = 1000.0  # a sample of the last data rank alone
    return x, t


def _state(engine: ts.Engine) -> list[torch.Tensor]:
    states = [s for state in engine.optimizer.state.values() for s in state.values()]
    tensors = [*engine.sharded.masters().values(), *engine.model.buffers(), *states]
    return [(t.to_local() if isinstance(t, DTensor) else t).detach().clone() for t in tensors]


def _steps(fields: dict[str, Any]) -> tuple[list[str], bool, list[float], list[float]]:
    poisoned, undisturbed = (
        ts.parallelize(Poisoned(), ts.Plan(**fields), optimizer=ADAMW, loss_fn=nn.functional.mse_loss) for _ in range(2)
    )
    mesh = poisoned.mesh

    def own(batch: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
        return [t.chunk(mesh.dp_size)[mesh.dp_rank] for t in batch]

    messages, same = [], True
    losses, expected = [], []
    for step in range(3):
        before = _state(poisoned)
        for _ in range(2 if step else 1):
            try:
                poisoned.step(*own(_batch(9, poisoned=True)))
                messages.append("taken")
            except NonFiniteLossError as error:
                messages.append(str(error))
        # In the first step, optimizers have no states yet.
        same = same and all(torch.equal(a, b) for a, b in zip(before, _state(poisoned), strict=True))
        losses.append(poisoned.step(*own(_batch(step))).item())
        expected.append(undisturbed.step(*own(_batch(step))).item())
    same = same and all(torch.equal(a, b) for a, b in zip(_state(undisturbed), _state(poisoned), strict=True))
    return messages, same, losses, expected


PLANS: list[dict[str, Any]] = [
    *(dict(zero=level) for level in range(4)),
    dict(zero=1, precision="bf16", micro_batches=2),
    dict(zero=3, precision="bf16", recompute="full"),
    dict(tp=2, tp_plan={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}),
    dict(pp=2, micro_batches=2),
]


@pytest.mark.fast_cases("{'zero': 1}")
@pytest.mark.parametrize("fields", PLANS, ids=str)
def test_an_infinite_gradient_changes_nothing_on_any_rank(ranks, fields):
    for messages, same, losses, expected in ranks(2, _steps, fields):
        numbers = [1, 2, 2, 3, 3]
        for number, message in zip(numbers, messages, strict=True):
            norm = f"the norm of the gradient of step {number} is "
            assert message.startswith((f"{norm}inf", f"{norm}nan"))
        assert same
        assert losses == expected


class Huge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


def _huge_gradients(clip: float | None) -> torch.Tensor:
    engine = ts.parallelize(
        Huge(), ts.Plan(zero=1, clip_grad_norm=clip), optimizer=partial(torch.optim.SGD, lr=1e-30),
        loss_fn=lambda output, targets: output.sum(),
    )  # fmt: skip
    engine.step(torch.full((1, 3), 1e30), torch.zeros(1))
    return engine.full_state_dict().get("weight", torch.empty(0))


def test_gradients_whose_squares_overflow_are_finite(ranks):
    torch.testing.assert_close(ranks(2, _huge_gradients, None)[0], torch.zeros(3), rtol=0, atol=1e-6)
    assert torch.equal(ranks(2, _huge_gradients, 1.0)[0], torch.ones(3))
