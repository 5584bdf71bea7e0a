"""Cases of timm: its models by their names, with small sizes, or its smallest ones as they are."""

from collections.abc import Callable
from importlib import import_module
from types import FunctionType
from typing import Any

from torch import nn

from benchmarks.models.batches import CLASSES, class_loss, images
from benchmarks.models.case import Case

_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}


def _built(name: str, settings: dict[str, Any]) -> Callable[[], nn.Module]:
    """By its name among timm's models, or "module.Class" in ``timm.models``; a setting may be a function of the module
    that returns the value."""

    def build() -> nn.Module:
        import timm

        if "." in name:
            module_name, kind = name.split(".")
            home = import_module(f"timm.models.{module_name}")
            values = {key: value(home) if isinstance(value, FunctionType) else value for key, value in settings.items()}
            model = getattr(home, kind)(num_classes=CLASSES, **values)
        else:
            model = timm.create_model(name, pretrained=False, num_classes=CLASSES, **settings)
        return model

    return build


def _case(name: str, model: str, *, size: int = 32, is_sequence: bool = False, **settings: Any) -> Case:
    group = "attention and mixing" if is_sequence else "convolutions"
    return Case(name, "timm", _built(model, settings), images(size=size), class_loss, group, is_sequence=is_sequence)


def _sequence(name: str, model: str, *, size: int = 32, **settings: Any) -> Case:
    return _case(name, model, size=size, is_sequence=True, **settings)


_MIXER = {"img_size": 32, "patch_size": 8, "num_blocks": 2, "embed_dim": 32}
_RESNET = {"layers": [1, 1, 1, 1], "channels": (8, 16, 24, 32), "stem_width": 8}

CASES = [
    _sequence("ViT", "vit_tiny_patch16_224", **_VIT),
    _sequence("DeiT, distilled", "deit_tiny_distilled_patch16_224", **_VIT),
    _sequence("DeiT 3", "deit3_small_patch16_224", **_VIT),
    _sequence("BEiT", "beit_base_patch16_224", **_VIT),
    _sequence("EVA-02", "eva02_tiny_patch14_224", **_VIT),
    _sequence("CaiT", "cait_xxs24_224", **_VIT),
    _sequence("XCiT", "xcit_nano_12_p16_224", **_VIT),
    _sequence("Mixer", "mlp_mixer.MlpMixer", **_MIXER),
    _sequence("ResMLP", "mlp_mixer.MlpMixer", **_MIXER, block_layer=lambda home: home.ResBlock,
              norm_layer=lambda home: home.Affine, mlp_ratio=4),
    _sequence("gMLP", "mlp_mixer.MlpMixer", **_MIXER, mlp_ratio=6, block_layer=lambda home: home.SpatialGatingBlock,
              mlp_layer=lambda home: home.GatedMlp),
    _sequence("Swin", "swin_tiny_patch4_window7_224", img_size=32, embed_dim=16, depths=(2, 2), num_heads=(2, 4),
              window_size=4),
    _sequence("Swin v2", "swinv2_tiny_window8_256", img_size=32, embed_dim=16, depths=(2, 2), num_heads=(2, 4),
              window_size=4),
    _sequence("MaxViT", "maxxvit.MaxxVit", img_size=32, cfg=lambda home: home.MaxxVitCfg(
        embed_dim=(16, 32), depths=(1, 1), block_type=("M", "M"), stem_width=8,
        **home._rw_max_cfg(dim_head=8, window_size=2))),
    _sequence("CoAtNet", "maxxvit.MaxxVit", img_size=32, cfg=lambda home: home.MaxxVitCfg(
        embed_dim=(32, 64), depths=(1, 1), block_type=("C", "T"), stem_width=8, head_hidden_size=32,
        **home._rw_coat_cfg())),
    _sequence("PVT v2", "pvt_v2_b0", depths=(1, 1, 1, 1), embed_dims=(8, 16, 24, 32), num_heads=(1, 2, 2, 4)),
    _sequence("Twins", "twins_svt_small", img_size=64, size=64, embed_dims=(8, 16, 24, 32), num_heads=(1, 2, 2, 4),
              depths=(1, 1, 1, 1), wss=(4, 4, 4, 2)),
    _sequence("PoolFormer", "metaformer.MetaFormer", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32), use_mlp_head=False,
              norm_layers=lambda home: home.GroupNorm1, downsample_norm=None, mlp_bias=True),
    _sequence("CAFormer", "metaformer.MetaFormer", size=64, depths=(1, 1, 1, 1), dims=(32, 32, 32, 32),
              token_mixers=lambda home: [home.SepConv, home.SepConv, home.Attention, home.Attention],
              norm_layers=lambda home: [home.LayerNorm2dNoBias] * 2 + [home.LayerNormNoBias] * 2),
    _sequence("ViT of timm's tests", "test_vit", size=160),
    _case("ResNet", "resnet18", block_args=None, **_RESNET),
    _case("EfficientNet of timm's tests", "test_efficientnet", size=64),
    _case("ByobNet of timm's tests", "test_byobnet", size=64),
    _case("ConvNeXt of timm's tests", "test_convnext", size=64),
    _case("NFNet of timm's tests", "test_nfnet", size=64),
    _case("ResNet of timm's tests", "test_resnet", size=64),
    _case("MambaOut of timm's tests", "test_mambaout", size=64),
    _case("MobileNet v3", "mobilenetv3_small_050", size=64),
    _case("RegNet", "regnet.RegNet", cfg=lambda home: home.RegNetCfg(w0=16, wa=16.0, wm=1.5, group_size=8, depth=5)),
    _case("ConvMixer", "convmixer.ConvMixer", dim=32, depth=2, kernel_size=3, patch_size=4),
    _case("GhostNet", "ghostnet.GhostNet", size=64, drop_rate=0.0,
          cfgs=[[[3, 16, 16, 0, 1]], [[3, 48, 24, 0, 2]], [[5, 72, 40, 0.25, 2]]]),
    _case("RepVGG", "byobnet.ByobNet", cfg=lambda home: home.ByoModelCfg(
        blocks=home._rep_vgg_bcfg(d=(1, 1, 1, 1), wf=(0.125, 0.125, 0.125, 0.0625)), stem_type="rep", stem_chs=8)),
    _case("DenseNet", "densenet121", growth_rate=8, block_config=(2, 2)),
    _case("EdgeNeXt", "edgenext.EdgeNeXt", size=64, dims=(16, 24, 32, 40), depths=(1, 1, 1, 1), heads=(2, 2, 4, 4)),
]  # fmt: skip
