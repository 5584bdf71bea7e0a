"""AdamW and its learning rate: a linear warm-up, then half a cosine."""

from torch.optim import AdamW

from tensorshard.config import LazyCall
from tensorshard.trainer.schedulers import warmup_cosine

optimizer = LazyCall(AdamW, partial=True)(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
scheduler = LazyCall(warmup_cosine, partial=True)(
    warmup_steps=20,
    total_steps="${train.steps}",
    min_ratio=0.1,
)
