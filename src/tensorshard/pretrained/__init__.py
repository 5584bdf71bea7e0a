"""Models in and out: weights that exist already, each rank reading its own; and files that others read."""

from tensorshard.pretrained.pretrained_model import PretrainedModel, from_pretrained

__all__ = ["PretrainedModel", "from_pretrained"]
