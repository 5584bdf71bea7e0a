"""Language models with real vocabularies, whose logits are as large as all else: held, or taken a tile at a time."""

import argparse
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from rich.console import Console

from benchmarks.harness.contender import Contender
from benchmarks.harness.report import make_console, print_group, write_results
from benchmarks.harness.results import Group
from benchmarks.harness.training_group import QUANTITIES, Steps, measure_training_group
from benchmarks.registry import Suite, positive_int
from benchmarks.workload import GPT2_SMALL, Workload

WORKLOADS = {
    workload.name: workload
    for workload in (
        GPT2_SMALL,
        Workload("Llama, 32k", 2, 8, 512, 32_000, context_length=512, batch_size=4, family="llama"),
        Workload("Llama, 128k", 2, 8, 512, 128_256, context_length=512, batch_size=2, family="llama"),
    )
}
_QUICK = Workload("small Llama", 2, 2, 32, 9_000, context_length=64, batch_size=4, family="llama")


@dataclass(frozen=True)
class Layout:
    """Where a model is trained, and how.

    Args:
        ranks: processes. level: of ZeRO.
        recognised: whether the loss is one that takes tiles.
    """

    ranks: int
    level: int
    recognised: bool = True

    def __str__(self) -> str:
        words = ["one process" if self.ranks == 1 else f"{self.ranks} ranks, ZeRO {self.level}"]
        words += [] if self.recognised else ["a loss that needs whole logits"]
        return ", ".join(words)


LAYOUTS = (Layout(1, 0), Layout(2, 0), Layout(2, 3), Layout(1, 0, recognised=False))


def contenders(layout: Layout) -> list[Contender]:
    """The peers, then tensorshard with and without tiles."""
    ddp, fsdp2 = "torch.nn.parallel.distributed", "torch.distributed.fsdp"
    ours: list[tuple[str, dict[str, Any]]] = [
        ("whole logits", {"logits": "whole"}),
        ("logits in tiles", {"logits": "tiled"}),
    ]
    if not layout.recognised:
        peers = [Contender("plain PyTorch", "logits_plain", "torch", {"loss": "softmax"})]
        ours = [
            ("whole logits", {"logits": "whole", "loss": "softmax"}),
            ("whatever the loss takes", {"logits": "auto", "loss": "softmax"}),
        ]
    elif layout.ranks == 1:
        peers = [
            Contender("plain PyTorch", "logits_plain", "torch"),
            Contender("cut cross entropy, torch_compile", "logits_plain", "cut_cross_entropy", {"loss": "cut"}),
            Contender("torch F.linear_cross_entropy, chunked", "logits_plain", "torch", {"loss": "chunked"}),
        ]
    elif layout.level == 0:
        peers = [
            Contender("DDP", "ddp", ddp),
            Contender("DDP, bucket views", "ddp", ddp, {"gradient_as_bucket_view": True}),
        ]
    else:
        peers = [
            Contender("FSDP2", "fsdp2", fsdp2),
            Contender("Accelerate FSDP2", "accelerate_fsdp2", "accelerate"),
            Contender("FSDP2, selective checkpointing", "fsdp2", fsdp2, {"recompute": "selective"}),
        ]
        ours.append(("logits in tiles, selective recomputation", {"logits": "tiled", "recompute": "selective"}))
    return peers + [
        Contender(f"tensorshard, {how}", "ours", "tensorshard.engine", {"zero": layout.level, **options})
        for how, options in ours
    ]


def obstacle(contender: Contender) -> str:
    """Why a contender cannot be measured here; empty if it can."""
    if not contender.installed:
        return "not installed"
    if contender.options.get("loss") == "cut" and find_spec("triton") is None:
        return "needs Triton, for its CPU form too"
    if contender.options.get("loss") == "chunked":
        from torch import nn

        if not hasattr(nn, "LinearCrossEntropyOptions"):
            return "not in this version of torch"
    return ""


def measure_group(workload: Workload, layout: Layout, steps: Steps, *, console: Console) -> Group:
    """Measures the contenders, on one thread a rank.

    Raises:
        LossMismatchError: a contender did not train as the others did.
    """
    lineup = contenders(layout)
    return measure_training_group(
        lineup,
        workload,
        layout.ranks,
        steps,
        title=f"{workload.name}, {workload.batch_size} x {workload.context_length} tokens, {layout}",
        packages=["torch", "transformers", "accelerate", "cut-cross-entropy", "tensorshard"],
        obstacles={contender.name: reason for contender in lineup if (reason := obstacle(contender))},
        console=console,
    )


def run(arguments: argparse.Namespace) -> int:
    console = make_console()
    rounds, measured_steps = (1, 2) if arguments.quick else (arguments.rounds, arguments.steps)
    workloads = [_QUICK] if arguments.quick else [WORKLOADS[name] for name in arguments.model or WORKLOADS]
    for workload in workloads:
        for layout in LAYOUTS:
            if layout.ranks not in arguments.ranks or layout.level not in arguments.zero:
                continue
            steps = Steps(rounds, min(2, measured_steps), measured_steps)
            group = measure_group(workload, layout, steps, console=console)
            print_group(console, group, QUANTITIES)
            if not arguments.quick:  # at once, so that an interrupted run keeps what it has measured
                write_results(console, "logits", QUANTITIES, [group])
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=list(WORKLOADS), nargs="+", help="these models instead of all")
    parser.add_argument("--ranks", type=positive_int, nargs="+", default=[1, 2], help="numbers of ranks (default 1 2)")
    parser.add_argument("--zero", type=int, choices=(0, 3), nargs="+", default=[0, 3], help="ZeRO levels (default 0 3)")
    parser.add_argument(
        "--steps", type=positive_int, default=3, help="steps of a turn that are measured (default %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=positive_int, default=3, help="how many turns each contender has (default %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="a small model and few steps, of which nothing is written")


SUITE = Suite(
    "logits",
    "language models with real vocabularies on CPU, their logits held or in tiles, against PyTorch's ways",
    add_arguments,
    run,
)
