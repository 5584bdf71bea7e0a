"""A small vision Transformer."""

import torch
from torch import Tensor, nn

from tensorshard.models.layers import PreNormBlock, check_dropout, check_sizes


class ViT(nn.Module):
    """Image classifier over patches (Dosovitskiy et al., "An Image is Worth 16x16 Words", 2021).

    Args:
        image_size: height and width of the square images, in pixels.
        patch_size: height and width of a patch, in pixels; divides ``image_size``.
        num_classes: number of classes.
        num_layers: number of blocks.
        num_heads: attention heads of a block; divides ``width``.
        width: features of a patch between blocks.
        channels: of the images.
        dropout: probability, on the embeddings, attention weights and each branch.

    Raises:
        ValueError: a size below 1, a width that the heads do not divide, an image that the patches do not
            divide, a dropout outside [0, 1).
    """

    def __init__(
        self,
        image_size: int,
        patch_size: int,
        num_classes: int,
        num_layers: int,
        num_heads: int,
        width: int,
        *,
        channels: int = 3,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_sizes(
            image_size=image_size,
            patch_size=patch_size,
            num_classes=num_classes,
            num_layers=num_layers,
            num_heads=num_heads,
            width=width,
            channels=channels,
        )
        check_dropout(dropout)
        if image_size % patch_size:
            raise ValueError(f"image_size {image_size} does not divide into patches of patch_size {patch_size}.")
        num_patches = (image_size // patch_size) ** 2
        self.image_shape = (channels, image_size, image_size)
        self.patches = nn.Conv2d(channels, width, kernel_size=patch_size, stride=patch_size)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, 1 + num_patches, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(PreNormBlock(width, num_heads, dropout=dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

        nn.init.normal_(self.positions, std=0.02)
        self.apply(_init_weights)

    def forward(self, images: Tensor) -> Tensor:
        """Images ``[batch, channels, image_size, image_size]`` to logits ``[batch, num_classes]``."""
        if images.dim() != 4 or images.shape[1:] != self.image_shape:
            expected = ", ".join(map(str, self.image_shape))
            raise ValueError(f"images have the shape {list(images.shape)}; expected [batch, {expected}].")
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1)
        x = self.dropout(x + self.positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def _init_weights(module: nn.Module) -> None:
    """Normal weights of standard deviation 0.02, no initial bias."""
    if isinstance(module, nn.Linear | nn.Conv2d):
        nn.init.normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
