"""Cases of timm: its models by their names, with small sizes, or its smallest ones as they are."""

from collections.abc import Callable
from typing import Any

from torch import nn

from benchmarks.models.batches import CLASSES, class_loss, images
from benchmarks.models.case import Case

_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}


def _built(name: str, settings: dict[str, Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm

        model = timm.create_model(name, pretrained=False, num_classes=CLASSES, **settings)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model

    return build


def _case(name: str, model: str, *, size: int = 32, is_sequence: bool = False, **settings: Any) -> Case:
    group = "attention and mixing" if is_sequence else "convolutions"
    return Case(name, "timm", _built(model, settings), images(size=size), class_loss, group, is_sequence=is_sequence)


def _sequence(name: str, model: str, *, size: int = 32, **settings: Any) -> Case:
    return _case(name, model, size=size, is_sequence=True, **settings)


_RESNET = {"layers": [1, 1, 1, 1], "channels": (8, 16, 24, 32), "stem_width": 8}

CASES = [
    _sequence("ViT", "vit_tiny_patch16_224", **_VIT),
    _sequence("DeiT, distilled", "deit_tiny_distilled_patch16_224", **_VIT),
    _sequence("DeiT 3", "deit3_small_patch16_224", **_VIT),
    _sequence("BEiT", "beit_base_patch16_224", **_VIT),
    _sequence("EVA-02", "eva02_tiny_patch14_224", **_VIT),
    _sequence("CaiT", "cait_xxs24_224", **_VIT),
    _sequence("XCiT", "xcit_nano_12_p16_224", **_VIT),
    _sequence("Mixer", "mixer_s32_224", img_size=32, patch_size=8, num_blocks=2, embed_dim=32),
    _sequence("ResMLP", "resmlp_12_224", img_size=32, patch_size=8, num_blocks=2, embed_dim=32),
    _sequence("gMLP", "gmlp_ti16_224", img_size=32, patch_size=8, num_blocks=2, embed_dim=32),
    _sequence("Swin", "swin_tiny_patch4_window7_224", img_size=32, embed_dim=16, depths=(2, 2), num_heads=(2, 4),
              window_size=4),
    _sequence("Swin v2", "swinv2_tiny_window8_256", img_size=32, embed_dim=16, depths=(2, 2), num_heads=(2, 4),
              window_size=4),
    _sequence("MaxViT", "maxvit_pico_rw_256", size=64, img_size=64),
    _sequence("CoAtNet", "coatnet_pico_rw_224", size=64, img_size=64),
    _sequence("PVT v2", "pvt_v2_b0", depths=(1, 1, 1, 1), embed_dims=(8, 16, 24, 32), num_heads=(1, 2, 2, 4)),
    _sequence("Twins", "twins_svt_small", img_size=64, size=64, embed_dims=(8, 16, 24, 32), num_heads=(1, 2, 2, 4),
              depths=(1, 1, 1, 1), wss=(4, 4, 4, 2)),
    _sequence("PoolFormer", "poolformer_s12", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32)),
    _sequence("CAFormer", "caformer_s18", size=64, depths=(1, 1, 1, 1), dims=(32, 32, 32, 32)),
    _sequence("ViT of timm's tests", "test_vit", size=160),
    _case("ResNet", "resnet18", block_args=None, **_RESNET),
    _case("EfficientNet of timm's tests", "test_efficientnet", size=64),
    _case("ByobNet of timm's tests", "test_byobnet", size=64),
    _case("ConvNeXt of timm's tests", "test_convnext", size=64),
    _case("NFNet of timm's tests", "test_nfnet", size=64),
    _case("ResNet of timm's tests", "test_resnet", size=64),
    _case("MambaOut of timm's tests", "test_mambaout", size=64),
    _case("MobileNet v3", "mobilenetv3_small_050"),
    _case("RegNet", "regnetx_002", size=32),
    _case("ConvMixer", "convmixer_768_32", dim=32, depth=2, kernel_size=3, patch_size=4),
    _case("GhostNet", "ghostnet_050"),
    _case("RepVGG", "repvgg_a0"),
    _case("DenseNet", "densenet121", growth_rate=8, block_config=(2, 2)),
    _case("EdgeNeXt", "edgenext_xx_small", size=64),
]
