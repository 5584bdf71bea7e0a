"""Small reference models in plain PyTorch, and their losses."""

from tensorshard.models.adapters import with_lora
from tensorshard.models.bert import Bert
from tensorshard.models.gpt import GPT
from tensorshard.models.layers import classification_loss, image_classification_loss, masked_token_loss, next_token_loss
from tensorshard.models.vit import ViT

__all__ = [
    "GPT",
    "Bert",
    "ViT",
    "classification_loss",
    "image_classification_loss",
    "masked_token_loss",
    "next_token_loss",
    "with_lora",
]
