"""Reads existing weights, each rank its own part, and writes files that other programs read."""

from tensorshard.weights.files.pretrained_model import PretrainedModel, from_pretrained

__all__ = ["PretrainedModel", "from_pretrained"]
