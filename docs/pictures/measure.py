"""Measures what memory.svg shows: ``torchrun --nproc-per-node 2 docs/pictures/measure.py`` writes memory.json anew.

One step of a small GPT under several plans, as the ledger of rank 0 saw it. Offload is to disk, since the
device of a CPU rank is host memory.
"""

import json
import os
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import tensorshard as ts
from tensorshard.models import GPT, next_token_loss
from tensorshard.predict.rank_estimate import CATEGORIES

PLANS = {
    "ZeRO 0": dict(zero=0),
    "ZeRO 2": dict(zero=2),
    "ZeRO 3": dict(zero=3),
    "and recompute": dict(zero=3, recompute="full"),
    "and offload": dict(zero=3, recompute="full", offload="disk"),
}
MOMENTS = 90  # that are drawn


def main() -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    tokens = torch.randint(256, (4, 128), generator=generator)
    measured = {}
    for name, fields in PLANS.items():
        engine = ts.parallelize(
            partial(GPT, vocab_size=256, context_length=128, num_layers=4, num_heads=4, width=256),
            ts.Plan(**fields),
            optimizer=partial(torch.optim.AdamW, lr=1e-3),
            loss_fn=next_token_loss,
        )
        engine.step(tokens, tokens)
        with ts.profile_memory(engine) as profile:
            engine.step(tokens, tokens)
        history = profile.rank.history
        every = max(1, len(history) // MOMENTS)
        fullest = [max(history[i : i + every], key=lambda m: m.total) for i in range(0, len(history), every)]
        measured[name] = {"peak": profile.rank.peak_allocated, "held": [moment.held for moment in fullest]}
        del engine
    if dist.get_rank() == 0:
        content = {"categories": CATEGORIES, "plans": measured}
        Path(__file__).with_name("memory.json").write_text(json.dumps(content) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
