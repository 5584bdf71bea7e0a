"""Plan(sequence_parallel=True): what stands before the first block and after the last one has parts of sequences."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import parity
import seeds
import tensorshard as ts
from tensorshard.tensor_parallel.search.find_table import find_tensor_plan

WIDTH, TOKENS, POSITIONS = 16, 13, 9  # an odd length


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x)).cumsum(1)))


class Norms(nn.Module):
    """Two norms, a dropout and a cast; the class is nobody's but ours."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5) * self.scale
        return self.dropout(self.norm(h.to(x.dtype)))


class Model(nn.Module):
    """Embeddings, a dropout, blocks, what stands after them, and a head.

    Args:
        reads: what else the model does with what its last block, or its first dropout, returns.
    """

    def __init__(self, reads: str = "") -> None:
        super().__init__()
        self.reads = reads
        self.embed, self.start = nn.Embedding(TOKENS, WIDTH), nn.Dropout(0.2)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norms, self.last = Norms(), nn.LayerNorm(WIDTH, bias=False)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH) if reads == "neighbours" else nn.Identity()
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: torch.Tensor) -> Any:
        first = x = self.start(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        hidden = x
        if self.reads == "neighbours":
            x = self.mix(x.mT).mT
        x = self.last(self.norms(x))
        if self.reads == "length":
            x = x / hidden.shape[1]
        if self.reads == "mean in training" and self.training:
            x = x + hidden.mean()
        if self.reads == "kept":
            self.hidden = hidden
        if self.reads == "first":
            x = x + first
        logits = self.head(x)
        return (logits, hidden) if self.reads == "returned" else logits


AFTER = {"norms": (False, False), "last": (False, True)}
"""Which modules after the blocks have parts: whether each cuts the sequence, and whether it puts it together."""


@pytest.mark.parametrize(
    ("reads", "start", "after"),
    [
        ("", True, AFTER),
        ("returned", True, {}),
        pytest.param("first", False, AFTER, marks=pytest.mark.slow),
        *(
            pytest.param(reads, True, {}, marks=pytest.mark.slow)
            for reads in ("length", "mean in training", "kept", "neighbours")
        ),
    ],
)
def test_what_is_read_elsewhere_stays_whole(reads, start, after):
    tokens = torch.zeros(2, POSITIONS, dtype=torch.long)
    found = find_tensor_plan(Model(reads), 2, inputs=tokens, sequence_parallel=True).sequence
    between = {name: (split.scatters, split.gathers) for name, split in found.items() if split.is_between}
    assert between == ({"start": (True, False)} if start else {}) | after
    assert found["blocks.0"].scatters != start and found["blocks.2"].gathers != bool(after)


def _train(reads: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Losses, weights, and the lengths that the modules between blocks and head were given."""
    seeds.seed(1)
    engine = ts.parallelize(
        Model(reads),
        ts.Plan(**fields),
        optimizer=parity.ADAMW,
        loss_fn=_loss,
        sample_inputs=torch.zeros(4, POSITIONS, dtype=torch.long),
    )
    lengths: dict[str, int] = {}
    for name, module in engine.model.named_modules():
        if name in ("start", "norms", "norms.norm", "last"):
            module.register_forward_hook(partial(_note, lengths, name))
    tokens = torch.randint(0, TOKENS, (8, POSITIONS + 1), generator=seeds.generator(2))
    inputs, targets = parity.shard(engine, tokens[:, :-1], tokens[:, 1:])
    losses = [engine.step(inputs, targets).item() for _ in range(4)]
    return {"losses": losses, "state": engine.full_state_dict(), "lengths": lengths}


def _loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
    logits, *hidden = output if isinstance(output, tuple) else (output,)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return loss + sum(h[:, :4].square().mean() for h in hidden)


def _note(lengths: dict[str, int], name: str, module: nn.Module, args: Any, output: Any) -> None:
    if isinstance(args[0], torch.Tensor):
        lengths[name] = args[0].size(1)


PLANS = {
    "zero0": (2, dict(zero=0)),
    "zero3": (4, dict(zero=3)),
    "parted": (4, dict(zero=3, shard_units=["blocks.*", "norms.norm"])),
    "zero2-micro": (4, dict(zero=2, micro_batches=2)),
    "zero1": (4, dict(zero=1)),
    "hybrid": (8, dict(zero=3, dp_replicate=2)),
    "full": (2, dict(recompute="full")),
    "selective": (2, dict(recompute="selective")),
    "cp": (4, dict(cp=2)),
    "tp4": (4, dict(tp=4)),
    "pp": (4, dict(pp=2, micro_batches=2)),
    "pp3": (6, dict(pp=3, micro_batches=4, pp_split=["blocks.1", "last"])),
    "pp-full-zero3": (8, dict(pp=2, zero=3, micro_batches=2, recompute="full")),
    "compile": (2, dict(compile=True)),
}


@pytest.mark.fast_cases("zero0")
@pytest.mark.parametrize("case", PLANS)
def test_parity_with_one_process(ranks, case):
    size, fields = PLANS[case]
    found = ranks(size, _train, "", {"tp": 2, "sequence_parallel": True, **fields})
    parity.assert_same(found[0], ranks(1, _train, "", {})[0], 1e-5)
    if size == 2 and not fields.get("compile"):
        assert [f["lengths"] for f in found] == [
            dict.fromkeys(("start", "norms", "norms.norm", "last"), n) for n in (5, 4)
        ]


@pytest.mark.slow
@pytest.mark.parametrize("reads", ["returned", "length", "mean in training", "first", "neighbours"])
def test_parity_where_sequences_stay_whole(ranks, reads):
    found = ranks(2, _train, reads, dict(tp=2, sequence_parallel=True))
    parity.assert_same(found[0], ranks(1, _train, reads, {})[0], 1e-5)


@pytest.mark.slow
def test_bf16_within_the_spread_of_reduction_orders(ranks):
    one = ranks(1, _train, "", dict(precision="bf16"))[0]
    two = ranks(2, _train, "", dict(precision="bf16", tp=2, sequence_parallel=True))[0]
    torch.testing.assert_close(torch.tensor(two["losses"]), torch.tensor(one["losses"]), rtol=2e-3, atol=0)


def _hooked() -> nn.Module:
    model = Model()
    model.last.register_forward_hook(lambda module, args, output: None)
    return model


def test_hooks_of_the_users_get_whole_sequences():
    tokens = torch.zeros(2, POSITIONS, dtype=torch.long)
    found = find_tensor_plan(_hooked(), 2, inputs=tokens, sequence_parallel=True).sequence
    assert "last" not in found and found["norms"].gathers


@pytest.mark.slow
def test_estimates_follow():
    def peak(reads: str) -> int:
        tokens = torch.zeros(1, 4096, dtype=torch.long)
        return (
            ts.estimate(
                partial(Model, reads),
                ts.Plan(tp=4, sequence_parallel=True, recompute="full"),
                world_size=4,
                inputs=tokens,
                targets=tokens,
                optimizer=parity.ADAMW,
                loss_fn=_loss,
            )
            .ranks[0]
            .peak_allocated
        )

    whole = 4096 * WIDTH * 4
    assert peak("") < peak("length") - 4 * whole * 3 // 4  # of four tensors that are kept, each rank has a quarter


def _loop_over_parts(way: str, fields: dict[str, Any]) -> list[float]:
    seeds.seed(1)
    model = Model()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    sgd = partial(torch.optim.SGD, lr=0.1)
    samples = torch.zeros(4, POSITIONS, dtype=torch.long)
    engine = ts.parallelize(model, ts.Plan(**fields), optimizer=sgd, loss_fn=_loss, sample_inputs=samples)
    tokens = torch.randint(0, TOKENS, (4, POSITIONS), generator=seeds.generator(2))
    losses = []
    for _ in range(2):
        parts = engine.model
        x = parts.start(parts.embed(tokens))
        for block in list(parts.blocks)[: 1 if way == "first block" else 3]:
            x = block(x)
        if way == "last norm":
            x = parts.last(parts.embed(tokens))
        loss = parts.head(x).square().mean() + x.square().mean() * x.shape[1]
        engine.backward(loss)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("way", ["first block", "all blocks", "last norm"])
def test_parts_that_a_loop_calls_by_themselves_have_whole_sequences(ranks, way):
    alone = ranks(1, _loop_over_parts, way, {})[0]
    for losses in ranks(2, _loop_over_parts, way, dict(tp=2, sequence_parallel=True)):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(alone), rtol=1e-5, atol=1e-6)
