"""The ten lines of the README as a whole script: a small GPT, with its states sharded over any number of processes.

python examples/train_gpt.py                                  # one process
torchrun --nproc-per-node 2 examples/train_gpt.py             # two, ZeRO 3
torchrun --nproc-per-node 4 examples/train_gpt.py --zero 2 --dp-replicate 2
"""

import argparse
from functools import partial

import torch
from torch.utils.data import DataLoader

import tensorshard as ts
from tensorshard.data import ShardedBatchSampler, StdlibText
from tensorshard.models import GPT, next_token_loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zero", type=int, default=3, help="ZeRO level, 0 to 3")
    parser.add_argument("--dp-replicate", type=int, default=1, help="replicas of the sharded model")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences in a step, over all processes")
    arguments = parser.parse_args()

    plan = ts.Plan(zero=arguments.zero, dp_replicate=arguments.dp_replicate, clip_grad_norm=1.0)
    engine = ts.parallelize(
        partial(GPT, vocab_size=256, context_length=128, num_layers=4, num_heads=4, width=128),
        plan,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        loss_fn=next_token_loss,
    )
    dataset = StdlibText("train", context_length=128)
    sampler = ShardedBatchSampler(
        len(dataset), arguments.batch_size, dp_rank=engine.mesh.dp_rank, dp_size=engine.mesh.dp_size, seed=0
    )
    if engine.mesh.rank == 0:
        print(engine.mesh.describe(), engine.summary().describe(), sep="\n")
    batches = iter(DataLoader(dataset, batch_sampler=sampler))
    for step in range(1, arguments.steps + 1):
        loss = engine.step(*next(batches))
        if engine.mesh.rank == 0 and step % 10 == 0:
            print(f"step {step}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
