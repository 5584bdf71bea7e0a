"""A small GPT on the bytes of Python's own sources, trained by a script of one's own, in the manner of nanoGPT.

torchrun --nproc-per-node 2 train_sharded.py tp=2 max_iters=200 dtype=bfloat16
"""

import math
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import tensorshard as ts

zero, tp = 3, 1
out = ""  # where to write the weights; nowhere if empty
eval_interval, eval_iters, log_interval = 20, 4, 5
batch_size, gradient_accumulation_steps, block_size = 16, 2, 64  # batch_size: of one micro-batch
n_layer, n_head, n_embd = 4, 4, 64
learning_rate, min_lr, warmup_iters, max_iters = 1e-3, 1e-4, 10, 200
weight_decay, beta1, beta2, grad_clip = 0.1, 0.9, 0.95, 1.0
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = "float32"  # or "bfloat16"
for argument in sys.argv[1:]:  # key=value
    key, value = argument.split("=")
    globals()[key] = type(globals()[key])(value)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (t.view(B, T, n_head, C // n_head).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(n_embd), Attention()
        self.ln_2, self.c_fc = nn.LayerNorm(n_embd), nn.Linear(n_embd, 4 * n_embd)
        self.c_proj = nn.Linear(4 * n_embd, n_embd)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList(Block() for _ in range(n_layer))
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, 256, bias=False)
        self.wte.weight = self.lm_head.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                std = 0.02 / math.sqrt(2 * n_layer) if name.endswith("c_proj.weight") else 0.02
                nn.init.normal_(parameter, std=std)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


sources = sorted(Path(os.__file__).parent.glob("*.py"))
text = torch.tensor(list(b"".join(file.read_bytes() for file in sources[:40])))
splits = {"train": text[: -len(text) // 10], "val": text[-len(text) // 10 :]}


def get_batch(split: str) -> tuple[torch.Tensor, torch.Tensor]:
    data = splits[split]
    ix = torch.randint(len(data) - block_size, (batch_size,))
    ix = ix.chunk(engine.mesh.dp_size)[engine.mesh.dp_rank] if model.training else ix
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x.to(device), y.to(device)


def configure_optimizer(parameters) -> torch.optim.Optimizer:
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(beta1, beta2))


def get_lr(it: int) -> float:
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / max(1, max_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


@torch.no_grad()
def estimate_loss() -> dict[str, float]:
    model.eval()
    found = {split: sum(model(*get_batch(split))[1].item() for _ in range(eval_iters)) / eval_iters for split in splits}
    model.train()
    return found


torch.manual_seed(1337)
model = GPT().to(device)
precision = "bf16" if dtype == "bfloat16" else "fp32"
plan = ts.Plan(zero=zero, tp=tp, precision=precision, micro_batches=gradient_accumulation_steps)
engine = ts.parallelize(model, plan, optimizer=configure_optimizer, loss_fn=lambda output, _: output[1])
model, optimizer, master = engine.model, engine.optimizer, engine.mesh.rank == 0

for it in range(max_iters + 1):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(it)
    if it % eval_interval == 0:
        losses = estimate_loss()
        if master:
            print(f"step {it}: train loss {losses['train']:.6f}, val loss {losses['val']:.6f}")
    if it == max_iters:
        break
    for _ in range(gradient_accumulation_steps):
        logits, loss = model(*get_batch("train"))
        loss = engine.backward(loss)
    norm = engine.clip_grad_norm_(grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if it % log_interval == 0 and master:
        print(f"iter {it}: loss {loss.item():.6f}, norm {norm:.4f}")

state = engine.full_state_dict()
if out and master:
    torch.save(state, out)
