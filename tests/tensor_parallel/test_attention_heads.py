"""Attention whose heads need more than columns and rows: biases per head that come from outside (ALiBi), and fewer
key-value heads than ranks. Parity with one process, composed with the rest."""

from typing import Any

import pytest
import torch

import parity
from table_models import build
from tensorshard.tensor_parallel.apply.apply_table import apply_tensor_parallel
from tensorshard.tensor_parallel.search.check_table import WrongTableError, check_tensor_table
from tensorshard.tensor_parallel.search.find_table import find_tensor_plan
from tensorshard.tensor_parallel.table.table import TensorTable
from tensorshard.tensor_parallel.verify.simulated_ranks import run_as_ranks

CLIP = 1.0
CASES = [
    ("bloom", 2, dict(tp=2)),
    ("bloom", 2, dict(tp=2, sequence_parallel=True)),
    ("bloom", 4, dict(tp=4, sequence_parallel=True)),
    ("llama_one", 4, dict(tp=2, zero=1, sequence_parallel=True)),
    ("phi3", 4, dict(tp=4, sequence_parallel=True)),
    ("gpt_bigcode", 4, dict(tp=2, zero=2, micro_batches=2)),
    ("mixtral", 2, dict(tp=2)),
    ("mixtral", 4, dict(tp=2, zero=3, recompute="full")),
]
# Of each model and size of tp, with sequence parallelism and without, one stays that is not slow.


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "world_size", "fields"), CASES, ids=str)
def test_parity_with_one_process(ranks, kind, world_size, fields):
    expected = parity.reference(kind, CLIP)
    found = ranks(world_size, parity.train, kind, {**fields, "clip_grad_norm": CLIP})[0]
    parity.assert_same(found, expected, 1e-5)
    # A head that ranks share counts once.
    torch.testing.assert_close(torch.tensor(found["norms"]), torch.tensor(expected["norms"]), rtol=1e-5, atol=0)


def _table(kind: str, size: int) -> dict[str, str]:
    found = find_tensor_plan(build(kind), size)
    assert not {name for name in found.whole if "att" in name}
    return found.plan.to_dict()


@pytest.mark.slow
def test_the_tables_that_are_found():
    bloom = _table("bloom", 4)
    assert bloom["transformer.h.*.self_attention"] == "divide(num_heads, input.alibi.0/num_heads)"
    assert bloom["transformer.h.*.self_attention.query_key_value"] == "colwise"
    assert _table("mpt", 2)["transformer.blocks.*.attn"] == "divide(n_heads, input.position_bias.0/n_heads)"
    llama = _table("llama", 4)
    assert llama["model.layers.*.self_attn.k_proj"] == "colwise_shared(2)"
    assert llama["model.layers.*.self_attn"] == "divide(num_key_value_groups/2)"
    assert "k_proj" not in str({k: v for k, v in _table("llama", 2).items() if "shared" in v})
    assert _table("llama_one", 2)["model.layers.*.self_attn.v_proj"] == "colwise_shared(1)"
    assert _table("phi3", 4)["model.layers.*.self_attn.qkv_proj"] == "colwise_shared(2, 32, 16, 16)"
    assert _table("gpt_bigcode", 4)["transformer.h.*.attn.c_attn"] == "colwise_shared(1, 32, 8, 8)"


def _weights_of_rank(fields: dict[str, Any]) -> dict[str, int]:
    engine = parity.make_engine("llama", fields)
    return {
        name: p.untyped_storage().nbytes()
        for name, p in engine.model.named_parameters()
        if "k_proj" in name or "v_proj" in name
    }


def test_no_rank_holds_a_copy(ranks):
    """Two heads of 8 features over four ranks: half a head each."""
    for sizes in ranks(4, _weights_of_rank, dict(tp=4)):
        assert len(sizes) == 4
        assert all(size == 4 * 32 * 4 for size in sizes.values())


def _save(path: str) -> None:
    engine = parity.make_engine("llama", dict(tp=4))
    engine.step(*parity.batch("llama", 0))
    engine.save(path)


def _resume(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    engine = parity.make_engine("llama", fields)
    engine.load(path)
    losses = [engine.step(*parity.batch("llama", step)).item() for step in (1, 2)]
    return {"losses": losses, "state": engine.full_state_dict()}


@pytest.mark.slow
def test_a_checkpoint_of_shared_heads_is_read_at_other_sizes(ranks, tmp_path):
    ranks(4, _save, str(tmp_path / "saved"))
    whole = parity.reference("llama", steps=3)
    for world, fields in ((1, {}), (2, dict(tp=2))):
        found = ranks(world, _resume, str(tmp_path / "saved"), fields)[0]
        parity.assert_same(found, {"losses": whole["losses"][1:], "state": whole["state"]}, 1e-5)


@pytest.mark.slow
def test_wrong_tables_are_refused_by_the_numbers():
    attention = "transformer.h.*.self_attention"
    table = _table("bloom", 2)
    for style in ("divide(num_heads)", "divide(num_heads, input.alibi.1/num_heads)"):
        with pytest.raises(WrongTableError, match=r"table is wrong for transformer\.h"):
            check_tensor_table(build("bloom"), TensorTable.from_dict({**table, attention: style}), 2)
    table = _table("llama", 4)
    heads = "model.layers.*.self_attn"
    for wrong in ({f"{heads}.k_proj": "colwise"}, {f"{heads}.v_proj": "colwise_shared(1)"}, {heads: "replicate"}):
        with pytest.raises(WrongTableError, match=r"table is wrong for model\.layers"):
            check_tensor_table(build("llama"), TensorTable.from_dict({**table, **wrong}), 4)


def test_an_input_that_was_not_given():
    table = {**_table("bloom", 2), "transformer.h.*.self_attention": "divide(num_heads, input.biases.0/num_heads)"}
    with pytest.raises(WrongTableError, match="BloomAttention was not given an input 'biases'"):
        check_tensor_table(build("bloom"), TensorTable.from_dict(table), 2)


def test_an_input_of_the_wrong_shape():
    def on_rank(group: Any) -> None:
        block = torch.nn.Module()
        block.attention = Biased()
        apply_tensor_parallel(block, TensorTable.from_dict({"attention": "divide(heads, input.bias.0/heads)"}), group)
        block.attention(torch.zeros(3), bias=torch.zeros(6, 1))

    with pytest.raises(ValueError, match=r"Biased's input 'bias' has the shape \[6, 1\]; along dimension 0 .* 4 heads"):
        run_as_ranks(2, on_rank)


class Biased(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = 4

    def forward(self, x: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
        return x + options["bias"].sum()


def test_the_experts_of_a_mixture_are_split():
    found = find_tensor_plan(build("mixtral"), 2)
    table = found.plan.to_dict()
    assert table["model.layers.*.mlp.experts"] == "sum"
    assert table["model.layers.*.mlp.experts.gate_up_proj"] == "slice(1, 2)"
    assert table["model.layers.*.mlp.experts.down_proj"] == "slice(2)"
    assert found.split_share > 0.9
    with pytest.raises(WrongTableError, match=r"table is wrong for model\.layers"):  # gate and up, cut as one
        wrong = {**table, "model.layers.*.mlp.experts.gate_up_proj": "slice(1)"}
        check_tensor_table(build("mixtral"), TensorTable.from_dict(wrong), 2)


class BiasedExperts(torch.nn.Module):
    """Experts with a bias after the sum of their parts: what no rank can compute by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Parameter(torch.randn(3, 8, 16))
        self.down = torch.nn.Parameter(torch.randn(3, 16, 8))
        self.bias = torch.nn.Parameter(torch.randn(3, 8))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(torch.einsum("td,tdh->th", x, self.up[chosen]))
        return torch.einsum("th,thd->td", hidden, self.down[chosen]) + self.bias[chosen]


class Routed(torch.nn.Module):
    def __init__(self, experts: type[BiasedExperts]) -> None:
        super().__init__()
        self.before, self.router, self.after = torch.nn.Linear(8, 8), torch.nn.Linear(8, 3), torch.nn.Linear(8, 8)
        self.experts = experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.after(torch.relu(self.before(x)))
        return x + self.experts(x, self.router(x).argmax(-1))


class BoundedExperts(BiasedExperts):
    """What a rank has of their output is no part of a sum."""

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(x, chosen))


def test_experts_with_biases():
    model = torch.nn.Sequential(Routed(BiasedExperts), Routed(BiasedExperts))
    found = find_tensor_plan(model, 2, inputs=torch.zeros(5, 8)).plan.to_dict()
    assert found["*.experts"] == "sum" and found["*.experts.bias"] == "replicate(divided)"


def test_experts_that_stay_whole_say_why():
    model = torch.nn.Sequential(Routed(BoundedExperts), Routed(BoundedExperts))
    found = find_tensor_plan(model, 2, inputs=torch.zeros(5, 8))
    assert found.plan.to_dict()["*.experts.up"] == "gather(2)" and 0.3 < found.kept_share < found.split_share
    assert "its experts stay whole: split over 2 ranks, its output differs by" in found.whole["*.experts"]
