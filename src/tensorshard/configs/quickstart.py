"""A byte-level GPT on the sources of Python's standard library: about two minutes on two CPU cores."""

from tensorshard.config import LazyCall, get_config
from tensorshard.data import StdlibText
from tensorshard.models import GPT, next_token_loss

train = get_config("common/train.py").train
optimizer = get_config("common/optim.py").optimizer
scheduler = get_config("common/optim.py").scheduler

model = LazyCall(GPT)(vocab_size=256, context_length=128, num_layers=4, num_heads=4, width=128)
loss = LazyCall(next_token_loss, partial=True)()
data = {
    "train": LazyCall(StdlibText)(split="train", context_length="${model.context_length}"),
    "validation": LazyCall(StdlibText)(split="validation", context_length="${model.context_length}"),
}

train.steps = 500
train.global_batch_size = 16
train.eval_every = 100
train.eval_batches = 32
train.save_every = 250
optimizer.lr = 3e-3
scheduler.warmup_steps = 25

# What the trained model continues at the end of the run.
sample = {"prompt": "def main(", "max_new_tokens": 100, "temperature": 0.8, "seed": 0, "tokenizer": "bytes"}
