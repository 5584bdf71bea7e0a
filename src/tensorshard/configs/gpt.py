"""GPT-2 small (124M parameters, Radford et al. 2019) on your own tokens.

Write them with ``tensorshard.data.write_token_file`` and name the files::

    tensorshard train gpt data.train.source=train.npy data.validation.source=validation.npy
"""

from tensorshard.config import LazyCall, get_config
from tensorshard.data import TokenDataset
from tensorshard.models import GPT, next_token_loss

train = get_config("common/train.py").train
optimizer = get_config("common/optim.py").optimizer
scheduler = get_config("common/optim.py").scheduler

model = LazyCall(GPT)(
    vocab_size=50257, context_length=1024, num_layers=12, num_heads=12, width=768, tie_embeddings=True
)
loss = LazyCall(next_token_loss, partial=True)()
data = {
    "train": LazyCall(TokenDataset)(source="???", context_length="${model.context_length}"),
    "validation": LazyCall(TokenDataset)(source="???", context_length="${model.context_length}"),
}

train.plan.precision = "bf16"
train.plan.micro_batches = 4
train.steps = 10_000
train.global_batch_size = 128
train.eval_every = 500
train.eval_batches = 20
train.save_every = 1000
optimizer.lr = 6e-4
scheduler.warmup_steps = 500
