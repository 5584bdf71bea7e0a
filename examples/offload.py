"""Trains a GPT with masters, optimizer states and gradients on disk, and prints how many bytes were moved.

    python examples/offload.py --path /scratch                                      # GPT-2 small
    torchrun --nproc-per-node 2 examples/offload.py --path /scratch --size xl       # GPT-2 XL, 1.5 billion parameters
    systemd-run --scope -p MemoryMax=8G python examples/offload.py --path /scratch --size xl   # within 8 GB

The weights after each step are the same, to the last bit, as with --tier device, which keeps all in memory. With
--activations disk, what blocks keep for backward goes to disk, too.
"""

import argparse
import time
from functools import partial
from pathlib import Path

import torch

import tensorshard as ts
from tensorshard.models import GPT, next_token_loss

SIZES = {"small": (12, 768, 12), "medium": (24, 1024, 16), "large": (36, 1280, 20), "xl": (48, 1600, 25)}
"""Blocks, width and heads of GPT-2's models."""


def main() -> None:
    arguments = parse_arguments()
    tier = None if arguments.tier == "device" else arguments.tier
    offload = None
    if tier or arguments.activations:
        offload = ts.Offload(
            optimizer=tier,
            gradients=tier,
            activations=arguments.activations,
            path=arguments.path,
            host_memory=arguments.host_memory,
            buffer_memory=arguments.buffers,
        )
    plan = ts.Plan(zero=2, precision="bf16", recompute="full", clip_grad_norm=1.0, offload=offload)
    sizes = SIZES[arguments.size]
    blocks, width, heads = (
        given or size for given, size in zip((arguments.blocks, arguments.width, arguments.heads), sizes, strict=True)
    )
    model = partial(GPT, arguments.vocabulary, arguments.tokens, blocks, heads, width, tie_embeddings=True)
    optimizer = partial(torch.optim.AdamW, lr=1e-4, weight_decay=0.1)
    engine = ts.parallelize(model, plan, optimizer=optimizer, loss_fn=next_token_loss)
    updated = engine.summary().updated_parameters
    if engine.mesh.rank == 0:
        print(engine.summary().describe())
    generator = torch.Generator().manual_seed(engine.mesh.dp_rank)
    for step in range(arguments.steps):
        tokens = torch.randint(arguments.vocabulary, (1, arguments.tokens + 1), generator=generator)
        began, before = time.perf_counter(), disk_bytes()
        loss = engine.step(tokens[:, :-1], tokens[:, 1:])
        seconds = time.perf_counter() - began
        read, written = ((now - then) / updated for now, then in zip(disk_bytes(), before, strict=True))
        if engine.mesh.rank == 0:
            print(
                f"step {step}: loss {loss.item():.6f}, {seconds:.1f} s, {read:.1f} bytes read and {written:.1f} "
                f"written for each parameter that this rank updates",
                flush=True,
            )
    print(f"rank {engine.mesh.rank}: at most {peak_bytes() / 1e9:.2f} GB of memory", flush=True)


def disk_bytes() -> tuple[int, int]:
    """Bytes that this process has read from and written to disks so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    counts = dict(line.split(": ") for line in lines)
    return int(counts["read_bytes"]), int(counts["write_bytes"])


def peak_bytes() -> int:
    """The most memory that this process held, without the page cache of its files, which the system can take back."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tier", choices=["device", "cpu", "disk"], default="disk")
    parser.add_argument("--activations", choices=["cpu", "disk"], help="where what blocks keep for backward goes")
    parser.add_argument("--path", help="the folder of the scratch files, on a local disk")
    parser.add_argument("--host-memory", help="of all ranks, such as 6GiB: with --tier cpu, the rest goes to disk")
    parser.add_argument("--buffers", default="128MiB", help="memory between the tiers, for each rank")
    parser.add_argument("--size", choices=list(SIZES), default="small", help="of GPT-2's models")
    parser.add_argument("--blocks", type=int, help="in place of that model's; so are --width and --heads")
    parser.add_argument("--width", type=int)
    parser.add_argument("--heads", type=int)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--steps", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
