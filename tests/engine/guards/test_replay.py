"""A rank that computes otherwise when it repeats its work is named; one that does not is left as it was."""

import re
import socket
from functools import partial

import pytest
import torch
from torch import nn

import tensorshard as ts
from rank_pool import RankError
from tensorshard.engine.guards.replay import ReplayMismatchError

PLANS = {
    "zero0": (2, {"zero": 0}),
    "zero2-micro2-bf16": (2, {"zero": 2, "micro_batches": 2, "precision": "bf16"}),
    "zero3-recompute": (2, {"zero": 3, "recompute": "full"}),
    "tp": (2, {"tp": 2}),
    "pp": (2, {"pp": 2, "micro_batches": 2}),
    "hybrid": (4, {"zero": 3, "dp_replicate": 2}),
    "offload": (2, {"zero": 2, "offload": "cpu"}),
    "tp-zero1": (4, {"tp": 2, "zero": 1}),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Net(nn.Module):
    """Blocks with dropout, and a batch norm whose buffers each forward moves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean(1)))


def _engine(fields: dict) -> ts.Engine:
    adamw = partial(torch.optim.AdamW, lr=1e-2)
    return ts.parallelize(Net, ts.Plan(**fields), optimizer=adamw, loss_fn=nn.functional.cross_entropy)


def _batch(engine: ts.Engine, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(16, 6, 16, generator=generator), torch.randint(5, (16,), generator=generator)
    share = slice(engine.mesh.dp_rank, None, engine.mesh.dp_size)
    return x[share], y[share]


def _losses(fields: dict, replays: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = _engine(fields)
    losses = []
    for step in range(3):
        if replays:
            engine.replay(*_batch(engine, step))
        losses.append(engine.step(*_batch(engine, step)).item())
    return losses, engine.full_state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_training_goes_on_to_the_bit_as_without_it(ranks, plan):
    world_size, fields = PLANS[plan]
    found, expected = (ranks(world_size, _losses, fields, replays) for replays in (True, False))
    for with_it, without in zip(found, expected, strict=True):
        assert with_it[0] == without[0]
        for name, value in without[1].items():
            assert torch.equal(with_it[1][name], value), name


def _flip_a_bit(tensor: torch.Tensor) -> None:
    tensor.view(torch.int32).view(-1)[4] ^= 1 << 20


def _add(tensor: torch.Tensor) -> None:
    tensor.view(-1)[0] += 0.5


def _write_behind(tensor: torch.Tensor) -> None:
    tensor.numpy().reshape(-1)[0] += 0.5  # no operator sees it


def _faulty(fields: dict, fault, backward: bool) -> str:
    engine = _engine(fields)
    engine.step(*_batch(engine, 0))
    engine.replay(*_batch(engine, 1))
    weights = engine.full_state_dict()
    calls = [0]
    second = 3 if fields.get("recompute") and not backward else 2  # a block's forward runs twice there

    def spoil(tensor: torch.Tensor) -> None:
        calls[0] += 1
        if calls[0] == second and engine.mesh.rank == 1:
            fault(tensor)

    def after_forward(module, inputs, output):
        with torch.no_grad():
            spoil(output.detach())

    def after_backward(module, gradients, given):
        spoil(gradients[0].detach())

    block = dict(engine.model.named_modules()).get("blocks.3.down")  # the last stage has it
    if block is not None:
        if backward:
            block.register_full_backward_hook(after_backward)
        else:
            block.register_forward_hook(after_forward)
    try:
        engine.replay(*_batch(engine, 1))
    except ReplayMismatchError as error:
        unchanged = all(torch.equal(value, weights[name]) for name, value in engine.full_state_dict().items())
        return f"{error} unchanged: {unchanged}"
    return "nothing"


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("fault", [_flip_a_bit, _add, _write_behind])
@pytest.mark.parametrize("plan", ["zero0", "zero3-recompute", "tp", "hybrid"])
def test_the_faulty_rank_is_named_on_all_ranks(ranks, plan, fault, backward):
    world_size, fields = PLANS[plan]
    for said in ranks(world_size, _faulty, fields, fault, backward):
        assert re.findall(r"rank \d \(on .+?\): ", said) == [f"rank 1 (on {socket.gethostname()}): "]
        assert said.endswith("unchanged: True")


def _random_of_its_own(fields: dict) -> None:
    engine = _engine(fields)
    generator = torch.Generator().manual_seed(0)
    engine.model.head.register_forward_pre_hook(lambda module, given: (given[0] * torch.rand(1, generator=generator),))
    engine.replay(*_batch(engine, 0))


def test_a_model_that_is_not_the_same_twice_is_told_so(ranks):
    with pytest.raises(RankError, match="A model that does something else each time it is called") as caught:
        ranks(2, _random_of_its_own, {"zero": 1})
    assert "mul" in str(caught.value) or "rand" in str(caught.value)
