"""The search for a table: known architectures, home-made ones, and what cannot be split."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from table_models import build
from tensorshard.tensor_parallel.search.find_table import NoTableError, find_tensor_plan, published_table
from tensorshard.tensor_parallel.table.table import TensorTable


def find(model: nn.Module, size: int = 2, inputs: torch.Tensor | None = None) -> dict[str, str]:
    return find_tensor_plan(model, size, inputs=inputs).plan.to_dict()


def test_gpt():
    found = find_tensor_plan(build("gpt"))
    assert found.plan.to_dict() == {
        "embedding": "vocab",
        "blocks.*.attention.query": "colwise",
        "blocks.*.attention.key": "colwise",
        "blocks.*.attention.value": "colwise",
        "blocks.*.attention.output": "rowwise",
        "blocks.*.mlp.up": "colwise",
        "blocks.*.mlp.down": "rowwise",
        "head": "colwise_gather",
    }
    assert found.whole == {"positions": "a small table"}
    assert 0.9 < found.split_share < 1.0
    assert "positions  a small table" in found.describe()


def test_a_model_on_the_meta_device():
    with torch.device("meta"):
        model = build("gpt_neox")
    assert find(model) == find(build("gpt_neox"))


def test_packed_and_divided():
    found = find(build("gpt2"))
    assert found["transformer.h.*.attn.c_attn"] == "packed_colwise(3)"
    assert found["transformer.h.*.attn"] == "divide(split_size)"


def test_query_key_and_value_packed_by_their_heads():
    found = find(build("phi3"))
    assert found["model.layers.*.self_attn.qkv_proj"] == "packed_colwise(32, 16, 16)"
    assert found["model.layers.*.self_attn"] == "divide(config.num_attention_heads, num_key_value_heads)"


def test_tables_of_biases_per_head():
    found = find(build("t5"))
    assert found["encoder.block.0.layer.0.SelfAttention.relative_attention_bias"] == "colwise"
    assert found["decoder.block.*.layer.*.EncDecAttention.o"] == "rowwise"


def test_norms_of_single_heads_sum_their_gradients():
    assert find(build("qwen3"))["model.layers.*.self_attn.q_norm.weight"] == "replicate(sum_grad)"


class Attention(nn.Module):
    """Its heads reshape to the full width, which only fits where no feature is elsewhere."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        q, k, v = (
            part.view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, 2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.up = nn.Linear(width, 4 * width)
        self.slopes = nn.PReLU(4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        hidden = self.slopes(self.up(x).transpose(1, 2)).transpose(1, 2)
        return x + self.down(hidden)


class Net(nn.Module):
    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16, heads) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_what_reshapes_to_the_full_width_is_split_where_its_heads_divide():
    found = find_tensor_plan(Net(), 2, inputs=torch.zeros(2, 3, 16)).plan.to_dict()
    assert found["blocks.*.attention"] == "divide(reshape.sizes)"
    assert found["blocks.*.attention.out"] == "rowwise"


def test_layers_that_cannot_be_paired_are_split_alone_and_say_why():
    found = find_tensor_plan(Net(heads=1), 2, inputs=torch.zeros(2, 3, 16))
    assert found.plan.to_dict() == {
        "blocks.*.attention.qkv": "colwise_gather",
        "blocks.*.attention.out": "colwise_gather",
        "blocks.*.up": "colwise",
        "blocks.*.slopes.weight": "slice(0)",
        "blocks.*.down": "rowwise",
    }
    assert not found.whole and set(found.alone) == {"blocks.*.attention.qkv", "blocks.*.attention.out"}
    assert "attention.heads is 1, which cannot be divided over 2 ranks" in found.alone["blocks.*.attention.qkv"]
    assert "split alone, its output gathered:" in found.describe()


def test_attention_of_plain_pytorch():
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    found = find_tensor_plan(nn.TransformerEncoder(layer, 2), 2, inputs=torch.zeros(2, 3, 16))
    assert found.plan.to_dict() == {
        "layers.*.self_attn": "heads",
        "layers.*.self_attn.out_proj": "rowwise",
        "layers.*.linear1": "colwise",
        "layers.*.linear2": "rowwise",
    }
    assert found.whole == {}


class Masked(nn.Module):
    """Blocks that are handed a mask of booleans, which says what to ignore."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.MultiheadAttention(16, 4, batch_first=True) for _ in range(2))
        self.register_buffer("mask", torch.ones(5, 5, dtype=torch.bool).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x, x, x, attn_mask=self.mask)[0]
        return x


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_masks_that_tell_what_to_ignore(device):
    with torch.device(device):
        model = Masked()
    assert find(model, inputs=torch.zeros(2, 5, 16))["blocks.1"] == "heads"


def test_layers_whose_weights_other_code_reads_are_kept_in_slices():
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.out = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(self.down(torch.relu(self.up(x))), self.out.weight)

    found = find_tensor_plan(nn.Sequential(Reader(), Reader()), 2, inputs=torch.zeros(2, 3, 8))
    kept = {"*.out.weight": "gather(0, 1)"}
    assert found.plan.to_dict() == {"*.up": "colwise", "*.down": "rowwise", **kept}
    assert not found.whole


def test_a_plain_sequential():
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
    assert find(model) == {"0": "colwise", "2": "rowwise"}
    assert find(model, 3) == {"0": "colwise", "2": "rowwise"}
    writing = nn.Sequential(nn.Linear(8, 12), nn.ReLU(inplace=True), nn.Linear(12, 8))
    found = find_tensor_plan(writing, 2, inputs=torch.randn(2, 3, 4, 8))
    assert found.plan.to_dict() == {"0": "colwise", "2": "rowwise"}


class _Sized(nn.Module):
    """Takes its size from a mask of numbers, as ViLT does: no random numbers are one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = F.interpolate(x.movedim(1, 2), size=int(mask[0].prod().item()) * mask.size(1)).movedim(1, 2)
        return x + self.down(torch.relu(self.up(x)))


class _WithMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Sized() for _ in range(2))
        self.head = nn.Linear(8, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[:2])
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def test_a_block_that_takes_no_random_numbers_is_left_whole():
    found = find_tensor_plan(_WithMask(), 2, inputs=torch.randn(2, 5, 8))
    assert found.plan.to_dict()["head"] == "colwise_gather"
    assert "it does not run alone, on random numbers" in found.whole["blocks.*"]


def test_uneven_features():
    model = nn.Sequential(nn.Linear(8, 13), nn.ReLU(), nn.Linear(13, 8))
    assert find(model, 2) == {"0": "colwise", "2": "rowwise"}


def test_nothing_to_split():
    model = nn.Sequential(nn.Linear(8, 1), nn.Softmax(-1), nn.Linear(1, 1))
    with pytest.raises(NoTableError, match=r"nothing of this Sequential .* over 2 ranks:(.|\n)*starting from"):
        find_tensor_plan(model)


def test_published_tables_are_normalised():
    published, unknown = published_table(build("llama"))
    table = published.to_dict()
    assert table["model.layers.*.self_attn.q_proj"] == "colwise"
    assert table["lm_head"] == "colwise_gather"
    assert not unknown


def test_a_published_style_of_another_age_is_told():
    model = build("llama")
    model.config.base_model_tp_plan = {"layers.*.self_attn.q_proj": "sideways", "layers.*.mlp.up_proj": "rowwise"}
    found = find_tensor_plan(model)
    assert "published as 'sideways'" in found.whole["model.layers.*.self_attn.q_proj"]
    assert found.plan.to_dict()["model.layers.*.mlp.up_proj"] == "colwise"


class AttentionAndMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.qkv, self.output = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.output(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(self.up(x).relu())


class ReadsItsHeads(nn.Module):
    """A model that counts the heads of its first block, outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 16)
        self.blocks = nn.ModuleList(AttentionAndMLP() for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x * self.blocks[0].num_heads


def test_where_the_whole_is_wrong_the_largest_part_that_is_right_is_split():
    tokens = torch.arange(12).view(2, 6)
    found = find_tensor_plan(ReadsItsHeads(), 2, inputs=tokens)
    table = found.plan.to_dict()
    assert table == {"blocks.*.up": "colwise", "blocks.*.down": "rowwise", "embedding": "vocab"}
    assert set(found.whole) == {"blocks.*", "blocks.*.qkv", "blocks.*.output"}
    assert all(reason.startswith("the model around it does not compute the same") for reason in found.whole.values())


class Rotated(nn.Module):
    """Attention with parameters between its split layers: a module's, and one of its own."""

    def __init__(self, rotation: nn.Module, norm: nn.Parameter) -> None:
        super().__init__()
        self.rotation, self.scale = rotation, norm
        self.qkv, self.out = nn.Linear(32, 96, bias=False), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        q, k = self.rotation(q) * self.scale, self.rotation(k)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_parameters_between_split_layers_that_blocks_share_have_one_name():
    rotation, scale = nn.LayerNorm(8), nn.Parameter(torch.ones(8))
    blocks = nn.Sequential(*(Rotated(rotation, scale) for _ in range(2)))
    found = find_tensor_plan(blocks, 2, inputs=torch.randn(2, 5, 32)).plan
    styles = found.resolve(blocks)
    assert str(styles["0.scale"]) == str(styles["0.rotation.weight"]) == "replicate(sum_grad)"
    assert str(styles["0.out"]) == str(styles["1.out"]) == "rowwise"
    assert str(styles["1.scale"]) == "replicate(sum_grad)"  # tied, and read at two places
    assert not any(name.startswith("1.rotation") for name in styles)


def test_a_table_may_use_any_name_of_what_is_shared():
    rotation, scale = nn.LayerNorm(8), nn.Parameter(torch.ones(8))
    blocks = nn.Sequential(*(Rotated(rotation, scale) for _ in range(2)))
    styles = TensorTable.from_dict({"1.scale": "replicate", "1.rotation": "replicate(sum_grad)"}).resolve(blocks)
    assert {name: str(style) for name, style in styles.items()} == {
        "1.scale": "replicate",
        "0.rotation": "replicate(sum_grad)",
    }
