from functools import partial

import torch

import tensorshard as ts
from tensorshard.data import StdlibText
from tensorshard.models import GPT, next_token_loss

plan = ts.Plan(zero=3, recompute="full", clip_grad_norm=1.0)
model = partial(GPT, vocab_size=256, context_length=128, num_layers=4, num_heads=4, width=128)
engine = ts.parallelize(model, plan, optimizer=partial(torch.optim.AdamW, lr=1e-3), loss_fn=next_token_loss)

for inputs, targets in engine.loader(StdlibText("train", 128), batch_size=16):
    loss = engine.step(inputs, targets)
    if engine.mesh.rank == 0 and engine.step_count % 10 == 0:
        print(f"step {engine.step_count}: loss {loss:.4f}")
    if engine.step_count == 100:
        break
engine.save("checkpoints/last", overwrite=True)  # any other plan can go on from here
