"""Wrong tensor-parallel tables: misspelt styles, names that match nothing, styles that do not suit what they name."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from torch import nn

from table_models import build
from tensorshard.tensor_parallel.apply.apply_table import find_layouts
from tensorshard.tensor_parallel.table.styles import parse_style
from tensorshard.tensor_parallel.table.table import TensorTable
from wrong_inputs import Case, assert_refused, said

STYLES: dict[str, tuple[str, ...]] = {
    "colwize": ("did you mean 'colwise'",),
    "xyz": ("the styles are colwise, packed_colwise",),
    "col wise": ("is not a style",),
    "colwise(3)": ("takes no options",),
    "packed_colwise": ("takes a number of equal parts",),
    "packed_colwise(0)": ("takes a number of equal parts",),
    "colwise_shared": ("takes the number of key-value heads",),
    "colwise_shared(2, 3)": ("as in colwise_shared(2, 64, 16, 16)",),
    "rowwise(divided)": ("takes sum_grad or nothing",),
    "replicate(twice)": ("takes sum_grad or divided or nothing",),
    "slice(0, 1, 2)": ("takes one dimension",),
    "slice(0, 0)": ("takes one dimension",),
    "gather(0, 1, 2)": ("takes one dimension",),
    "channels(1)": ("takes a number of equal parts",),
    "divide": ("takes the names of attributes",),
    "divide(a.b)": ("takes the names of attributes",),
    "divide(input.alibi)": ("as in divide(input.alibi.0/num_heads)",),
    "divide(num_heads/1)": ("divided by 2 or more",),
}


def _from_yaml(text: str) -> None:
    with TemporaryDirectory() as folder:
        (Path(folder) / "table.yaml").write_text(text)
        TensorTable.from_yaml(Path(folder) / "table.yaml")


def _layouts(model: str | nn.Module, table: dict[str, str], size: int = 2) -> None:
    built = build(model) if isinstance(model, str) else model
    find_layouts(built, TensorTable.from_dict(table).resolve(built), size)


_GPT_ATTENTION, _KEY, _QKV = (
    "blocks.*.attention",
    "model.layers.0.self_attn.k_proj",
    "model.layers.0.self_attn.qkv_proj",
)
_ATTENTION = nn.Sequential(nn.MultiheadAttention(16, 4))
_NETWORK = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.GroupNorm(3, 6), nn.Conv2d(6, 6, 1, groups=3))

TABLES: dict[str, Case] = {
    "a style that is misspelt": (lambda: TensorTable.from_dict({"a.b": "colwize"}), "tp_plan['a.b']: 'colwize'"),
    "a style that is a number": (lambda: TensorTable.from_dict({"a.b": 3}), "tp_plan['a.b'] is 3"),  # type: ignore[dict-item]
    "a file without a mapping": (lambda: _from_yaml("- colwise\n"), "holds a list"),
    "a glob that matches nothing": (
        lambda: _layouts("gpt", {"blocks.*.mlp.upp": "colwise"}),
        "'blocks.*.mlp.upp'] matches no module", "the nearest are", "blocks.*.mlp.up",
    ),
    "globs that disagree": (
        lambda: _layouts("gpt", {"blocks.*.mlp.up": "colwise", "blocks.*.mlp.*": "rowwise"}),
        "blocks.0.mlp.up is matched by", "which disagree",
    ),
    "tied parameters of two layouts": (
        lambda: _layouts("gpt_tied", {"embedding": "vocab", "head": "rowwise"}),
        "embedding.weight and head.weight are one tied parameter",
    ),
    "a row that is an embedding": (
        lambda: _layouts("gpt", {"positions": "rowwise"}), "positions is an Embedding, which cannot be 'rowwise'"
    ),
    "a vocabulary that is a layer": (
        lambda: _layouts("gpt", {"head": "vocab"}), "head is a Linear, which cannot be 'vocab'"
    ),
    "a column that is a norm": (
        lambda: _layouts("gpt", {"norm": "colwise"}), "norm is a LayerNorm, which cannot be 'colwise'"
    ),
    "a layer that computes something else": (
        lambda: _layouts(nn.Sequential(nn.Bilinear(4, 4, 4)), {"0": "colwise"}),
        "0 is a Bilinear, which cannot be 'colwise': that is for an nn.Linear",
    ),
    "parts that are not equal": (
        lambda: _layouts("gpt", {"blocks.*.mlp.up": "packed_colwise(3)"}),
        "128 output features, which are not 3 equal parts",
    ),
    "parts that do not add up": (
        lambda: _layouts("gpt", {"blocks.*.mlp.up": "packed_colwise(64, 32)"}),
        "the parts of packed_colwise(64, 32) add up to 96",
    ),
    "more ranks than rows": (
        lambda: _layouts("gpt", {"embedding": "vocab"}, 64), "embedding.weight has 61 elements", "over 64 ranks"
    ),
    "a parameter as a column": (
        lambda: _layouts("gpt", {"norm.weight": "colwise"}), "norm.weight is a parameter, which can be 'slice"
    ),
    "a dimension that is not there": (lambda: _layouts("gpt", {"norm.weight": "slice(1)"}), "has 1 dimensions"),
    "slices of unequal parts": (
        lambda: _layouts("mixtral", {"model.layers.0.mlp.experts.gate_up_proj": "slice(1, 3)"}),
        "has 128 elements along dimension 1, which are not 3 equal parts",
    ),
    "a reader that is not there": (lambda: _layouts("gpt", {"norm.weight": "gather(0, 3)"}), "for one further out"),
    "an attribute that is not there": (
        lambda: _layouts("gpt", {_GPT_ATTENTION: "divide(heads)"}), "no whole number 'heads' to divide", "head_size"
    ),
    "an attribute that the ranks cannot divide": (
        lambda: _layouts("gpt", {_GPT_ATTENTION: "divide(head_size)"}, 3),
        "head_size is 8, which cannot be divided over 3 ranks",
    ),
    "an attribute that a number cannot divide": (
        lambda: _layouts("llama", {"model.layers.0.self_attn": "divide(num_key_value_groups/3)"}),
        "num_key_value_groups is 2, which cannot be divided by 3",
    ),
    "an input that is not there": (
        lambda: _layouts("bloom", {"transformer.h.0.self_attention.dense": "divide(input.alibi.0/in_features)"}),
        "(Linear) has no input 'alibi'; its forward takes input",
    ),
    "heads that the ranks cannot share": (
        lambda: _layouts("llama", {_KEY: "colwise_shared(2)"}, 3),
        "has 2 key-value heads, which 3 ranks cannot share evenly: tp must be a multiple of 2, or divide it",
    ),
    "features of a head that the ranks cannot share": (
        lambda: _layouts("llama", {_KEY: "colwise_shared(2)"}, 32),
        "of 8 features each, which the 16 ranks that share one cannot divide",
    ),
    "features that are no such heads": (
        lambda: _layouts("llama", {_KEY: "colwise_shared(3)"}, 3),
        "16 key or value features, which are not 3 equal heads",
    ),
    "fused heads that do not add up": (
        lambda: _layouts("phi3", {_QKV: "colwise_shared(2, 32, 8, 8)"}, 4),
        "the parts of colwise_shared(2, 32, 8, 8) add up to 48",
    ),
    "keys of another width than values": (
        lambda: _layouts("phi3", {_QKV: "colwise_shared(2, 32, 8, 24)"}, 4), "they must be equal"
    ),
    "heads of an attention that the ranks cannot divide": (
        lambda: _layouts(_ATTENTION, {"0": "heads"}, 3), "0.num_heads is 4", "tp can be 2, 4"
    ),
    "an attention with another projection": (
        lambda: _layouts(_ATTENTION, {"0": "heads", "0.out_proj": "colwise"}), "leave it out, or give it 'rowwise'"
    ),
    "heads of a layer": (
        lambda: _layouts(nn.Sequential(nn.Linear(4, 4)), {"0": "heads"}), "0 is a Linear, which cannot be 'heads'"
    ),
    "a row that is a norm": (
        lambda: _layouts(_NETWORK, {"1": "rowwise"}), "is a BatchNorm2d, which cannot be 'rowwise'"
    ),
    "channels of a convolution of one group": (
        lambda: _layouts(_NETWORK, {"0": "channels"}), "is a Conv2d, which cannot be 'channels'"
    ),
    "groups of a norm that the ranks cannot divide": (
        lambda: _layouts(_NETWORK, {"2": "channels"}),
        "2 has 3 groups of its 6 channels, which cannot be divided over 2 ranks",
    ),
    "groups of a convolution that the ranks cannot divide": (
        lambda: _layouts(_NETWORK, {"3": "channels"}), "3 has 3 groups of its 6 channels"
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", STYLES)
def test_a_wrong_style(text):
    assert_refused(text, said(parse_style, text), (parse_style, *STYLES[text]))


@pytest.mark.parametrize("what", TABLES)
def test_a_wrong_table(what):
    assert_refused(what, said(TABLES[what][0]), TABLES[what])
