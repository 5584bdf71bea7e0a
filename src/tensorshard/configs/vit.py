"""A small ViT that tells apart directions of stripes in generated images; reports the accuracy too."""

from tensorshard.config import get_config

train = get_config("common/train.py").train
optimizer = get_config("common/optim.py").optimizer
scheduler = get_config("common/optim.py").scheduler
