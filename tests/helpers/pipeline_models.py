"""Models of many kinds, small, with the inputs that they take and a loss, to be cut into pipeline stages."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import seeds
from tensorshard.models import GPT, Bert, ViT


@dataclass(frozen=True)
class Example:
    """A model and what it is run on.

    Args:
        build: makes the model, the same every time.
        inputs: of a number of samples and a size (of a sequence), made by a generator.
        output: the tensor of the model's output that the loss is made of.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[int, int, torch.Generator], Any]
    output: Callable[[Any], torch.Tensor] = lambda output: output

    def make(self, samples: int = 2, size: int = 8) -> tuple[nn.Module, Any]:
        seeds.seed(3)
        return self.build(), self.inputs(samples, size, seeds.generator(samples + size))

    def loss(self, output: Any) -> torch.Tensor:
        """A sum in which every element has its own weight."""
        found = self.output(output).float()
        weights = torch.linspace(0.5, 1.5, found.numel(), device=found.device).view(found.shape)
        return (found * weights).sum() / found.shape[0]


def _tokens(samples: int, size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 61, (samples, size), generator=generator)


def _images(samples: int, size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(samples, 3, 16, 16, generator=generator)


def _features(samples: int, size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(samples, 6, generator=generator)


def _padded(name: str) -> Callable[[int, int, torch.Generator], Any]:
    def make(samples: int, size: int, generator: torch.Generator) -> Any:
        mask = torch.ones(samples, size, dtype=torch.long)
        mask[-1, -2:] = 0
        return {name: _tokens(samples, size, generator), "attention_mask": mask}

    return make


class Down(nn.Module):
    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out, 3, padding=1)
        self.norm = nn.BatchNorm2d(out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm(self.conv(x)), inplace=True)


class UNet(nn.Module):
    """Skip connections reach over the whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Down(3, 4), Down(4, 8), Down(8, 8)])
        self.up = nn.ModuleList([Down(16, 8), Down(12, 4)])
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for index, block in enumerate(self.down):
            x = block(x if index == 0 else F.max_pool2d(x, 2))
            skips.append(x)
        skips.pop()
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], dim=1))
        return self.head(x)


class Mixer(nn.Module):
    """One matrix, called before every block."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.inlet = nn.Linear(6, 12)
        self.mix = nn.Linear(12, 12)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12), nn.Tanh()) for _ in range(blocks)
        )
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x + self.mix(x))
        return self.head(x)


class Bare(nn.Module):
    """Parameters of the root's own, read by code at several places, and one that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(6, 12)
        self.scale = nn.Parameter(torch.linspace(0.5, 2, 12))
        self.shift = nn.Parameter(torch.linspace(-1, 1, 12))
        self.unused = nn.Parameter(torch.ones(3))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x) + self.shift
        for block in self.blocks:
            x = block(x * self.scale)
        return self.head(x)


@dataclass
class Pair:
    """No container that pytree knows."""

    main: torch.Tensor
    extra: tuple[int, None, torch.Tensor]


class PairBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, pair: Pair) -> Pair:
        return Pair(torch.sin(self.first(pair.main)), (pair.extra[0] + 1, None, self.second(pair.extra[2])))


class Pairs(nn.Module):
    """Blocks that hand on dataclasses; code outside of them changes what they return in place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([PairBlock() for _ in range(4)])

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        pair = Pair(x, (0, None, x * 2))
        for block in self.blocks:
            pair = block(pair)
            pair.main += 0.5 * pair.extra[0]
        return {"sum": pair.main + pair.extra[2], "depth": pair.extra[0]}


class Checkpointed(GPT):
    """Recomputes each block by itself."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1])))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


class Experts(nn.Module):
    """The shapes inside of it depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 2)
        self.experts = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        choice = self.router(x).argmax(-1)
        result = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = torch.nonzero(choice == index).flatten()
            result = result.index_add(0, rows, expert(x[rows]))
        return x + result


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Experts(), Experts(), Experts()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32,
        )
    )  # fmt: skip


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=61, n_positions=32, n_embd=32, n_layer=3, n_head=2))


def _hf_bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
            max_position_embeddings=32,
        )
    )  # fmt: skip


def _resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(
        ResNetConfig(embedding_size=8, hidden_sizes=[8, 12], depths=[2, 2], layer_type="basic", num_labels=5)
    )


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=2, num_heads=4,
            decoder_start_token_id=0,
        )
    )  # fmt: skip


def _t5_inputs(samples: int, size: int, generator: torch.Generator) -> Any:
    return {
        **_padded("input_ids")(samples, size, generator),
        "decoder_input_ids": _tokens(samples, size - 1, generator),
    }


def _logits(output: Any) -> torch.Tensor:
    return output.logits


def _sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(inplace=True), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 5))


EXAMPLES: dict[str, Example] = {
    "sequential": Example(_sequential, _features),
    "gpt": Example(lambda: GPT(61, 32, 3, 2, 32), _tokens),
    "gpt_tied": Example(lambda: GPT(61, 32, 3, 2, 32, tie_embeddings=True), _tokens),
    "gpt_dropout": Example(lambda: GPT(61, 32, 3, 2, 32, dropout=0.2), _tokens),
    "gpt_checkpointed": Example(lambda: Checkpointed(61, 32, 3, 2, 32, dropout=0.2), _tokens),
    "bert": Example(lambda: Bert(61, 32, 3, 2, 32, dropout=0.1), _padded("tokens")),
    "vit": Example(lambda: ViT(16, 4, 5, 3, 2, 32), _images),
    "unet": Example(UNet, _images),
    "mixer": Example(Mixer, _features),
    "bare": Example(Bare, _features),
    "pairs": Example(Pairs, _features, lambda output: output["sum"] * output["depth"]),
    "mixture": Example(Mixture, _features),
    "llama": Example(_llama, _padded("input_ids"), _logits),
    "gpt2": Example(_gpt2, _tokens, _logits),
    "hf_bert": Example(_hf_bert, _padded("input_ids"), _logits),
    "resnet": Example(_resnet, _images, _logits),
    "t5": Example(_t5, _t5_inputs, _logits),
}
