"""Image models as people write them by hand."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from benchmarks.models.batches import Batches, class_loss, images, number_loss
from benchmarks.models.case import Case, Loss


def _conv(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = _conv(3, 8)
        self.layer1 = nn.Sequential(BasicBlock(8, 8, 1), BasicBlock(8, 8, 1))
        self.layer2 = nn.Sequential(BasicBlock(8, 16, 2), BasicBlock(16, 16, 1))
        self.layer3 = nn.Sequential(BasicBlock(16, 32, 2), BasicBlock(32, 32, 1))
        self.linear = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer3(self.layer2(self.layer1(self.stem(x))))
        return self.linear(F.adaptive_avg_pool2d(x, 1).flatten(1))


class UNet(nn.Module):
    """Down and up with skips that are concatenated, group norms, transposed convolutions."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        sizes = [3, width, 2 * width, 4 * width]
        upwards = [(2 * width, 4 * width), (width, 2 * width)]
        self.down = nn.ModuleList(self._double(a, b) for a, b in pairwise(sizes))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in upwards)
        self.merge = nn.ModuleList(self._double(2 * a, a) for a, _ in upwards)
        self.out = nn.Conv2d(width, 3, 1)

    @staticmethod
    def _double(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU(),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for index, down in enumerate(self.down):
            x = down(x if index == 0 else F.max_pool2d(x, 2))
            skips.append(x)
        for up, merge, skip in zip(self.up, self.merge, reversed(skips[:-1]), strict=True):
            x = merge(torch.cat([up(x), skip], 1))
        return self.out(x)


class VAE(nn.Module):
    """A convolutional VAE; its noise is made of its input, so that every plan draws the same."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(_conv(3, 8, 2), _conv(8, 16, 2), nn.Flatten())
        self.mean, self.log_variance = nn.Linear(16 * 64, 16), nn.Linear(16 * 64, 16)
        self.start = nn.Linear(16, 16 * 64)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Tanh()
        )

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.encoder(x)
        mean, log_variance = self.mean(h), self.log_variance(h).clamp(-4, 4)
        noise = torch.sin(100 * x.flatten(1)[:, :16])
        z = mean + noise * torch.exp(0.5 * log_variance)
        image = self.decoder(self.start(z).view(-1, 16, 8, 8))
        return {"image": image, "mean": mean, "log_variance": log_variance}


def vae_loss(output: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    """Reconstruction of a number, plus the KL divergence."""
    mean, log_variance = output["mean"], output["log_variance"]
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
    return number_loss(output["image"], targets) + 0.01 * divergence


class Generator(nn.Module):
    """DCGAN's generator, from images of 4 x 4."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(48, 32 * 16), nn.Unflatten(1, (32, 4, 4))]
        for a, b in ((32, 16), (16, 8)):
            layers += [nn.ConvTranspose2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(True)]
        self.main = nn.Sequential(nn.Flatten(), *layers, nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Tanh())

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.main(noise)


class Discriminator(nn.Module):
    """SN-GAN's discriminator: every layer under spectral normalization, by a parametrization or the older hook."""

    def __init__(self, normalize: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for a, b in ((3, 8), (8, 16), (16, 32)):
            layers += [normalize(nn.Conv2d(a, b, 4, 2, 1)), nn.LeakyReLU(0.2)]
        self.main = nn.Sequential(*layers, nn.Flatten(), normalize(nn.Linear(32 * 16, 5)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.main(x)


class MixerBlock(nn.Module):
    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(patches, 32), nn.GELU(), nn.Linear(32, patches))
        self.channels = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 32, 8, 8)
        self.blocks = nn.ModuleList(MixerBlock(16, 32) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class HandViT(nn.Module):
    """A vision transformer with a class token, on ``nn.TransformerEncoderLayer``."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.token = nn.Conv2d(3, 32, 8, 8), nn.Parameter(torch.zeros(1, 1, 32))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 17, 32))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
            for _ in range(3)
        )
        self.head = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, 0])


class SEBlock(nn.Module):
    """An inverted bottleneck with a depthwise convolution and squeeze and excitation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        wide = 4 * width
        self.expand = nn.Sequential(nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.SiLU())
        self.depth = nn.Sequential(
            nn.Conv2d(wide, wide, 3, 1, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.SiLU()
        )
        self.squeeze = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, 8, 1), nn.SiLU(), nn.Conv2d(8, wide, 1), nn.Sigmoid()
        )
        self.project = nn.Sequential(nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.depth(self.expand(x))
        return x + self.project(h * self.squeeze(h))


class DenseBlock(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(inputs + 8 * i), nn.ReLU(), nn.Conv2d(inputs + 8 * i, 8, 3, padding=1))
            for i in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x


class BNAct(nn.BatchNorm2d):
    """A batch norm with its activation inside."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(super().forward(x))


class Siamese(nn.Module):
    """One tower on two images."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(_conv(3, 8, 2), _conv(8, 16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head((self.tower(x) - self.tower(x.flip(-1))).abs())


def _head(*layers: nn.Module, width: int) -> nn.Sequential:
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 5))


def _case(
    name: str, build: Callable[[], nn.Module], batch: Batches | None = None, loss: Loss = class_loss, **options: bool
) -> Case:
    return Case(name, "plain", build, batch or images(targets="classes"), loss, "vision", **options)


_numbers = images(targets="number")

CASES = [
    _case("ResNet", ResNet),
    _case("U-Net", UNet, _numbers, number_loss),
    _case("VAE", VAE, _numbers, vae_loss),
    _case("GAN-generator", Generator, images(size=4, targets="number"), number_loss),
    _case("spectral-norm", lambda: Discriminator(parametrizations.spectral_norm)),
    _case("spectral-norm-hook", lambda: Discriminator(nn.utils.spectral_norm)),
    _case("weight-norm", lambda: Discriminator(parametrizations.weight_norm)),
    _case("MLP-Mixer", Mixer, is_sequence=True),
    _case("hand-ViT", HandViT, is_sequence=True),
    _case("SE-depthwise", lambda: _head(_conv(3, 16, 2), SEBlock(16), SEBlock(16), width=16)),
    _case("DenseNet", lambda: _head(_conv(3, 8, 2), DenseBlock(8), nn.AvgPool2d(2), DenseBlock(32), width=56)),
    _case(
        "VGG",
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 64, 64), nn.ReLU(), nn.Linear(64, 5),
        ),
    ),
    _case("batch-norm-subclass", lambda: _head(nn.Conv2d(3, 8, 3), BNAct(8), nn.Conv2d(8, 8, 3), BNAct(8), width=8)),
    _case("instance-norm", lambda: _head(
        nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True, track_running_stats=True), nn.ReLU(),
        nn.Conv2d(8, 16, 3), nn.InstanceNorm2d(16), nn.ReLU(), width=16,
    )),
    _case("Siamese", Siamese),
]  # fmt: skip
