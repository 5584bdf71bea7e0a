"""A classifier of text from a directory as Hugging Face writes it: a new head on what was pretrained.

Nothing is downloaded; the directory has ``config.json``, ``model.safetensors`` and ``tokenizer.json``. The CSV file has
columns ``text`` and ``label``; without one, the model tells packages of Python's standard library apart::

    tensorshard train classifier model.pretrained=path/to/bert text.file=reviews.csv text.num_labels=2
"""

from torchmetrics.classification import MulticlassAccuracy
from transformers import AutoConfig, AutoModelForSequenceClassification

from tensorshard.config import LazyCall, get_config
from tensorshard.data import LabelledText
from tensorshard.models import classification_loss

train = get_config("common/train.py").train
optimizer = get_config("common/optim.py").optimizer
scheduler = get_config("common/optim.py").scheduler

# Pad: the token that fills up short texts.
text = {"file": None, "num_labels": 4, "tokenizer": "${model.pretrained}", "length": 128, "pad": 0}

model = LazyCall(AutoModelForSequenceClassification.from_config)(
    config=LazyCall(AutoConfig.from_pretrained)(
        pretrained_model_name_or_path="${model.pretrained}",
        num_labels="${text.num_labels}",
        pad_token_id="${text.pad}",
        local_files_only=True,
    )
)
model.pretrained = "???"
loss = LazyCall(classification_loss, partial=True)()


def _text(split):
    return LazyCall(LabelledText)(
        split=split,
        length="${text.length}",
        tokenizer="${text.tokenizer}",
        num_labels="${text.num_labels}",
        file="${text.file}",
        pad="${text.pad}",
    )


data = {"train": _text("train"), "validation": _text("validation")}
metrics = {"val_accuracy": LazyCall(MulticlassAccuracy)(num_classes="${text.num_labels}", average="micro")}

train.steps = 100
train.global_batch_size = 16
train.eval_every = 50
train.save_every = 0
optimizer.lr = 5e-5
scheduler.warmup_steps = 10
