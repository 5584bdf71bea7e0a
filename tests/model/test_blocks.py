"""What counts as a block of a model, and which modules a name selects."""

import pytest
from torch import nn

import parity
from tensorshard.data_parallel.sharding_units import shard_units
from tensorshard.model.blocks import find_blocks, select_modules


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.output = nn.Sequential(nn.Linear(8, 8), nn.Dropout())

    def forward(self, x):
        return self.output(self.qkv(x)[..., :8])


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x):
        return self.net(x)


class MixtureBlock(nn.Module):
    """Nearly all of its parameters are in a list, but in one of a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.mixture = nn.Module()
        self.mixture.experts = nn.ModuleList(FeedForward() for _ in range(8))

    def forward(self, x):
        return x


class Stage(nn.Module):
    """As in a Swin Transformer: blocks, then a layer that merges patches."""

    def __init__(self, merges: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FeedForward() for _ in range(2))
        self.downsample = nn.Linear(8, 8) if merges else None

    def forward(self, x):
        return x


class Model(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.layers = layers
        self.head = nn.Linear(8, 10)


def names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}.{index}" for index in range(count)]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("gpt", names("blocks", 3)),
        ("bert", names("blocks", 2)),
        ("vit", names("blocks", 2)),
        ("llama", names("model.layers", 2)),
        ("hf_bert", names("bert.encoder.layer", 2)),
        ("resnet", names("resnet.encoder.stages.0.layers", 2) + names("resnet.encoder.stages.1.layers", 2)),
    ],
)
def test_blocks_of_known_models(kind, expected):
    assert list(find_blocks(parity.build(kind))) == expected


def test_encoder_and_decoder_blocks():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=31, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    blocks = find_blocks(T5ForConditionalGeneration(config))
    assert list(blocks) == names("encoder.block", 2) + names("decoder.block", 2)
    transformer = nn.Transformer(8, 2, 2, 2, batch_first=True)
    assert list(find_blocks(transformer)) == names("encoder.layers", 2) + names("decoder.layers", 2)


def test_layers_are_the_blocks_of_a_plain_sequential():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    assert list(find_blocks(model)) == ["0", "2"]


def test_a_model_without_repetition_has_no_blocks():
    assert find_blocks(nn.Linear(3, 3)) == {}
    assert find_blocks(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Conv1d(3, 3, 1))) == {}
    assert find_blocks(FeedForward()).keys() == {"net.0", "net.2"}


def test_lists_in_lists_are_gone_through_because_nobody_calls_them():
    pairs = nn.ModuleList(nn.ModuleList([Attention(), FeedForward()]) for _ in range(2))
    expected = ["layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"]
    assert list(find_blocks(Model(pairs))) == expected
    named = nn.ModuleList(nn.ModuleDict({"mixer": Attention(), "mlp": FeedForward()}) for _ in range(2))
    assert list(find_blocks(Model(named)))[:2] == ["layers.0.mixer", "layers.0.mlp"]


def test_stages_are_gone_through():
    stages = nn.ModuleList([Stage(merges=True), Stage(merges=True), Stage(merges=False)])
    assert list(find_blocks(Model(stages))) == [f"layers.{s}.blocks.{b}" for s in range(3) for b in range(2)]


def test_a_block_with_experts_is_one_block():
    assert list(find_blocks(Model(nn.ModuleList(MixtureBlock() for _ in range(2))))) == names("layers", 2)


def test_names_and_globs_select_modules():
    model = parity.build("gpt")
    assert list(select_modules(model, ["head", "blocks.1"])) == ["blocks.1", "head"]
    assert list(select_modules(model, ["blocks.*.attention"])) == [f"blocks.{i}.attention" for i in range(3)]
    assert "blocks" not in select_modules(model, ["blocks*"])


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("layers.*", r"no module of the model is called 'layers\.\*'; its modules are such as blocks\.0, blocks\.1"),
        ("blocks", r"'blocks' is a ModuleList, which is never called itself; name its members \(blocks\.\*\)"),
    ],
)
def test_names_that_select_nothing(pattern, message):
    with pytest.raises(ValueError, match=message):
        select_modules(parity.build("gpt"), ["head", pattern])


def test_units_are_blocks_unless_asked_for_otherwise():
    model = parity.build("gpt")
    assert shard_units(model, None) == [[block] for block in model.blocks]
    assert shard_units(model, ["blocks.*", "head"]) == [[block] for block in model.blocks] + [[model.head]]


def test_units_of_at_least_some_bytes():
    model = parity.build("gpt")
    size = 4 * sum(p.numel() for p in model.blocks[0].parameters())
    assert shard_units(model, size) == [[block] for block in model.blocks]
    assert shard_units(model, size + 1) == [list(model.blocks)]  # the third alone would be too small
    assert shard_units(model, 100 * size) == [list(model.blocks)]
