"""Plan(tp=...): composed with every kind of sharding, and checkpoints between sizes of tp."""

from typing import Any

import pytest
import torch

import parity
import tensorshard as ts
from bounds import assert_within
from tensorshard.checkpoint.pieces import TensorPieces

CLIP = 1.0

MATRIX = {
    "tp2": (2, dict(tp=2), ["gpt", "gpt_tied", "bert", "llama"]),
    "tp2_zero3": (4, dict(tp=2, zero=3), ["gpt"]),
    "tp2_zero2_micro": (4, dict(tp=2, zero=2, micro_batches=2), ["gpt_tied"]),
    "tp2_zero1": (4, dict(tp=2, zero=1), ["bert"]),
    "tp2_zero0": (4, dict(tp=2, zero=0), ["llama"]),
    "tp2_recompute": (4, dict(tp=2, zero=3, recompute="full"), ["gpt"]),
    "tp2_selective": (2, dict(tp=2, recompute="selective"), ["llama"]),
    "tp2_hybrid": (8, dict(tp=2, dp_replicate=2, zero=3), ["gpt_tied"]),
    "tp2_hybrid_zero1": (8, dict(tp=2, dp_replicate=2, zero=1), ["llama"]),
}
# Of these, fewer steps.
SHORT_MATRIX = {
    "tp2_short": (2, dict(tp=2), ["gpt2", "phi3", "t5", "resnet_37"]),
    "tp4_short": (4, dict(tp=4), ["gpt_101", "gpt_neox", "t5"]),
    "tp4_selective": (4, dict(tp=4, recompute="selective", micro_batches=2), ["gpt_101"]),
    "tp2_zero3_short": (4, dict(tp=2, zero=3), ["t5", "resnet_37"]),
    "tp2_zero3_selective": (4, dict(tp=2, zero=3, recompute="selective"), ["bert"]),
    "tp2_zero1_short": (4, dict(tp=2, zero=1), ["vit"]),
    "tp2_zero1_full_micro": (4, dict(tp=2, zero=1, recompute="full", micro_batches=2), ["gpt2"]),
    "tp2_hybrid_short": (8, dict(tp=2, dp_replicate=2, zero=3), ["bert"]),
    "tp4_zero3_hybrid": (8, dict(tp=4, dp_replicate=2, dp_shard=1, zero=3), ["gpt_101"]),
}
SHORT = 6
CASES = [(name, kind) for name, (_, _, kinds) in (MATRIX | SHORT_MATRIX).items() for kind in kinds]
# Of each model, level, size of tp, recomputation and number of micro-batches one stays that is not slow.


@pytest.mark.fast_cases("tp2-gpt_tied")
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_parity_with_one_process(ranks, name, kind):
    world_size, fields, _ = (MATRIX | SHORT_MATRIX)[name]
    steps = SHORT if name in SHORT_MATRIX else parity.STEPS
    expected = parity.reference(kind, CLIP, steps)
    found = ranks(world_size, parity.train, kind, {**fields, "clip_grad_norm": CLIP}, steps)[0]
    parity.assert_same(found, expected, 1e-5)
    torch.testing.assert_close(torch.tensor(found["norms"]), torch.tensor(expected["norms"]), rtol=1e-5, atol=0)


@pytest.mark.slow
def test_bf16_within_the_spread_of_reduction_orders(ranks):
    one = ranks(1, parity.train, "gpt", dict(precision="bf16"))[0]
    two = ranks(2, parity.train, "gpt", dict(precision="bf16", tp=2))[0]
    torch.testing.assert_close(torch.tensor(two["losses"]), torch.tensor(one["losses"]), rtol=2e-3, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("kind", "world_size", "fields"),
    [
        ("llama", 4, dict(tp=2, zero=3)),
        ("bert", 4, dict(tp=2, zero=1, micro_batches=2)),
        ("gpt_101", 4, dict(tp=4)),
    ],
    ids=str,
)
def test_16_bits_are_as_exact_as_on_one_process(ranks, precision, kind, world_size, fields):
    """As far from fp32 as one process that computes in 16 bits is, and no further."""
    alone = dict(precision=precision, micro_batches=fields.get("micro_batches", 1))
    one = ranks(1, parity.train, kind, alone, SHORT)[0]
    found = ranks(world_size, parity.train, kind, dict(precision=precision, **fields), SHORT)[0]
    exact = parity.reference(kind, steps=SHORT)
    assert [(n, v.dtype) for n, v in found["state"].items()] == [(n, v.dtype) for n, v in one["state"].items()]
    assert _distance(found, exact) > 0
    assert_within(_distance(found, exact), 1.5 * _distance(one, exact), "the weights")
    torch.testing.assert_close(torch.tensor(found["losses"]), torch.tensor(exact["losses"]), rtol=2e-3, atol=0)


def _distance(a: dict[str, Any], b: dict[str, Any]) -> float:
    return torch.stack([(a["state"][n].double() - b["state"][n].double()).norm() for n in a["state"]]).norm().item()


def test_a_head_that_is_split_by_hand(ranks):
    fields = dict(tp=2, tp_plan={"classifier.1": "colwise_gather"})
    expected = parity.reference("resnet", steps=SHORT)
    parity.assert_same(ranks(2, parity.train, "resnet", fields, SHORT)[0], expected, 1e-5)


def _save(fields: dict[str, Any], path: str) -> list[float]:
    engine = parity.make_engine("llama", fields)
    losses = [_step(engine, step) for step in range(3)]
    engine.save(path)
    return losses + [_step(engine, step) for step in range(3, 6)]


def _resume(fields: dict[str, Any], path: str) -> list[float]:
    engine = parity.make_engine("llama", fields)
    with torch.no_grad():
        for master in engine.sharded.masters().values():
            master.zero_()
    engine.load(path)
    return [_step(engine, step) for step in range(3, 6)]


def _step(engine: ts.Engine, step: int) -> float:
    return engine.step(*parity.shard(engine, *parity.batch("llama", step))).item()


@pytest.mark.slow
@pytest.mark.parametrize("written", [(4, dict(tp=2, zero=3)), (2, dict(tp=2)), (2, dict(zero=1))], ids=str)
def test_checkpoints_between_sizes_of_tp(ranks, tmp_path, written):
    world_size, fields = written
    expected = ranks(world_size, _save, fields, str(tmp_path / "c"))[0][3:]
    for other_size, other in [(1, {}), (2, dict(tp=2)), (4, dict(tp=2, zero=1)), (4, dict(tp=2, zero=3))]:
        resumed = ranks(other_size, _resume, other, str(tmp_path / "c"))[0]
        torch.testing.assert_close(torch.tensor(resumed), torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_pieces_of_a_packed_weight_are_where_they_belong():
    whole = torch.arange(48.0).view(12, 4)  # three parts of four rows
    ranges = [(2, 2), (6, 2), (10, 2)]  # the second of two ranks
    local = torch.cat([whole[start : start + length] for start, length in ranges])
    for dim, tensor, cut in [(0, local, ranges), (1, whole[:, 2:], [(2, 2)])]:
        for offset, piece in TensorPieces.of(tensor, whole.shape, {dim: cut}).pieces:
            rows, columns = (slice(o, o + n) for o, n in zip(offset, piece.shape, strict=True))
            assert torch.equal(whole[rows, columns], piece)


def _refusal(fields: dict[str, Any]) -> str:
    try:
        parity.make_engine("llama", fields)
    except ValueError as error:
        return str(error)
    return ""


def test_wrong_tables_are_refused_before_training(ranks):
    unpaired = {"model.layers.*.mlp.up_proj": "colwise"}
    assert "mlp.up_proj colwise" in ranks(2, _refusal, dict(tp=2, tp_plan=unpaired))[0]
    assert "colwise" in ranks(2, _refusal, dict(tp=2, tp_plan={"model.layers.*.mlp.up_proj": "colwize"}))[0]
    assert "no_such" in ranks(2, _refusal, dict(tp=2, tp_plan={"no_such.*": "colwise"}))[0]


def _table_and_parts(tp: int) -> tuple[str, int, int]:
    engine = parity.make_engine("llama", dict(tp=tp))
    summary = engine.summary()
    return summary.describe(), summary.parameters, summary.held_parameters


def test_the_table_is_shown_and_weights_are_split(ranks):
    text, parameters, held = ranks(2, _table_and_parts, 2)[0]
    assert "rowwise" in text and "of the parameters are split" in text
    assert parameters == sum(p.numel() for p in parity.build("llama").parameters())
    assert held < 0.6 * parameters


def test_a_table_without_tp_is_refused():
    with pytest.raises(ValueError, match="tp=1 splits nothing"):
        ts.Plan(tp_plan={"*": "colwise"}).resolve(1)
