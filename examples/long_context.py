"""A small GPT on long pieces of text: each process holds its own positions of every sequence.

python examples/long_context.py --cp 1                              # one process holds all 8,192 positions
torchrun --nproc-per-node 2 examples/long_context.py --cp 2         # each of two holds half of them
torchrun --nproc-per-node 4 examples/long_context.py --cp 2 --tp 2  # and its layers are split over two
"""

import argparse
import resource
from functools import partial

import torch
from torch.utils.data import DataLoader

import tensorshard as ts
from tensorshard.data import ShardedBatchSampler, StdlibText
from tensorshard.models import GPT, next_token_loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cp", type=int, default=2, help="processes that share a sequence")
    parser.add_argument("--tp", type=int, default=1, help="processes that share a layer")
    parser.add_argument("--length", type=int, default=8192, help="positions of a sequence")
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()

    engine = ts.parallelize(
        partial(GPT, vocab_size=256, context_length=arguments.length, num_layers=4, num_heads=4, width=128),
        ts.Plan(cp=arguments.cp, tp=arguments.tp, zero=2),
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        loss_fn=next_token_loss,
    )
    dataset = StdlibText("train", context_length=arguments.length)
    sampler = ShardedBatchSampler(
        len(dataset), engine.mesh.dp_size, dp_rank=engine.mesh.dp_rank, dp_size=engine.mesh.dp_size, seed=0
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    batches = iter(DataLoader(dataset, batch_sampler=sampler))
    for step in range(1, arguments.steps + 1):
        loss = engine.step(*next(batches))  # every process of a cp group passes the whole sequence
        if engine.mesh.rank == 0:
            print(f"step {step}  loss {loss.item():.4f}", flush=True)
    if engine.mesh.rank == 0:
        taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        print(f"training took {taken / 1024:,.0f} MiB of memory on this process")


if __name__ == "__main__":
    main()
