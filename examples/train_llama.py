"""A Hugging Face Llama, built from a config, under any plan: the code and the losses are the same.

pip install -c constraints.txt ".[hf]"
torchrun --nproc-per-node 2 examples/train_llama.py
torchrun --nproc-per-node 8 examples/train_llama.py --pp 2 --tp 2 --micro-batches 4 --sequence-parallel
torchrun --nproc-per-node 4 examples/train_llama.py --pp 4 --micro-batches 8 --draw schedule.svg
"""

import argparse
from functools import partial

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import tensorshard as ts
from tensorshard.data import ShardedBatchSampler, StdlibText
from tensorshard.models import next_token_loss

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=344,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    use_cache=False,
)


def loss_fn(output, targets):
    """Next-token loss of a causal language model's output: its sum and the number of targets."""
    return next_token_loss(output.logits, targets)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--zero", type=int, default=3, choices=[0, 1, 2, 3])
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--pp", type=int, default=1, help="pipeline ranks")
    parser.add_argument("--schedule", default="1f1b", help="of the pipeline, such as interleaved_1f1b or zbv")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--draw", metavar="FILE", help="write the pipeline's schedule there, as .svg or .txt")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--recompute", default="none", choices=["none", "selective", "full"])
    arguments = parser.parse_args()

    engine = ts.parallelize(
        partial(LlamaForCausalLM, CONFIG),
        ts.Plan(
            zero=arguments.zero,
            tp=arguments.tp,
            sequence_parallel=arguments.sequence_parallel,
            pp=arguments.pp,
            pp_schedule=arguments.schedule,
            micro_batches=arguments.micro_batches,
            precision=arguments.precision,
            recompute=arguments.recompute,
            clip_grad_norm=1.0,
        ),
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        loss_fn=loss_fn,
    )
    summary = engine.summary().describe()
    if engine.mesh.rank == 0:
        print(f"{engine.plan.describe()}\n\n{engine.mesh.describe()}\n\n{summary}\n")
        if arguments.draw:
            engine.draw_schedule(arguments.draw)
    dataset = StdlibText("train", context_length=128)
    sampler = ShardedBatchSampler(len(dataset), 16, dp_rank=engine.mesh.dp_rank, dp_size=engine.mesh.dp_size, seed=0)
    for step, (tokens, targets) in enumerate(DataLoader(dataset, batch_sampler=sampler), start=1):
        loss = engine.step({"input_ids": tokens}, targets)
        if engine.mesh.rank == 0 and step % 10 == 0:
            print(f"step {step}  loss {loss.item():.4f}")
        if step == arguments.steps:
            break


if __name__ == "__main__":
    main()
