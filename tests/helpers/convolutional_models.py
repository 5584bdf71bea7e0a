"""Small convolutional networks of many kinds, and what to feed them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import seeds


class BasicBlock(nn.Module):
    """He et al. 2016, figure 5, left."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """He et al. 2016, figure 5, right; with `groups`, that of ResNeXt."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        inner = outputs // 2
        self.conv1 = nn.Conv2d(inputs, inner, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, 1, groups=groups, bias=False)
        self.norm2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, outputs, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class SqueezeExcitation(nn.Module):
    """Hu et al. 2018."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(channels, squeezed, 1)
        self.expand = nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = F.adaptive_avg_pool2d(x, 1)
        return x * self.expand(F.silu(self.reduce(scale))).sigmoid()


class InvertedResidual(nn.Module):
    """MobileNet v2's block with squeeze and excitation, as in EfficientNet (Tan & Le 2019)."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        inner = 4 * inputs
        self.expand = nn.Conv2d(inputs, inner, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(inner)
        self.depthwise = nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False)
        self.norm2 = nn.BatchNorm2d(inner)
        self.excitation = SqueezeExcitation(inner, max(4, inputs // 4))
        self.dropout = nn.Dropout2d(dropout)
        self.project = nn.Conv2d(inner, outputs, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(outputs)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.silu(self.norm1(self.expand(x)))
        y = self.excitation(F.silu(self.norm2(self.depthwise(y))))
        y = self.norm3(self.project(self.dropout(y)))
        return x + y if self.residual else y


class ConvNeXtBlock(nn.Module):
    """Liu et al. 2022."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.up = nn.Linear(channels, 4 * channels)
        self.down = nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(torch.full((channels,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(F.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


class Classifier(nn.Module):
    """A stem, blocks, and a head on what is left of each channel."""

    def __init__(self, stem: nn.Module, blocks: list[nn.Module], channels: int, classes: int = 5) -> None:
        super().__init__()
        self.stem = stem
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


class TimedBlock(nn.Module):
    """A residual block of a diffusion model's U-Net, into which the time goes (Ho et al. 2020, appendix B)."""

    def __init__(self, inputs: int, outputs: int, time: int, groups: int = 4) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs)
        self.norm2 = nn.GroupNorm(groups, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(y)))


class SpatialAttention(nn.Module):
    """Attention of each position to all, its heads' projections being convolutions."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(4, channels)
        self.query = nn.Conv2d(channels, channels, 1)
        self.key = nn.Conv2d(channels, channels, 1)
        self.value = nn.Conv2d(channels, channels, 1)
        self.output = nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (
            layer(y).flatten(2).unflatten(1, (self.heads, -1)).transpose(2, 3)
            for layer in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v).transpose(2, 3).flatten(1, 2)
        return x + self.output(y.unflatten(2, x.shape[2:]))


class UNet(nn.Module):
    """Two resolutions, skips that are concatenated, attention in the middle; it predicts an image."""

    def __init__(self, width: int = 16, time: int = 8) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, time), nn.SiLU(), nn.Linear(time, time))
        self.start = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList([TimedBlock(width, width, time), TimedBlock(width, 2 * width, time)])
        self.middle = nn.ModuleList([TimedBlock(2 * width, 2 * width, time), TimedBlock(2 * width, 2 * width, time)])
        self.attention = SpatialAttention(2 * width, 2)
        self.up = nn.ModuleList([TimedBlock(4 * width, width, time), TimedBlock(2 * width, width, time)])
        self.end = nn.Sequential(nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        time = self.time(images.mean((1, 2, 3))[:, None])
        x, skips = self.start(images), []
        for block in self.down:
            x = block(x, time)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle[1](self.attention(self.middle[0](x, time)), time)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, skips.pop()], 1), time)
        return self.end(x)


class WaveBlock(nn.Module):
    """A gated, dilated convolution with a residual and a skip output (van den Oord et al. 2016)."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.gates = nn.Conv1d(channels, 4 * channels, 3, padding=dilation, dilation=dilation)
        self.residual = nn.Conv1d(2 * channels, channels, 1)
        self.skip = nn.Conv1d(2 * channels, channels, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, gates = self.gates(x).chunk(2, 1)
        y = values.tanh() * gates.sigmoid()
        return x + self.residual(y), self.skip(y)


class WaveNet(nn.Module):
    """Audio [samples, 1, length] to audio."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.start = nn.Conv1d(1, channels, 1)
        self.blocks = nn.ModuleList(WaveBlock(channels, 2**i) for i in range(3))
        self.end = nn.Conv1d(channels, 1, 1)

    def forward(self, audio: torch.Tensor) -> torch.Tensor:
        x = self.start(audio)
        total = torch.zeros_like(x)
        for block in self.blocks:
            x, skip = block(x)
            total = total + skip
        return self.end(F.relu(total))


def _autoencoder() -> nn.Module:
    """Through a vector and back, by transposed convolutions."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.LeakyReLU(),
        nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.PReLU(32), nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 3, 1, 1), nn.InstanceNorm2d(32, affine=True), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 2 * 2, 24), nn.ReLU(), nn.Linear(24, 32 * 2 * 2), nn.Unflatten(1, (32, 2, 2)),
        nn.ConvTranspose2d(32, 32, 2, 2), nn.BatchNorm2d(32), nn.ReLU(),
        nn.ConvTranspose2d(32, 16, 3, 2, 1, output_padding=1), nn.ReLU(),
        nn.ConvTranspose2d(16, 16, 4, 2, 1), nn.GroupNorm(4, 16), nn.ReLU(),
        nn.Conv2d(16, 3, 3, 1, 1),
    )  # fmt: skip


def _volumes() -> nn.Module:
    """Small volumes [samples, 3, 8, 8, 8]: convolutions of three dimensions, both ways, one of them circular."""
    return nn.Sequential(
        nn.Conv3d(3, 16, 3, 1, 1), nn.BatchNorm3d(16), nn.ReLU(), nn.Dropout3d(0.0),
        nn.Conv3d(16, 24, 3, 2, 1, padding_mode="circular"), nn.ReLU(),
        nn.Conv3d(24, 24, 3, 1, 1), nn.GroupNorm(4, 24), nn.SiLU(),
        nn.ConvTranspose3d(24, 16, 2, 2), nn.ReLU(), nn.Conv3d(16, 3, 1),
    )  # fmt: skip


_BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "basic": lambda: Classifier(
        nn.Conv2d(3, 16, 3, padding=1), [BasicBlock(16, 16), BasicBlock(16, 32, 2), BasicBlock(32, 32)], 32
    ),
    "bottleneck": lambda: Classifier(
        nn.Conv2d(3, 16, 3, padding=1), [Bottleneck(16, 32), Bottleneck(32, 48, 2), Bottleneck(48, 48)], 48
    ),
    "resnext": lambda: Classifier(
        nn.Conv2d(3, 16, 3, padding=1), [Bottleneck(16, 32, groups=4), Bottleneck(32, 32, 2, groups=8)], 32
    ),
    "efficient": lambda: Classifier(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),  # normalization takes nearly all of a bias away again
        [InvertedResidual(8, 8), InvertedResidual(8, 16, 2), InvertedResidual(16, 16)],
        16,
    ),
    "convnext": lambda: Classifier(nn.Conv2d(3, 16, 4, 4), [ConvNeXtBlock(16), ConvNeXtBlock(16)], 16),
    "unet": UNet,
    "autoencoder": _autoencoder,
    "wavenet": WaveNet,
    "volumes": _volumes,
}
KINDS = tuple(_BUILDERS)


class Logits(nn.Module):
    """A classifier of transformers that returns a tensor."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        import transformers

        config = getattr(transformers, f"{name}Config")(num_labels=5, **options)
        self.model = getattr(transformers, f"{name}ForImageClassification")(config)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.model(pixel_values=images).logits


_SIZES = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 2]}
_OF_TRANSFORMERS: dict[str, Callable[[], nn.Module]] = {
    "hf_resnet": lambda: Logits("ResNet", layer_type="bottleneck", **_SIZES),
    "hf_regnet": lambda: Logits("RegNet", groups_width=4, **_SIZES),
    "hf_convnext": lambda: Logits("ConvNext", hidden_sizes=[16, 32], depths=[1, 2], num_stages=2),
}
KINDS_OF_TRANSFORMERS = tuple(_OF_TRANSFORMERS)
_BUILDERS.update(_OF_TRANSFORMERS)
CLASSIFIERS = ("basic", "bottleneck", "resnext", "efficient", "convnext", *KINDS_OF_TRANSFORMERS)


def make(kind: str) -> nn.Module:
    """A model as its constructor makes it."""
    return _BUILDERS[kind]()


def batch(kind: str, samples: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets: classes for classifiers, the inputs themselves for the others."""
    shape = {"wavenet": (1, 24), "volumes": (3, 8, 8, 8)}.get(kind, (3, 16, 16))
    inputs = torch.randn(samples, *shape, generator=generator)
    if kind in CLASSIFIERS:
        return inputs, torch.randint(0, 5, (samples,), generator=generator)
    return inputs, inputs.clone()


def loss(kind: str) -> Callable[[Any, Any], torch.Tensor]:
    """The mean loss of a batch."""
    return F.cross_entropy if kind in CLASSIFIERS else F.mse_loss


def sample(kind: str) -> torch.Tensor:
    """A batch's inputs, for a search."""
    return batch(kind, 2, seeds.generator(2))[0]
