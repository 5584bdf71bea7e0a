"""A small byte-level BERT (Devlin et al. 2019) that fills in masked bytes of Python's standard library."""

from tensorshard.config import LazyCall, get_config
from tensorshard.data import MaskedTokens, StdlibText
from tensorshard.models import Bert, masked_token_loss
from tensorshard.trainer.schedulers import warmup_linear

train = get_config("common/train.py").train
optimizer = get_config("common/optim.py").optimizer
scheduler = LazyCall(warmup_linear, partial=True)(warmup_steps=50, total_steps="${train.steps}")

# The 256 bytes, and one more token to show in place of a masked one.
model = LazyCall(Bert)(vocab_size=257, context_length=128, num_layers=4, num_heads=4, width=192, dropout=0.0)
loss = LazyCall(masked_token_loss, partial=True)()


def _masked(split, copies):
    return LazyCall(MaskedTokens)(
        LazyCall(StdlibText)(split=split, context_length="${model.context_length}"),
        vocab_size="${model.vocab_size}",
        mask_token=256,
        copies=copies,
    )


data = {"train": _masked("train", copies=10), "validation": _masked("validation", copies=1)}

train.steps = 1000
train.eval_batches = 16
