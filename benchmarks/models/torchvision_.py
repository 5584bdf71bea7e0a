"""Cases of torchvision: its classes, built with small sizes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.models.batches import CLASSES, Batches, class_loss, images, main_output, number_loss, numbers
from benchmarks.models.case import Case, Loss


def _made(build: Callable[[Any], nn.Module]) -> Callable[[], nn.Module]:
    def built() -> nn.Module:
        from torchvision import models

        return build(models)

    return built


def _resnet(models: Any) -> nn.Module:
    return models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=CLASSES)


def _bottleneck(models: Any) -> nn.Module:
    block = models.resnet.Bottleneck
    return models.ResNet(block, [1, 1, 1, 1], num_classes=CLASSES, groups=4, width_per_group=2)


def _vit(models: Any) -> nn.Module:
    return models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64, num_classes=CLASSES
    )


def _swin(models: Any, version: int) -> nn.Module:
    block = models.swin_transformer
    settings = {} if version == 1 else dict(block=block.SwinTransformerBlockV2, downsample_layer=block.PatchMergingV2)
    return models.SwinTransformer(
        patch_size=[4, 4], embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=[4, 4],
        stochastic_depth_prob=0.0, num_classes=CLASSES, **settings,
    )  # fmt: skip


def _maxvit(models: Any) -> nn.Module:
    return models.MaxVit(
        input_size=(32, 32), stem_channels=8, partition_size=2, block_channels=[16, 32], block_layers=[1, 1],
        head_dim=8, stochastic_depth_prob=0.0, num_classes=CLASSES,
    )  # fmt: skip


def _convnext(models: Any) -> nn.Module:
    config = models.convnext.CNBlockConfig
    blocks = [config(8, 16, 1), config(16, 32, 2), config(32, None, 1)]
    return models.ConvNeXt(blocks, stochastic_depth_prob=0.0, num_classes=CLASSES)


def _efficientnet(models: Any) -> nn.Module:
    config = partial(models.efficientnet.MBConvConfig, width_mult=1.0, depth_mult=1.0)
    blocks = [config(1, 3, 1, 16, 8, 1), config(4, 3, 2, 8, 16, 2), config(4, 5, 2, 16, 24, 1)]
    return models.EfficientNet(blocks, dropout=0.0, stochastic_depth_prob=0.0, num_classes=CLASSES, last_channel=64)


def _mobilenet_v3(models: Any) -> nn.Module:
    config = partial(models.mobilenetv3.InvertedResidualConfig, dilation=1, width_mult=1.0)
    blocks = [config(16, 3, 16, 16, True, "RE", 2), config(16, 3, 48, 24, False, "HS", 2)]
    return models.MobileNetV3(blocks, last_channel=64, num_classes=CLASSES, dropout=0.0)


def _regnet(models: Any) -> nn.Module:
    params = models.regnet.BlockParams.from_init_params(depth=4, w_0=16, w_a=16, w_m=2.0, group_width=8, se_ratio=0.25)
    return models.RegNet(params, stem_width=8, num_classes=CLASSES)


def _googlenet(models: Any) -> nn.Module:
    return models.GoogLeNet(num_classes=CLASSES, aux_logits=False, init_weights=False, dropout=0.0)


def _densenet(models: Any) -> nn.Module:
    return models.DenseNet(growth_rate=8, block_config=(2, 2), num_init_features=16, num_classes=CLASSES)


def _fcn(models: Any) -> nn.Module:
    from torchvision.models.segmentation.fcn import FCN, FCNHead

    backbone = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1))
    return FCN(Named(backbone), FCNHead(32, 3))


class Named(nn.Module):
    """Its part's output as segmentation heads of torchvision want it."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": self.part(x)}


def dense_loss(output: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    """Of a segmentation model's main output."""
    return number_loss(main_output(output["out"]), targets)


def _video(models: Any) -> nn.Module:
    video = models.video.resnet
    return nn.Sequential(
        video.Conv3DSimple(3, 8), nn.BatchNorm3d(8), nn.ReLU(), video.BasicBlock(8, 8, video.Conv3DSimple),
        nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(8, CLASSES),
    )  # fmt: skip


def _case(
    name: str,
    build: Callable[[Any], nn.Module],
    batch: Batches | None = None,
    loss: Loss = class_loss,
    *,
    is_sequence: bool = False,
) -> Case:
    return Case(name, "torchvision", _made(build), batch or images(), loss, "", is_sequence=is_sequence)


CASES = [
    _case("ResNet", _resnet),
    _case("ResNeXt", _bottleneck, images(size=64)),
    _case("ViT", _vit, is_sequence=True),
    _case("Swin", partial(_swin, version=1), is_sequence=True),
    _case("Swin v2", partial(_swin, version=2), is_sequence=True),
    _case("MaxViT", _maxvit, is_sequence=True),
    _case("ConvNeXt", _convnext),
    _case("EfficientNet", _efficientnet),
    _case("MobileNet v2", lambda models: models.MobileNetV2(CLASSES, 0.1, dropout=0.0), images(size=64)),
    _case("MobileNet v3", _mobilenet_v3),
    _case("RegNet", _regnet),
    _case("ShuffleNet v2", lambda models: models.ShuffleNetV2([1, 1, 1], [8, 16, 32, 64, 64], num_classes=CLASSES)),
    _case("SqueezeNet", lambda models: models.SqueezeNet("1_1", num_classes=CLASSES, dropout=0.0)),
    _case("MNASNet", lambda models: models.MNASNet(0.1, num_classes=CLASSES, dropout=0.0), images(size=64)),
    _case("GoogLeNet", _googlenet, images(size=64)),
    _case("DenseNet", _densenet),
    _case("FCN", _fcn, images(targets="number"), dense_loss),
    _case("3-D ResNet's block", _video, numbers(3, 4, 16, 16, targets="classes")),
]
