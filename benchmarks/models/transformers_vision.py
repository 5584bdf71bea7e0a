"""Image models of transformers."""

from typing import Any

from benchmarks.models.batches import all_numbers_loss, class_loss, images, number_loss
from benchmarks.models.case import Case, Loss
from benchmarks.models.transformers_ import CLASSIFIES, SIZES, builder

_IMAGES = {"image_size": 32, "patch_size": 8}
_VIT = {**SIZES, **_IMAGES, **CLASSIFIES}
_CONV = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32], **CLASSIFIES}
_DETR_BACKBONE = {
    "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None,
}  # fmt: skip


def _case(
    name: str,
    model: str,
    settings: dict[str, Any],
    loss: Loss = class_loss,
    *,
    size: int = 32,
    config: str | None = None,
    is_sequence: bool = True,
    number: bool = False,
) -> Case:
    batch = images("pixel_values", size=size, targets="number" if number else "classes")
    return Case(name, "transformers", builder(model, settings, config), batch, loss, "images", is_sequence=is_sequence)


CASES = [
    _case("ViT", "ViTForImageClassification", _VIT),
    _case("DeiT", "DeiTForImageClassification", _VIT),
    _case("BEiT", "BeitForImageClassification", {**_VIT, "use_relative_position_bias": True}),
    _case("DINOv2", "Dinov2ForImageClassification", {**_VIT, "mlp_ratio": 2}),
    _case("YOLOS", "YolosForObjectDetection", {**_VIT, "image_size": [32, 32], "num_detection_tokens": 4},
          all_numbers_loss, number=True),
    _case("Swin", "SwinForImageClassification", {
        "image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
        **CLASSIFIES,
    }),
    _case("Swin v2", "Swinv2ForImageClassification", {
        "image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
        **CLASSIFIES,
    }),
    _case("SegFormer", "SegformerForSemanticSegmentation", {
        "num_encoder_blocks": 4, "depths": [1, 1, 1, 1], "sr_ratios": [4, 2, 1, 1], "hidden_sizes": [8, 16, 24, 32],
        "num_attention_heads": [1, 2, 2, 4], "mlp_ratios": [2, 2, 2, 2], "decoder_hidden_size": 16, **CLASSIFIES,
    }, number_loss, size=64, number=True),
    _case("PVT", "PvtForImageClassification", {
        "image_size": 32, "depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32], "num_attention_heads": [1, 2, 2, 4],
        "sequence_reduction_ratios": [4, 2, 1, 1], "mlp_ratios": [2, 2, 2, 2], **CLASSIFIES,
    }),
    _case("ConvNeXt", "ConvNextForImageClassification", _CONV, is_sequence=False),
    _case("ConvNeXt v2", "ConvNextV2ForImageClassification", _CONV, is_sequence=False),
    _case("ResNet", "ResNetForImageClassification", {**_CONV, "embedding_size": 8, "layer_type": "basic"},
          is_sequence=False),
    _case("RegNet", "RegNetForImageClassification", {**_CONV, "embedding_size": 8, "groups_width": 8},
          is_sequence=False),
    _case("PoolFormer", "PoolFormerForImageClassification", {**_CONV, "depths": [1, 1, 1, 1]}, is_sequence=False),
    _case("MobileViT", "MobileViTForImageClassification", {
        "image_size": 64, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32],
        "num_attention_heads": 4, **CLASSIFIES,
    }, size=64),
    _case("MobileNet v2", "MobileNetV2ForImageClassification", {
        "image_size": 32, "depth_multiplier": 0.25, "finegrained_output": False, **CLASSIFIES,
    }, is_sequence=False),
    _case("DETR", "DetrForObjectDetection", {
        "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_queries": 6,
        **_DETR_BACKBONE, "backbone_config": {
            "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1],
            "layer_type": "basic", "out_features": ["stage2"],
        },
    }, all_numbers_loss, number=True),
    _case("ViT-MSN", "ViTMSNForImageClassification", _VIT),
]  # fmt: skip
