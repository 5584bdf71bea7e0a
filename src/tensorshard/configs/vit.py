"""A small ViT (Dosovitskiy et al. 2021) that tells directions of stripes apart, in images made on the fly."""

from torchmetrics.classification import MulticlassAccuracy

from tensorshard.config import LazyCall, get_config
from tensorshard.data import GeneratedImages
from tensorshard.models import ViT, image_classification_loss

train = get_config("common/train.py").train
optimizer = get_config("common/optim.py").optimizer
scheduler = get_config("common/optim.py").scheduler

model = LazyCall(ViT)(image_size=32, patch_size=4, num_classes=10, num_layers=4, num_heads=4, width=128)
loss = LazyCall(image_classification_loss, partial=True)()
data = {
    "train": LazyCall(GeneratedImages)(
        num_samples=50_000,
        image_size="${model.image_size}",
        num_classes="${model.num_classes}",
    ),
    "validation": LazyCall(GeneratedImages)(
        num_samples=1_000,
        image_size="${model.image_size}",
        num_classes="${model.num_classes}",
        seed=1,
    ),
}
metrics = {
    "val_accuracy": LazyCall(MulticlassAccuracy)(num_classes="${model.num_classes}", average="micro"),
}

train.steps = 500
train.global_batch_size = 64
