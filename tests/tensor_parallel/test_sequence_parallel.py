"""Plan(sequence_parallel=True): parity with one process, composed with the rest, and what cannot be split."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import parity
import table_models
import tensorshard as ts
from tensorshard.tensor_parallel.search.find_table import find_tensor_plan

CLIP = 1.0
MATRIX = {
    "tp2": (2, dict(tp=2), ["gpt_tied", "vit", "llama", "hf_bert"]),
    "tp2_zero3": (4, dict(tp=2, zero=3), ["gpt"]),
    "tp2_zero3_parted": (4, dict(tp=2, zero=3, shard_units=["blocks.*.attention", "blocks.*.mlp"]), ["gpt"]),
    "tp2_zero2_micro": (4, dict(tp=2, zero=2, micro_batches=2), ["gpt_tied"]),
    "tp2_zero1": (4, dict(tp=2, zero=1), ["bert"]),
    "tp2_recompute": (4, dict(tp=2, zero=3, recompute="full"), ["llama"]),
    "tp2_selective": (2, dict(tp=2, recompute="selective"), ["gpt"]),
    "tp2_hybrid": (8, dict(tp=2, dp_replicate=2, zero=3), ["gpt"]),
}
CASES = [(name, kind) for name, (_, _, kinds) in MATRIX.items() for kind in kinds]
# Of each model, level and recomputation one stays that is not slow; test_pipeline_parallel.py has one on eight ranks.


@pytest.mark.fast_cases("tp2-hf_bert")
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_parity_with_one_process(ranks, name, kind):
    world_size, fields, _ = MATRIX[name]
    plan = {**fields, "sequence_parallel": True, "clip_grad_norm": CLIP}
    found = ranks(world_size, parity.train, kind, plan)[0]
    expected = parity.reference(kind, CLIP)
    parity.assert_same(found, expected, 1e-5)
    torch.testing.assert_close(torch.tensor(found["norms"]), torch.tensor(expected["norms"]), rtol=1e-5, atol=0)


@pytest.mark.slow
def test_bf16_within_the_spread_of_reduction_orders(ranks):
    one = ranks(1, parity.train, "gpt", dict(precision="bf16"))[0]
    two = ranks(2, parity.train, "gpt", dict(precision="bf16", tp=2, sequence_parallel=True))[0]
    torch.testing.assert_close(torch.tensor(two["losses"]), torch.tensor(one["losses"]), rtol=2e-3, atol=0)


# Uneven sequences over four ranks are in there, and heads that four ranks cannot divide, so that attention stays whole.
@pytest.mark.slow_cases("llama-2", "gpt2-2")
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind",
    [
        "gpt2",
        pytest.param("phi3", marks=pytest.mark.slow),
        "gpt_neox",
        pytest.param("t5", marks=pytest.mark.slow),
        "llama",
        "hf_vit",
    ],
)
def test_every_block_is_found_and_agrees_by_numbers(kind, size):
    model = table_models.build(kind)
    found = find_tensor_plan(model, size, inputs=table_models.inputs(kind), sequence_parallel=True)
    blocks = {"gpt2": 2, "phi3": 2, "gpt_neox": 2, "t5": 4, "llama": 2, "hf_vit": 2}[kind]
    assert sum(not split.is_between for split in found.sequence.values()) == blocks
    # What the model hands from block to block is cut before the first and put together after the last.
    stacks = 2 if kind == "t5" else 1
    assert sum(split.scatters for split in found.sequence.values()) == stacks
    assert sum(split.gathers for split in found.sequence.values()) == stacks
    assert "in parts of a sequence:" in found.describe()


class Peeking(nn.Module):
    """A model that looks at what its first block returns, and calls its last one twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        peek = x.mean(1, keepdim=True)
        x = self.blocks[2](self.blocks[1](x))
        return self.blocks[2](x) + peek


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def test_what_code_between_blocks_reads_is_whole():
    found = find_tensor_plan(Peeking(), 2, inputs=torch.zeros(2, 5, 8), sequence_parallel=True)
    ends = {name: (split.scatters, split.gathers) for name, split in found.sequence.items()}
    assert ends == {"blocks.0": (True, True), "blocks.1": (True, True), "blocks.2": (True, True)}


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_attention_of_torch(batch_first, norm_first):
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=batch_first, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    found = find_tensor_plan(model, 2, inputs=torch.zeros(4, 5, 16), sequence_parallel=True)
    assert set(found.sequence) == {"layers.0", "layers.1"}
    split = found.sequence["layers.0"]
    assert split.dim == (1 if batch_first else 0)
    assert split.attentions == {"self_attn": (0, 1, 2)} and not split.whole and split.columns == {"linear1": True}
    assert "self_attn.out_proj" in split.rows


def test_attention_that_stays_whole_runs_on_the_whole_sequence():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    found = find_tensor_plan(model, 4, inputs=torch.zeros(3, 5, 16), sequence_parallel=True)
    assert "self_attn" in found.sequence["layers.0"].whole


def _refusal(build: Any, fields: dict[str, Any], inputs: Any, samples: Any = None) -> str:
    try:
        engine = ts.parallelize(
            build,
            ts.Plan(**fields),
            optimizer=parity.ADAMW,
            loss_fn=lambda output, _: output.square().mean(),
            sample_inputs=samples,
        )
        engine.step(inputs, inputs)
    except ValueError as error:
        return str(error)
    return "no error"


class Features(nn.Module):
    """Layers over [batch, features]: there is no sequence."""

    def __init__(self, *, flat: bool = True) -> None:
        super().__init__()
        self.flat = flat
        self.blocks = nn.ModuleList(Residual() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x.flatten(1) if self.flat else x)
        return x


@pytest.mark.slow
def test_what_cannot_be_split_is_refused(ranks):
    plan = dict(tp=2, sequence_parallel=True)
    message = ranks(2, _refusal, Features, plan, torch.zeros(4, 8))[1]
    assert "no block of this Features can be split along a sequence" in message and "sequence_parallel=False" in message
    either = partial(Features, flat=False)
    guessed = ranks(2, _refusal, either, plan, torch.zeros(4, 5, 8))[0]
    assert "may be meant for [samples, features]; give parallelize(sample_inputs=...) sequences" in guessed
    flat = ranks(2, _refusal, either, plan, torch.zeros(4, 8), torch.zeros(4, 5, 8))[0]
    assert "was given a tensor [4, 8], and expected 3 dimensions, of which dimension 1 is the sequence" in flat
    short = ranks(2, _refusal, _gpt, plan, torch.zeros(4, 1, dtype=torch.long))[1]
    assert "1 positions along dimension 1, which cannot be split over tp=2 ranks" in short
    unchecked = {**plan, "tp_plan": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}, "tp_check": False}
    assert "set tp_check=True" in ranks(2, _refusal, Features, unchecked, torch.zeros(4, 8))[0]


def _gpt() -> nn.Module:
    return parity.build("gpt")


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self._inner, x, use_reentrant=self.reentrant)

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


def _checkpointed(reentrant: bool, fields: dict[str, Any]) -> list[float] | str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), *(Checkpointed(reentrant) for _ in range(3)))
    adamw = partial(torch.optim.AdamW, lr=1e-2)
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))
    try:
        plan = ts.Plan(**fields)
        engine = ts.parallelize(model, plan, optimizer=adamw, loss_fn=nn.functional.mse_loss, sample_inputs=x)
        return [engine.step(x, torch.zeros(4, 6, 16)).item() for _ in range(3)]
    except (ValueError, RuntimeError) as error:
        return str(error)


@pytest.mark.slow
def test_reentrant_checkpoints_of_the_models_own_are_refused(ranks):
    fields = dict(tp=2, sequence_parallel=True)
    assert ranks(2, _checkpointed, False, fields)[0] == pytest.approx(ranks(1, _checkpointed, False, {})[0], rel=1e-5)
    for message in ranks(2, _checkpointed, True, fields):
        assert "use_reentrant=True" in message and "Plan(recompute='full')" in message
