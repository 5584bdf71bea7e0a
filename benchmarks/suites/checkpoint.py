"""Saving and loading on 2 CPU ranks under ZeRO 3: checkpoints against torch.save, torch's DCP and DeepSpeed."""

import argparse
import json
import tempfile
from datetime import date
from importlib.util import find_spec
from pathlib import Path

from benchmarks.harness.hardware import installed_versions
from benchmarks.harness.ranks import run_ranks
from benchmarks.harness.report import make_console, print_group, write_results
from benchmarks.harness.results import Group, Quantity, make_rows
from benchmarks.registry import Suite, positive_int
from benchmarks.workload import Workload

WORLD_SIZE = 2
WORKLOADS = {
    "17M": Workload("17M", num_layers=6, num_heads=6, width=384, vocab_size=8192, context_length=128, batch_size=1),
    "60M": Workload("60M", num_layers=10, num_heads=10, width=640, vocab_size=8192, context_length=128, batch_size=1),
    "500M": Workload("500M", num_layers=24, num_heads=20, width=1280, vocab_size=8192, context_length=32, batch_size=1),
}
QUANTITIES = (
    Quantity("blocked", "training waits", "s"),
    Quantity("saved", "until it is whole", "s"),
    Quantity("loaded", "load", "s"),
    Quantity("peak", "more memory than a step", "bytes"),
    Quantity("bytes", "size", "bytes", headline=False),
    Quantity("lost", "training time lost in all", "s"),
)
_OURS = ("tensorshard", "tensorshard, background")


def measure(name: str, rounds: int, folder: str) -> Group:
    """All contenders in turn, `rounds` times over, in the same ranks; then DeepSpeed, whose states are its own."""
    libraries: dict[str, dict[str, str]] = {"torch": {}}
    notes = {}
    if find_spec("deepspeed") is not None:
        libraries["deepspeed"] = {"DS_ACCELERATOR": "cpu"}
    else:
        notes["DeepSpeed 3"] = "not installed"
    measured: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as results:
        output = Path(results) / "measured.json"
        for library, variables in libraries.items():
            arguments = [name, str(rounds), f"{folder}/saved", str(output), library]
            environment = {"CUDA_VISIBLE_DEVICES": "", **variables}
            run_ranks(
                "benchmarks.harness.checkpoint_rank", arguments, WORLD_SIZE, environment=environment, timeout=3600
            )
            measured |= json.loads(output.read_text())
    measured |= {name: measured.pop(name) for name in _OURS}  # last
    samples = {q.key: {name: [run[q.key] for run in runs] for name, runs in measured.items()} for q in QUANTITIES}
    return Group(
        title=f"{name} parameters, ZeRO 3",
        date=date.today().isoformat(),
        versions=installed_versions(("torch", "deepspeed", "tensorshard")),
        settings={"ranks": WORLD_SIZE, "rounds": rounds, "threads": 1},
        rows=make_rows(samples, ours=_OURS, notes=notes),
    )


def run(arguments: argparse.Namespace) -> int:
    console = make_console()
    names = arguments.model or (["17M"] if arguments.quick else ["60M"])
    for name in names:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder, console.status(f"{name}: saves and loads"):
            group = measure(name, 1 if arguments.quick else arguments.rounds, folder)
        print_group(console, group, QUANTITIES)
        if not arguments.quick:
            write_results(console, "checkpoint", QUANTITIES, [group])
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=list(WORKLOADS), nargs="+", help="sizes of models (default: 60M)")
    parser.add_argument("--rounds", type=positive_int, default=5, help="saves of each kind (default %(default)s)")
    parser.add_argument("--folder", help="on the disk to write to (default: the one of temporary files)")
    parser.add_argument("--quick", action="store_true", help="one round of a small model, of which nothing is written")


SUITE = Suite(
    "checkpoint", "save and load on 2 CPU ranks against torch.save, torch's DCP and DeepSpeed", add_arguments, run
)
