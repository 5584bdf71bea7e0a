"""``Plan(cp=N)`` with the other axes trains as one process does."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import parity
import tensorshard as ts
from tensorshard.context_parallel import ContextGroup
from tensorshard.context_parallel.rules import attention
from tensorshard.loss.logits.deferred_logits import Source
from tensorshard.model.whole_sequences import first_sequence, sequence_dim

# id: (model, ranks, fields of the plan)
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "gpt-cp2-zero3": ("gpt", 2, dict(cp=2)),
    "gpt-cp2-zero0-micro2-clip": ("gpt", 2, dict(cp=2, zero=0, micro_batches=2, clip_grad_norm=1.1)),
    "gpt-cp2-zero1-full": ("gpt", 2, dict(cp=2, zero=1, recompute="full")),
    "gpt-cp2-zero3-selective": ("gpt", 2, dict(cp=2, recompute="selective")),
    "tied-cp4-zero2": ("gpt_tied", 4, dict(cp=4, zero=2)),
    "gpt-2xcp2-zero3": ("gpt", 4, dict(cp=2, zero=3)),
    "gpt-2xcp2-zero1-micro4": ("gpt", 4, dict(cp=2, zero=1, micro_batches=4)),
    "gpt-2x1xcp2-zero3": ("gpt", 4, dict(dp_replicate=2, dp_shard=1, cp=2)),
    "gpt-cp2-offload": ("gpt", 2, dict(cp=2, zero=2, offload="cpu")),
    "llama-cp2-zero3-full": ("llama", 2, dict(cp=2, recompute="full")),
    "hf_bert-cp2-zero0": ("hf_bert", 2, dict(cp=2, zero=0)),
    "vit-cp2-zero0": ("vit", 2, dict(cp=2, zero=0)),
    "resnet-cp2-zero3": ("resnet", 2, dict(cp=2)),
    "mixtral-cp2-zero3": ("mixtral", 2, dict(cp=2)),
    "t5-cp2-zero1": ("t5", 2, dict(cp=2, zero=1)),
    "bloom-cp2-zero3": ("bloom", 2, dict(cp=2)),
    "unet-cp2-zero1": ("unet", 2, dict(cp=2, zero=1)),
    "gpt-cp2-activations": ("gpt", 2, dict(cp=2, recompute="full", offload=ts.Offload(activations="cpu"))),
    "gpt-cp2-tp2-zero3": ("gpt_101", 4, dict(cp=2, tp=2)),
    "gpt-cp2-tp2-sequences": ("gpt_101", 4, dict(cp=2, tp=2, sequence_parallel=True)),
    "llama-cp2-tp2-sequences-zigzag-full": (
        "llama",
        4,
        dict(cp=2, tp=2, sequence_parallel=True, cp_order="zigzag", recompute="full"),
    ),
    "vit-cp2-tp2-sequences": ("vit", 4, dict(cp=2, tp=2, sequence_parallel=True)),
    "hf_bert-cp2-tp2-sequences": ("hf_bert", 4, dict(cp=2, tp=2, sequence_parallel=True, zero=1)),
    "gpt-cp2-pp2-tp2-sequences": ("gpt_101", 8, dict(cp=2, pp=2, tp=2, sequence_parallel=True, micro_batches=2)),
    "gpt-cp2-tp2-micro2-full": ("gpt_101", 4, dict(cp=2, tp=2, zero=0, micro_batches=2, recompute="full")),
    "gpt-cp2-zigzag": ("gpt", 2, dict(cp=2, cp_order="zigzag", micro_batches=2)),
    "gpt-cp4-zigzag-full": ("gpt", 4, dict(cp=4, cp_order="zigzag", recompute="full")),
    "llama-cp2-tp2-zigzag": ("llama", 4, dict(cp=2, tp=2, cp_order="zigzag")),
    "t5-cp2-zigzag": ("t5", 2, dict(cp=2, cp_order="zigzag")),
    "resnet-cp2-zigzag": ("resnet", 2, dict(cp=2, cp_order="zigzag")),
    "gpt-cp2-pp2-zigzag": ("gpt", 4, dict(cp=2, pp=2, cp_order="zigzag", micro_batches=2)),
    "mixtral-cp4-contiguous": ("mixtral", 4, dict(cp=4, cp_order="contiguous")),
    "gpt-cp2-pp2": ("gpt", 4, dict(cp=2, pp=2, micro_batches=2)),
    "gpt-cp2-pp2-zero1-clip": ("gpt", 4, dict(cp=2, pp=2, zero=1, micro_batches=4, clip_grad_norm=1.1)),
    "tied-cp2-pp2-zero0-full": ("gpt_tied", 4, dict(cp=2, pp=2, zero=0, micro_batches=2, recompute="full")),
    "gpt-cp2-pp2-zbv": ("gpt", 4, dict(cp=2, pp=2, pp_schedule="zbv", micro_batches=4)),
    "llama-cp2-pp2-interleaved": (
        "llama",
        4,
        dict(cp=2, pp=2, pp_schedule="interleaved_1f1b", pp_stages_per_rank=2, micro_batches=4),
    ),
    "t5-cp2-pp2-zero2": ("t5", 4, dict(cp=2, pp=2, zero=2, micro_batches=2)),
    "hf_bert-cp2-pp2": ("hf_bert", 4, dict(cp=2, pp=2, micro_batches=2)),
    "vit-cp2-pp2": ("vit", 4, dict(cp=2, pp=2, micro_batches=2)),
    "mixtral-cp2-pp2": ("mixtral", 4, dict(cp=2, pp=2, micro_batches=2)),
    "gpt-cp2-pp2-offload": ("gpt", 4, dict(cp=2, pp=2, zero=2, micro_batches=2, offload="cpu")),
    "gpt-cp2-pp2-tp2": ("gpt_101", 8, dict(cp=2, pp=2, tp=2, micro_batches=2)),
    "gpt-cp2-tiled": ("gpt", 2, dict(cp=2, logits="tiled")),
    "llama-cp2-tiled-zigzag": ("llama", 2, dict(cp=2, logits="tiled", zero=1, cp_order="zigzag")),
    "tied-cp2-tiled-micro2": ("gpt_tied", 2, dict(cp=2, zero=2, logits="tiled", micro_batches=2)),
    "gpt-cp2-tp2-tiled": ("gpt_101", 4, dict(cp=2, tp=2, logits="tiled")),
    "gpt-cp2-pp2-tiled": ("gpt", 4, dict(cp=2, pp=2, logits="tiled", micro_batches=2)),
    "llama-cp2-tp2-zero1": ("llama", 4, dict(cp=2, tp=2, zero=1)),
}


@pytest.mark.fast_cases("gpt-cp2-zero3")
@pytest.mark.parametrize("case", CASES)
def test_fp32_is_exact(ranks, case):
    kind, world_size, fields = CASES[case]
    found = ranks(world_size, parity.train, kind, fields)
    data_ranks = world_size // fields["cp"]
    cuts = (fields.get("micro_batches", 1), data_ranks) if kind == "resnet" else (1, 1)
    expected = parity.reference(kind, fields.get("clip_grad_norm"), parity.STEPS, *cuts)
    parity.assert_same(found[0], expected, 1e-5)
    for other in found[1:]:
        assert other["losses"] == found[0]["losses"]
        assert other["norms"] == found[0]["norms"]


def _whole_logits(kind: str, fields: dict[str, Any]) -> int:
    """How often a training step computes logits that its plan holds in tiles."""
    with mock.patch.object(Source, "compute", autospec=True, side_effect=Source.compute) as compute:
        engine = parity.make_engine(kind, {**fields, "logits": "tiled"})
        engine.step(*parity.shard(engine, *parity.batch(kind, 0)))
    return compute.call_count


@pytest.mark.slow
@pytest.mark.parametrize("fields", [dict(cp=2), dict(cp=2, zero=1, recompute="full")], ids=str)
def test_tiled_logits_are_not_held(ranks, fields):
    assert ranks(2, _whole_logits, "llama", fields) == [0, 0]


def _train_in_rounds(kind: str, fields: dict[str, Any], neighbours: int) -> dict[str, Any]:
    """Training in which keys and values come rank by rank, however small they are."""
    always = dict(_MESSAGE=0, _SPARED=0, _heads_send_less=lambda *_: False)
    with (
        mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(neighbours)),
        mock.patch.multiple(attention, **always),
        mock.patch.object(ContextGroup, "start", autospec=True, side_effect=_start) as start,
    ):
        found = parity.train(kind, fields)
    names = [call.args[3] for call in start.call_args_list]
    return {
        **found,
        "in_rounds": names.count("attention again"),
        "neighbours": {call.args[0].neighbours for call in start.call_args_list},
    }


_start = ContextGroup.start


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "world_size", "neighbours", "fields"),
    [
        ("llama", 2, 2, dict(cp=2)),
        ("llama", 4, 4, dict(cp=4, cp_order="zigzag", recompute="full")),
        ("llama", 4, 2, dict(cp=4, cp_order="zigzag")),  # two machines
        ("llama", 4, 4, dict(cp=2, tp=2, sequence_parallel=True, zero=1)),
        ("llama", 4, 4, dict(cp=2, pp=2, micro_batches=2, recompute="selective")),
        ("vit", 4, 2, dict(cp=4, zero=0)),
    ],
)
def test_ring_attention_is_exact(ranks, kind, world_size, neighbours, fields):
    found = ranks(world_size, _train_in_rounds, kind, fields, neighbours)
    parity.assert_same(found[0], parity.reference(kind, None, parity.STEPS, 1, 1), 1e-5)
    assert found[0]["in_rounds"] > 0 and min(neighbours, fields["cp"]) in found[0]["neighbours"]


def _positions_held(fields: dict[str, Any]) -> tuple[list[int], list[str]]:
    """How many positions the norms of blocks are given, and which operations needed whole sequences."""
    engine = parity.make_engine("gpt_101", fields)
    held = []
    for name, module in engine.model.named_modules():
        if isinstance(module, nn.LayerNorm) and name.startswith("blocks."):
            module.register_forward_pre_hook(lambda _, inputs: held.append(inputs[0].local.shape[1]))
    engine.step(*parity.shard(engine, *parity.batch("gpt_101", 0)))
    return held, [operation for operation, _ in engine.sharded.sequences.gathered_operations]


@pytest.mark.slow
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_sequence_parallelism_cuts_what_a_rank_holds_once_more(ranks, order):
    length = parity.batch("gpt_101", 0)[0].shape[1]
    found = ranks(4, _positions_held, dict(cp=2, tp=2, sequence_parallel=True, cp_order=order))
    assert not any(gathered for _, gathered in found)
    for held, _ in found:
        assert len(held) == 4 and max(held) <= -(-length // 4)
    assert sum(held[0] for held, _ in found) == length


def _own_loop(fields: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = parity.make_engine("gpt", fields)
    losses = []
    for step in range(5):
        inputs, targets = parity.shard(engine, *parity.batch("gpt", step))
        logits = engine.model(inputs)
        losses.append(engine.backward(F.cross_entropy(logits.flatten(0, 1), targets.flatten())).item())
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return losses, engine.full_state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("fields", [dict(cp=2, zero=1), dict(cp=2, zero=3)], ids=str)
def test_a_loop_of_ones_own(ranks, fields):
    expected, state = ranks(1, _own_loop, dict(zero=0))[0]
    for losses, _ in ranks(2, _own_loop, fields):
        assert losses == pytest.approx(expected, rel=1e-5)
    parity.assert_same_state(ranks(2, _own_loop, fields)[0][1], state, 1e-5)


def _dropout_and_outputs(fields: dict[str, Any]) -> list[Any]:
    engine = parity.make_engine("gpt_dropout", fields)
    losses = [engine.step(*parity.batch("gpt_dropout", step)).item() for step in range(4)]
    inputs, targets = parity.batch("gpt_dropout", 9)
    prompts = inputs[:2, :5]
    return [
        torch.tensor(losses),
        engine.evaluate(inputs, targets),
        engine.predict(inputs),
        engine.generate(prompts, max_new_tokens=4),
    ]


@pytest.mark.parametrize("fields", [dict(zero=0), dict(zero=3), dict(pp=2, micro_batches=2)], ids=str)
def test_random_numbers_evaluation_outputs_and_generation(ranks, fields):
    stages = fields.get("pp", 1)
    expected = ranks(stages, _dropout_and_outputs, fields)[0]
    for found in ranks(2 * stages, _dropout_and_outputs, dict(cp=2, **fields)):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def _saved(folder: Path, fields: dict[str, Any]) -> list[float]:
    engine = parity.make_engine("gpt", fields)
    for step in range(2):
        engine.step(*parity.shard(engine, *parity.batch("gpt", step)))
    engine.save(folder)
    return [engine.step(*parity.shard(engine, *parity.batch("gpt", step))).item() for step in (2, 3)]


def _loaded(folder: Path, fields: dict[str, Any]) -> list[float]:
    engine = parity.make_engine("gpt", fields)
    engine.load(folder)
    return [engine.step(*parity.shard(engine, *parity.batch("gpt", step))).item() for step in (2, 3)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "before", "after"),
    [
        (2, dict(cp=2), dict(zero=1)),
        (2, dict(zero=3), dict(cp=2, zero=2)),
        (4, dict(cp=2, pp=2, micro_batches=2), dict(pp=2, micro_batches=2)),
    ],
)
def test_checkpoints_of_other_layouts(ranks, tmp_path, world_size, before, after):
    went_on = ranks(world_size, _saved, tmp_path, before)[0]
    assert ranks(world_size, _loaded, tmp_path, after)[0] == pytest.approx(went_on, rel=1e-5)


class CausalWithOneKey(nn.Module):
    """Causal attention of two heads that share keys and values, so that gathering these sends least."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 16)
        self.queries, self.keys = nn.Linear(16, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 31)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        queries = self.queries(hidden).unflatten(-1, (2, 8)).transpose(1, 2)
        keys, values = self.keys(hidden).unflatten(-1, (2, 1, 8)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        return self.head(hidden + out.transpose(1, 2).flatten(2))


def _orders(fields: dict[str, Any], folder: Path | None) -> tuple[list[str], list[float]]:
    """The orders of positions, and the losses, of a few steps, some of them after a resume from `folder`."""
    torch.manual_seed(0)
    engine = ts.parallelize(
        CausalWithOneKey(), ts.Plan(**fields), optimizer=parity.ADAMW, loss_fn=_positions_first_loss
    )
    tokens = torch.arange(33 * 4).view(4, 33) * 7 % 31
    if folder is not None and folder.exists():
        engine.load(folder)
    orders, losses = [], []
    for step in range(3):
        losses.append(engine.step(tokens[:, :-1], tokens[:, 1:]).item())
        orders.append("" if engine.sharded.sequences.order is None else engine.sharded.sequences.order.name)
        if folder is not None and step == 0 and not folder.exists():
            engine.save(folder)
    return orders, losses


@pytest.mark.parametrize("fields", [dict(cp=2), dict(cp=2, pp=2, micro_batches=2, pp_units=["queries", "head"])])
def test_causal_attention_makes_the_order_a_zigzag_and_a_resumed_run_keeps_it(ranks, tmp_path, fields):
    stages = fields.get("pp", 1)
    expected = ranks(1, _orders, dict(zero=0), None)[0][1]
    orders, losses = ranks(2 * stages, _orders, fields, tmp_path / "saved")[0]
    assert orders[-1] == "zigzag"
    assert losses == pytest.approx(expected, rel=1e-5)
    again, resumed = ranks(2 * stages, _orders, fields, tmp_path / "saved")[0]
    assert again == [*orders[1:], "zigzag"]
    assert resumed[:2] == losses[1:]


class PositionsFirst(nn.Module):
    """Takes sequences as [positions, samples], and a mask that no rule of names would find."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 8)
        self.layer = nn.LSTM(8, 8)
        self.head = nn.Linear(8, 31)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embedding(tokens))[0])


def _with_dims(dims: dict[str, int] | None, cp: int) -> Any:
    torch.manual_seed(0)
    engine = ts.parallelize(
        PositionsFirst(), ts.Plan(cp=cp, cp_dims=dims), optimizer=parity.ADAMW, loss_fn=_positions_first_loss
    )
    tokens = torch.arange(33 * 4).view(33, 4) * 7 % 31
    return [engine.step(tokens[:-1], tokens[1:]).item() for _ in range(3)]


def _positions_first_loss(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def test_the_dimension_of_sequences_can_be_said(ranks):
    expected = ranks(1, _with_dims, None, 1)[0]
    for dims in (None, {"tokens": 0}):
        assert ranks(2, _with_dims, dims, 2)[1] == pytest.approx(expected, rel=1e-5)


def _refused(call: Any) -> str:
    with pytest.raises((ValueError, TypeError)) as error:
        call()
    return str(error.value)


def _wrong_dims(dims: dict[str, int]) -> str:
    return _refused(lambda: _with_dims(dims, 2))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(cp=2, compile=True), "compile=True was given with cp=2"),
        (dict(cp_dims={"tokens": 1}), "cp_dims={'tokens': 1} was given, but cp=1 splits no sequences"),
        (dict(cp_order="zigzag"), "cp_order='zigzag' was given, but cp=1 splits no sequences"),
        (dict(cp=2, cp_order="striped"), "cp_order is 'striped'; it must be one of"),
    ],
)
def test_plans_that_cannot_be(fields, said):
    assert said in _refused(lambda: ts.Plan(**fields).resolve(4))


def test_wrong_dimensions_of_sequences(ranks):
    assert "cp_dims is ['tokens']" in _refused(lambda: ts.Plan(cp=2, cp_dims=["tokens"]))
    assert "cp_dims names 'words', but the model was called with 'tokens'" in ranks(2, _wrong_dims, {"words": 1})[0]
    assert "dimension 4 of 'tokens' is its sequence" in ranks(2, _wrong_dims, {"tokens": 4})[0]


def test_which_dimension_of_an_input_is_a_sequence():
    ids, decoder = torch.zeros(2, 12, dtype=torch.int64), torch.zeros(2, 7, dtype=torch.int64)
    named = {"weight": torch.zeros(2), "input_ids": ids, "decoder_input_ids": decoder}
    first = first_sequence(named)
    assert first is not None and first[0] is ids and first[1] == 1
    expected = [
        (torch.zeros(2), None),  # a number for each sample
        (torch.zeros(2, 12), 1),  # a mask
        (torch.zeros(2, 1, 12, 12), 2),
        (decoder, 1),
        (torch.zeros(2, 3, dtype=torch.int64), None),  # too short to be another sequence
        (torch.zeros(2, 7), None),  # features of a sample
    ]
    assert [sequence_dim(leaf, *first, shortest=4) for leaf, _ in expected] == [dim for _, dim in expected]
    image = torch.zeros(2, 3, 32, 16)
    assert first_sequence({"pixel_values": image}) == (image, 2)
    assert first_sequence({"weight": torch.zeros(2)}) is None
