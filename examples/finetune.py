"""Fine-tune a Hugging Face model from a local directory under any plan, evaluate it, save it, and open it again.

python examples/finetune.py causal
torchrun --nproc-per-node 2 examples/finetune.py classifier --zero 3
torchrun --nproc-per-node 4 examples/finetune.py causal --model path/to/llama --tp 2 --pp 2

Without --model, a small untrained model is written first, so that the script runs anywhere. It reads bytes. A causal
model learns Python's standard library, measured by its perplexity. A classifier learns whether a line begins with a
vowel, measured by its accuracy.
"""

import argparse
import math
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

import tensorshard as ts
from tensorshard.data import StdlibText

LENGTH = 32


def write_model(task: str, directory: Path) -> None:
    """A small model with random weights, as its own ``save_pretrained`` writes it."""
    from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "max_position_embeddings": 128}
    if task == "causal":
        LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(directory)
    else:
        BertForSequenceClassification(BertConfig(**sizes, **heads, num_labels=2)).save_pretrained(directory)


def causal_loss(output: Any, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def class_loss(output: Any, classes: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.logits, classes)


class Batches:
    """Batches of this data rank. The samples are the same under any plan."""

    def __init__(self, task: str, mesh: ts.Mesh, size: int, seed: int) -> None:
        self.task, self.mesh, self.size, self.seed = task, mesh, size, seed
        self.text = StdlibText("train", LENGTH - 1)

    def __getitem__(self, step: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 100_003 + step)
        if self.task == "causal":
            indices = torch.randint(len(self.text), (self.size,), generator=generator).tolist()
            windows = [self.text[index] for index in indices]  # bytes, and the bytes that follow them
            tokens = torch.stack([torch.cat([inputs[:1], targets]) for inputs, targets in windows])
            targets = tokens
        else:
            tokens = torch.randint(ord("a"), ord("z") + 1, (self.size, LENGTH), generator=generator)
            targets = torch.isin(tokens[:, 0], torch.tensor(list(b"aeiou"))).long()
        mine = slice(self.mesh.dp_rank, None, self.mesh.dp_size)
        return {"input_ids": tokens[mine]}, targets[mine]


def evaluate(engine: ts.Engine, task: str, batches: Batches, steps: int) -> str:
    """Perplexity, or accuracy over all data ranks."""
    if task == "causal":
        loss = sum(engine.evaluate(*batches[step]).item() for step in range(steps)) / steps
        return f"perplexity {math.exp(loss):.2f}"
    right = torch.zeros(2, dtype=torch.float64)
    for step in range(steps):
        inputs, classes = batches[step]
        found = engine.predict(inputs)["logits"].argmax(-1).cpu()
        right += torch.tensor([(found == classes).sum(), len(classes)], dtype=torch.float64)
    dist.all_reduce(right, group=engine.mesh.dp_group)
    return f"accuracy {right[0] / right[1]:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=("causal", "classifier"))
    parser.add_argument("--model", type=Path, help="a directory of Hugging Face's; without, a small one is written")
    parser.add_argument("--output", type=Path, default=Path("finetuned"), help="where the result goes")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier result")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=16, help="samples in a step, over all data ranks")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--zero", type=int, default=3)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    args = parser.parse_args()
    if args.output.exists() and not args.overwrite:
        parser.error(f"{args.output} is there already; give another --output, or --overwrite")

    plan = ts.Plan(zero=args.zero, tp=args.tp, pp=args.pp, micro_batches=2 * args.pp if args.pp > 1 else 1)
    directory = args.model or args.output.with_name(f"{args.output.name}-start")
    joined_before = dist.is_initialized()
    if not joined_before and "RANK" in os.environ:  # under torchrun; otherwise parallelize makes a world of one
        dist.init_process_group()
    rank = dist.get_rank() if dist.is_initialized() else 0
    if args.model is None:
        if rank == 0:
            write_model(args.task, directory)
        if dist.is_initialized():
            dist.barrier()

    make = partial(
        ts.parallelize,
        plan=plan,
        optimizer=partial(torch.optim.AdamW, lr=args.lr),
        loss_fn=causal_loss if args.task == "causal" else class_loss,
    )
    engine = make(ts.from_pretrained(directory))
    training = Batches(args.task, engine.mesh, args.batch_size, seed=0)
    validation = Batches(args.task, engine.mesh, args.batch_size, seed=1)
    if rank == 0:
        print(f"{directory} under {plan.resolve(dist.get_world_size()).describe()}", flush=True)
    for step in range(args.steps):
        loss = engine.step(*training[step]).item()
        if rank == 0 and (step % 20 == 0 or step == args.steps - 1):
            print(f"step {step + 1}/{args.steps}  loss {loss:.4f}", flush=True)
    measured = evaluate(engine, args.task, validation, 8)
    engine.save_pretrained(args.output, overwrite=args.overwrite)

    again = make(ts.from_pretrained(args.output))
    reread = evaluate(again, args.task, validation, 8)
    if rank == 0:
        print(f"trained: {measured}; read again from {args.output}: {reread}")
    if args.task == "causal":
        prompt = torch.tensor([list(b"def main(")])
        tokens = again.generate(prompt, max_new_tokens=24)
        if rank == 0:
            print(repr(bytes(tokens[0].tolist()).decode(errors="replace")))
    if not joined_before:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
