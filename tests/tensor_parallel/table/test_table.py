"""Tables of styles: reading, writing, matching names, and laying out parameters."""

import pytest
import torch

from table_models import build
from tensorshard.tensor_parallel.apply import apply_table
from tensorshard.tensor_parallel.apply.apply_table import find_layouts
from tensorshard.tensor_parallel.table.layer_styles import Style
from tensorshard.tensor_parallel.table.layouts import Layout, join_shards, local_shard
from tensorshard.tensor_parallel.table.styles import ROWWISE, STYLES, parse_style
from tensorshard.tensor_parallel.table.table import TensorTable, collapse

SPELLED = [
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


@pytest.mark.parametrize("text", SPELLED)
def test_a_style_reads_as_it_is_written(text):
    assert str(parse_style(text)) == text


def test_a_table_goes_through_yaml(tmp_path):
    table = {"layers.*.q": "packed_colwise(3)", "layers.*": "divide(num_heads)"}
    TensorTable.from_dict(table).to_yaml(tmp_path / "table.yaml")
    assert TensorTable.from_yaml(tmp_path / "table.yaml").to_dict() == table


def resolve(table: dict[str, str], kind: str = "gpt") -> dict[str, Style]:
    return TensorTable.from_dict(table).resolve(build(kind))


def test_an_exact_name_goes_before_a_glob():
    styles = resolve({"blocks.*.mlp.up": "colwise", "blocks.1.mlp.up": "replicate"})
    assert {name: str(style) for name, style in styles.items()} == {
        "blocks.0.mlp.up": "colwise",
        "blocks.1.mlp.up": "replicate",
    }


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


def test_every_style_is_applied():
    assert apply_table._APPLY.keys() == set(STYLES.values())
