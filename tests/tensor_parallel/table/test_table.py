"""Tables of styles: reading, writing, matching names, and laying out parameters."""

import pytest
import torch
from torch import nn

from table_models import build
from tensorshard.tensor_parallel.apply.apply_table import find_layouts
from tensorshard.tensor_parallel.table.layer_styles import Style
from tensorshard.tensor_parallel.table.layouts import Layout, join_shards, local_shard
from tensorshard.tensor_parallel.table.styles import COLWISE, ROWWISE, parse_style
from tensorshard.tensor_parallel.table.table import TensorTable, collapse

STYLES = [
    "colwise",
    "rowwise",
    "vocab",
    "colwise_gather",
    "replicate",
    "replicate(sum_grad)",
    "packed_colwise(3)",
    "packed_colwise(64, 32, 32)",
    "slice(0)",
    "slice(1, 2)",
    "gather(0, 1)",
    "rowwise(sum_grad)",
    "channels",
    "channels(2)",
    "colwise_shared(2)",
    "colwise_shared(2, 64, 16, 16)",
    "divide(num_heads, config.num_heads)",
]


@pytest.mark.parametrize("text", STYLES)
def test_a_style_reads_as_it_is_written(text):
    assert str(parse_style(text)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("colwize", "did you mean 'colwise'"),
        ("xyz", "the styles are colwise, packed_colwise"),
        ("colwise(3)", "takes no options"),
        ("packed_colwise", "takes a number of equal parts"),
        ("packed_colwise(0)", "takes a number of equal parts"),
        ("slice(0, 1, 2)", "takes one dimension"),
        ("divide", "takes the names of attributes"),
        ("divide(a.b)", "takes the names of attributes"),
        ("replicate(twice)", "takes sum_grad or divided or nothing"),
        ("rowwise(divided)", "takes sum_grad or nothing"),
        ("gather(0, 1, 2)", "takes one dimension"),
        ("col wise", "is not a style"),
    ],
)
def test_a_misspelt_style_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_style(text)


def test_a_table_goes_through_yaml(tmp_path):
    table = {"layers.*.q": "packed_colwise(3)", "layers.*": "divide(num_heads)"}
    TensorTable.from_dict(table).to_yaml(tmp_path / "table.yaml")
    assert TensorTable.from_yaml(tmp_path / "table.yaml").to_dict() == table


def test_a_file_without_a_mapping_is_refused(tmp_path):
    (tmp_path / "table.yaml").write_text("- colwise\n")
    with pytest.raises(ValueError, match="holds a list"):
        TensorTable.from_yaml(tmp_path / "table.yaml")


def test_errors_of_a_table_name_the_entry():
    with pytest.raises(ValueError, match=r"tp_plan\['a.b'\]: 'colwize'"):
        TensorTable.from_dict({"a.b": "colwize"})
    with pytest.raises(TypeError, match=r"tp_plan\['a.b'\] is 3"):
        TensorTable.from_dict({"a.b": 3})


def resolve(table: dict[str, str], kind: str = "gpt") -> dict[str, Style]:
    return TensorTable.from_dict(table).resolve(build(kind))


def test_an_exact_name_goes_before_a_glob():
    styles = resolve({"blocks.*.mlp.up": "colwise", "blocks.1.mlp.up": "replicate"})
    assert {name: str(style) for name, style in styles.items()} == {
        "blocks.0.mlp.up": "colwise",
        "blocks.1.mlp.up": "replicate",
    }


def test_a_glob_that_matches_nothing_names_the_nearest():
    with pytest.raises(ValueError, match=r"'blocks\.\*\.mlp\.upp'\] matches no module.*blocks\.\*\.mlp\.up"):
        resolve({"blocks.*.mlp.upp": "colwise"})


def test_globs_that_disagree_are_refused():
    with pytest.raises(ValueError, match=r"blocks.0.mlp.up is matched by .* which disagree"):
        resolve({"blocks.*.mlp.up": "colwise", "blocks.*.mlp.*": "rowwise"})


def test_a_tied_head_is_split_with_its_embedding():
    assert str(resolve({"embedding": "vocab"}, "gpt_tied")["head"]) == "colwise_gather"
    assert str(resolve({"head": "colwise_gather"}, "gpt_tied")["embedding"]) == "vocab"


def test_collapsing_gives_back_the_same_styles():
    model = build("hf_bert")  # where `output.dense` ends the names of both kinds of row layer
    names = [name for name, module in model.named_modules() if name.endswith(".output.dense")]
    plan = collapse(dict.fromkeys(names, ROWWISE), model)
    assert list(plan.resolve(model)) == names
    assert len(plan.entries) == 2
    alone = collapse({names[1]: ROWWISE}, model)
    assert list(alone.entries) == [names[1]]


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (Layout(), (5, 3)),
        (Layout(0, (6,)), (6, 3)),
        (Layout(1, (7,)), (2, 7)),
        (Layout(0, (4, 4, 4)), (12, 3)),
        (Layout(1, (8, 3, 3)), (2, 14)),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_parts_join_to_the_whole(layout, shape, size):
    full = torch.randn(shape)
    parts = [local_shard(full, layout, rank, size) for rank in range(size)]
    assert torch.equal(join_shards(parts, layout), full)
    assert [part.shape for part in parts] == [layout.local_shape(shape, rank, size) for rank in range(size)]


def test_packed_parts_are_cut_one_by_one():
    assert local_shard(torch.arange(8), Layout(0, (4, 2, 2)), 1, 2).tolist() == [2, 3, 5, 7]


def layouts(table: dict[str, str], kind: str = "gpt", size: int = 2) -> dict[str, Layout]:
    model = build(kind)
    return find_layouts(model, TensorTable.from_dict(table).resolve(model), size)


def test_layouts_of_the_styles():
    found = layouts({"blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise", "embedding": "vocab"})
    assert found["blocks.1.mlp.up.weight"] == found["blocks.1.mlp.up.bias"] == Layout(0, (128,))
    assert found["blocks.1.mlp.down.weight"] == Layout(1, (128,))
    assert found["blocks.1.mlp.down.bias"] == Layout()
    assert found["embedding.weight"] == Layout(0, (61,))
    assert found["positions.weight"] == Layout()


def test_weights_of_conv1d_are_transposed():
    found = layouts({"transformer.h.*.attn.c_attn": "packed_colwise(3)", "*.attn.c_proj": "rowwise"}, "gpt2")
    assert found["transformer.h.0.attn.c_attn.weight"] == Layout(1, (32, 32, 32))
    assert found["transformer.h.0.attn.c_attn.bias"] == Layout(0, (32, 32, 32))
    assert found["transformer.h.0.attn.c_proj.weight"] == Layout(0, (32,))


def test_tied_parameters_have_one_layout():
    found = layouts({"embedding": "vocab"}, "gpt_tied")
    assert found["head.weight"] == found["embedding.weight"] == Layout(0, (61,))
    with pytest.raises(ValueError, match=r"embedding.weight and head.weight are one tied parameter"):
        layouts({"embedding": "vocab", "head": "rowwise"}, "gpt_tied")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"positions": "rowwise"}, "positions is a Embedding, which cannot be 'rowwise'"),
        ({"head": "vocab"}, "head is a Linear, which cannot be 'vocab'"),
        ({"norm": "colwise"}, "norm is a LayerNorm, which cannot be 'colwise'"),
        ({"blocks.*.mlp.up": "packed_colwise(3)"}, "128 output features, which are not 3 equal parts"),
        ({"blocks.*.mlp.up": "packed_colwise(64, 32)"}, r"the parts of packed_colwise\(64, 32\) add up to 96"),
        ({"blocks.*.attention": "divide(heads)"}, "no whole number 'heads' to divide; it has head_size"),
        ({"norm.weight": "colwise"}, "norm.weight is a parameter, which can be 'slice"),
        ({"norm.weight": "slice(1)"}, "has 1 dimensions"),
    ],
)
def test_a_style_that_does_not_suit_is_refused(table, message):
    with pytest.raises(ValueError, match=message):
        layouts(table)


def test_sizes_that_cannot_be_split_are_refused():
    with pytest.raises(ValueError, match=r"embedding.weight has 61 elements .* over 64 ranks"):
        layouts({"embedding": "vocab"}, size=64)
    with pytest.raises(ValueError, match=r"head_size is 8, which cannot be divided over 3 ranks"):
        layouts({"blocks.*.attention": "divide(head_size)"}, size=3)


def test_a_layer_that_computes_something_else_is_refused():
    model = nn.Sequential(nn.Bilinear(4, 4, 4))
    with pytest.raises(ValueError, match="0 is a Bilinear, which cannot be 'colwise': that is for an nn"):
        find_layouts(model, {"0": COLWISE}, 2)
