"""Cases of other people's packages: models of images."""

from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.models.batches import CLASSES, VOCABULARY, images, number_loss, numbers, several
from benchmarks.models.case import Case
from benchmarks.models.packages import Through, case

_IMAGE = dict(image_size=32, patch_size=8, num_classes=CLASSES)
_SIZES = dict(dim=32, depth=2, heads=4, mlp_dim=64)


def _vit(name: str, module: str, kind: str, *, size: int = 32, **settings: Any) -> Case:
    return case(
        name, f"vit_pytorch.{module}", lambda m: getattr(m, kind)(**settings), images(size=size), is_sequence=True
    )


def _cross_vit(module: Any) -> nn.Module:
    return module.CrossViT(
        image_size=32, num_classes=CLASSES, depth=1, sm_dim=16, sm_patch_size=8, sm_enc_depth=1, sm_enc_heads=2,
        sm_enc_mlp_dim=32, sm_enc_dim_head=8, lg_dim=32, lg_patch_size=16, lg_enc_depth=1, lg_enc_heads=2,
        lg_enc_mlp_dim=64, lg_enc_dim_head=8, cross_attn_depth=1, cross_attn_heads=2, cross_attn_dim_head=8,
    )  # fmt: skip


_STAGES = {
    f"s{stage}_{name}": value
    for stage, width in ((1, 8), (2, 16), (3, 24))
    for name, value in dict(emb_dim=width, heads=1, depth=1, mlp_mult=2).items()
}


def _diffusion(samples: int, generator: torch.Generator) -> Any:
    noised = torch.randn(samples, 3, 16, 16, generator=generator)
    times = torch.randint(0, 1000, (samples,), generator=generator)
    return (noised, times), torch.randn(samples, generator=generator)


def _diffusion_of_sequences(samples: int, generator: torch.Generator) -> Any:
    noised = torch.randn(samples, 4, 32, generator=generator)
    times = torch.randint(0, 1000, (samples,), generator=generator)
    return (noised, times), torch.randn(samples, generator=generator)


def _axial(module: Any) -> nn.Module:
    part = module.AxialImageTransformer(dim=16, depth=2, heads=2, reversible=True, axial_pos_emb_shape=(8, 8))
    return Through(nn.Conv2d(3, 16, 4, 4), part, nn.Linear(16, CLASSES), pool=(2, 3))


def _pooled(part: nn.Module, width: int, inputs: int = 16) -> nn.Module:
    return Through(nn.Conv2d(3, inputs, 4, 4), part, nn.Linear(width, CLASSES), pool=(2, 3))


def _open_clip(module: Any, **text: Any) -> nn.Module:
    return module.CLIP(
        embed_dim=32, output_dict=False,
        vision_cfg=module.CLIPVisionCfg(layers=2, width=32, head_width=8, patch_size=8, image_size=32),
        text_cfg=module.CLIPTextCfg(context_length=12, vocab_size=VOCABULARY, width=32, heads=4, layers=2),
    )  # fmt: skip


def _image_and_text(samples: int, generator: torch.Generator) -> Any:
    image = torch.randn(samples, 3, 32, 32, generator=generator)
    text = torch.randint(1, VOCABULARY, (samples, 12), generator=generator)
    return {"image": image, "text": text}, torch.randn(samples, generator=generator)


def _agreement_loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
    """How far the agreement of every image with its own text is from the target."""
    image, text = output[:2]
    return ((image * text).sum(-1) - targets.to(image.dtype)).square().mean()


def _coca(module: Any) -> nn.Module:
    return module.CoCa(
        dim=32, num_tokens=VOCABULARY, unimodal_depth=1, multimodal_depth=1, image_dim=24, num_img_queries=8,
        dim_head=8, heads=4,
    )  # fmt: skip


def _text_and_image_tokens(samples: int, generator: torch.Generator) -> Any:
    text = torch.randint(1, VOCABULARY, (samples, 12), generator=generator)
    inputs = {"text": text, "image_tokens": torch.randn(samples, 6, 24, generator=generator)}
    return inputs, torch.randn(samples, generator=generator)


_YOLO = {
    "nc": 4,
    "depth_multiple": 1.0,
    "width_multiple": 1.0,
    "backbone": [
        [-1, 1, "Conv", [8, 3, 2]], [-1, 1, "Conv", [16, 3, 2]], [-1, 1, "C2f", [16, True]],
        [-1, 1, "Conv", [24, 3, 2]], [-1, 1, "C2f", [24, True]], [-1, 1, "SPPF", [24, 5]],
    ],
    "head": [
        [-1, 1, "nn.Upsample", ["None", 2, "nearest"]], [[-1, 2], 1, "Concat", [1]], [-1, 1, "C2f", [16]],
        [[8, 5], 1, "Detect", ["nc"]],
    ],
}  # fmt: skip


def _all_maps_loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
    """The sum of :func:`number_loss` over every tensor in the output."""
    tensors = [t for t in torch.utils._pytree.tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
    return torch.stack([number_loss(t, targets) for t in tensors]).sum()


def _yolo(module: Any) -> nn.Module:
    from copy import deepcopy

    return module.DetectionModel(deepcopy(_YOLO), ch=3, nc=4, verbose=False)


def _segmentation(module: Any, kind: str, encoder: str = "tu-test_resnet", **settings: Any) -> nn.Module:
    return getattr(module, kind)(encoder_name=encoder, encoder_weights=None, classes=3, **settings)


def _efficientnet(module: Any) -> nn.Module:
    blocks, settings = module.utils.get_model_params("efficientnet-b0", {"num_classes": CLASSES, "image_size": 64})
    first_blocks = [blocks[index]._replace(num_repeat=1) for index in (0, 1, 2)]
    settings = settings._replace(width_coefficient=0.5, dropout_rate=0.0, drop_connect_rate=0.0)
    return module.EfficientNet(first_blocks, settings)


def _vq(module: Any, kind: str, *arguments: Any, **settings: Any) -> nn.Module:
    return Codes(getattr(module, kind)(*arguments, **settings))


class Codes(nn.Module):
    """An autoencoder of sequences with a codebook, and the codebook's own loss if it has one."""

    def __init__(self, codebook: nn.Module) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        self.codebook = codebook
        self.decoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        quantized, _, *loss = self.codebook(self.encoder(x))
        decoded = self.decoder(quantized)
        return (decoded, loss[0].sum().expand(len(x))) if loss else decoded


def _codes_loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
    """That of the decoder, and the codebook's, which is a mean over the samples."""
    if isinstance(output, torch.Tensor):
        return number_loss(output, targets)
    return number_loss(output[0], targets) + output[1].mean()


_SEQUENCES = numbers(6, 16)

CASES = [
    _vit("ViT", "vit", "ViT", **_IMAGE, **_SIZES),
    _vit("SimpleViT", "simple_vit", "SimpleViT", **_IMAGE, **_SIZES),
    _vit("parallel ViT", "parallel_vit", "ViT", **_IMAGE, **_SIZES),
    _vit("CaiT", "cait", "CaiT", **_IMAGE, **_SIZES, cls_depth=1),
    _vit("DeepViT", "deepvit", "DeepViT", **_IMAGE, **_SIZES),
    _vit("PiT", "pit", "PiT", **_IMAGE, dim=32, depth=(1, 1), heads=2, mlp_dim=64),
    _vit("LeViT", "levit", "LeViT", image_size=64, num_classes=CLASSES, stages=2, dim=(16, 32), depth=1, heads=(2, 2),
         mlp_mult=2, size=64),
    _vit("CvT", "cvt", "CvT", num_classes=CLASSES, **_STAGES, size=64),
    _vit("RvT", "rvt", "RvT", **_IMAGE, **_SIZES),
    _vit("for small data", "vit_for_small_dataset", "ViT", **_IMAGE, **_SIZES),
    _vit("CCT", "cct", "CCT", img_size=32, embedding_dim=32, n_conv_layers=1, kernel_size=7, stride=2, padding=3,
         pooling_kernel_size=3, pooling_stride=2, pooling_padding=1, num_layers=2, num_heads=4, mlp_ratio=2.0,
         num_classes=CLASSES, dropout_rate=0.0, attention_dropout=0.0, stochastic_depth_rate=0.0),
    _vit("XCiT", "xcit", "XCiT", **_IMAGE, **_SIZES, cls_depth=1),
    _vit("SimpleViT, hyper connections", "simple_vit_with_hyper_connections", "SimpleViT", **_IMAGE, **_SIZES,
         num_residual_streams=2),
    _vit("SimpleViT, registers", "simple_vit_with_register_tokens", "SimpleViT", **_IMAGE, **_SIZES),
    _vit("normalized ViT", "normalized_vit", "nViT", image_size=32, patch_size=8, num_classes=CLASSES, dim=32, depth=2,
         heads=4, mlp_dim=64),
    _vit("MobileViT", "mobile_vit", "MobileViT", image_size=(64, 64), dims=[16, 16, 16],
         channels=[8, 8, 16, 16, 16, 16, 16, 16, 24, 24, 32], num_classes=CLASSES, size=64),
    _vit("NesT", "nest", "NesT", image_size=32, patch_size=4, dim=16, heads=2, num_hierarchies=2, block_repeats=(1, 1),
         num_classes=CLASSES),
    case("CrossViT", "vit_pytorch.cross_vit", _cross_vit, images(), is_sequence=True),
    case("Perceiver", "perceiver_pytorch", lambda m: m.Perceiver(
        num_freq_bands=3, depth=2, max_freq=8.0, num_latents=8, latent_dim=32, latent_heads=2, latent_dim_head=16,
        cross_dim_head=16, num_classes=CLASSES), numbers(8, 8, 3, targets="classes"), is_sequence=True),
    case("Perceiver IO", "perceiver_pytorch", lambda m: m.PerceiverIO(
        depth=2, dim=16, queries_dim=16, logits_dim=8, num_latents=8, latent_dim=32, latent_heads=2, latent_dim_head=16,
        cross_dim_head=16), several({"data": (12, 16), "queries": (6, 16)}), number_loss, is_sequence=True),
    case("U-Net", "denoising_diffusion_pytorch", lambda m: m.Unet(
        8, dim_mults=(1, 2), attn_heads=2, attn_dim_head=8), _diffusion, number_loss),
    case("U-Net of sequences", "denoising_diffusion_pytorch", lambda m: m.Unet1D(
        8, dim_mults=(1, 2), channels=4, attn_heads=2, attn_dim_head=8), _diffusion_of_sequences, number_loss),
    case("Karras' U-Net", "denoising_diffusion_pytorch.karras_unet", lambda m: m.KarrasUnet(
        image_size=16, dim=16, dim_max=32, channels=3, num_downsamples=1, num_blocks_per_stage=1, attn_res=(8,),
        attn_dim_head=8, dropout=0.0), _diffusion, number_loss),
    case("X-UNet", "x_unet", lambda m: m.XUnet(
        8, dim_mults=(1, 2), num_blocks_per_stage=(1, 1), num_self_attn_per_stage=(0, 1), nested_unet_depths=(1, 0),
        nested_unet_dim=8, attn_heads=2, attn_dim_head=8), images(size=16, targets="number"), number_loss),
    case("axial, reversible", "axial_attention", _axial, images()),
    case("Mixer", "mlp_mixer_pytorch", lambda m: m.MLPMixer(channels=3, dim=32, depth=2, **_IMAGE), images(),
         is_sequence=True),
    case("gMLP of images", "g_mlp_pytorch", lambda m: m.gMLPVision(dim=32, depth=2, **_IMAGE), images(),
        is_sequence=True),
    case("bottleneck attention", "bottleneck_transformer_pytorch", lambda m: _pooled(m.BottleStack(
        dim=16, fmap_size=8, dim_out=32, num_layers=2, heads=2, dim_head=8, proj_factor=2, downsample=False), 32),
        images()),
    case("halo attention", "halonet_pytorch", lambda m: _pooled(m.HaloAttention(
        dim=16, block_size=4, halo_size=2, dim_head=8, heads=2), 16), images()),
    case("lambda layer", "lambda_networks", lambda m: _pooled(m.LambdaLayer(
        dim=16, dim_out=16, r=5, dim_k=8, heads=2, dim_u=1), 16), images()),
    case("CLIP", "open_clip", _open_clip, _image_and_text, _agreement_loss, package="open_clip_torch",
        is_sequence=True),
    case("CoCa", "coca_pytorch.coca_pytorch", _coca, _text_and_image_tokens, number_loss, package="CoCa-pytorch",
         is_sequence=True),
    case("YOLO", "ultralytics.nn.tasks", _yolo, images(size=64, targets="number"), _all_maps_loss),
    case("U-Net", "segmentation_models_pytorch", partial(
        _segmentation, kind="Unet", decoder_channels=(32, 24, 16, 8, 8)), images(size=64, targets="number"),
            number_loss),
    case("FPN", "segmentation_models_pytorch", partial(
        _segmentation, kind="FPN", decoder_pyramid_channels=32, decoder_segmentation_channels=32, decoder_dropout=0.0),
        images(size=64, targets="number"), number_loss),
    case("MA-Net", "segmentation_models_pytorch", partial(
        _segmentation, kind="MAnet", decoder_channels=(32, 24, 16, 8, 8), decoder_pab_channels=8),
        images(size=64, targets="number"), number_loss),
    case("EfficientNet", "efficientnet_pytorch", _efficientnet, images(size=64)),
    case("ResNet", "pytorchcv.models.resnet_cifar", lambda m: m.CIFARResNet(
        [[8, 8], [16, 16], [24, 24]], init_block_channels=8, bottleneck=False, num_classes=CLASSES), images()),
    case("DenseNet", "pytorchcv.models.densenet_cifar", lambda m: m.CIFARDenseNet(
        [[12, 16], [20, 24]], init_block_channels=8, bottleneck=True, num_classes=CLASSES), images()),
    case("ViT", "kornia.models.vit", lambda m: Through(m.VisionTransformer(
        image_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4), nn.Identity(), nn.Linear(32, CLASSES),
        pool=(1,)),
        images(), is_sequence=True),
    case("HardNet", "kornia.feature", lambda m: Through(m.HardNet(pretrained=False), nn.Identity(),
         nn.Linear(128, CLASSES)), images(channels=1)),
    case("finite scalar codes", "vector_quantize_pytorch", partial(_vq, kind="FSQ", levels=[4] * 8),
         _SEQUENCES, _codes_loss),
    case("lookup-free codes", "vector_quantize_pytorch", partial(
        _vq, kind="LFQ", dim=8, codebook_size=256, entropy_loss_weight=0.0), _SEQUENCES, _codes_loss),
    case("learned codebook", "vector_quantize_pytorch", partial(
        _vq, kind="VectorQuantize", dim=8, codebook_size=16, learnable_codebook=True, ema_update=False),
        _SEQUENCES, _codes_loss),
    case("SimVQ", "vector_quantize_pytorch", partial(_vq, kind="SimVQ", dim=8, codebook_size=16), _SEQUENCES,
        _codes_loss),
    case("averaged codebook", "vector_quantize_pytorch", partial(
        _vq, kind="VectorQuantize", dim=8, codebook_size=16, threshold_ema_dead_code=0), _SEQUENCES, _codes_loss),
]  # fmt: skip
