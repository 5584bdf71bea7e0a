"""Mixtures of experts on CPU ranks: time, memory and bytes, split by ``ep``, by ``tp`` and by ZeRO 3."""

import argparse
from dataclasses import asdict
from datetime import date
from typing import Any

from benchmarks.experts import MixtureWork
from benchmarks.harness.contender import Contender
from benchmarks.harness.hardware import installed_versions
from benchmarks.harness.report import make_console, print_group, write_results
from benchmarks.harness.results import Group, Quantity, make_rows
from benchmarks.harness.sequences import measure_sequences
from benchmarks.registry import Suite, positive_int

ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": ""}
RUN_TIMEOUT = 500.0  # seconds

WORKS = {"8": MixtureWork(experts=8, choices=2, hidden=512), "64": MixtureWork(experts=64, choices=4, hidden=64)}
DEGREES = (2, 4)

QUANTITIES = (
    Quantity("cpu_seconds", "CPU time of all ranks", "s"),
    Quantity("step_seconds", "step time", "s"),
    Quantity("peak_bytes", "peak memory of a rank", "bytes"),
    Quantity("received_bytes", "tokens from other ranks", "bytes"),
    Quantity("of_formula", "times the bytes by the formula", "times"),
)

# Peers that were not run.
NOTES = {
    "torchtitan's layers": "are of its own models, which run on GPUs alone",
    "DeepSpeed's MoE": "is a layer of its own, with another router",
}


def ours(ranks: int, **fields: Any) -> Contender:
    """tensorshard under a Plan, on `ranks` ranks."""
    shown = ", ".join(f"{name}={value}" for name, value in fields.items())
    return Contender(f"tensorshard {shown}", "experts_ours", "tensorshard.engine", fields)


def measure(name: str, ranks: int, rounds: int) -> Group:
    """All contenders with one mixture on `ranks` ranks."""
    work = WORKS[name]
    lineup = [
        Contender("transformers' AllToAllEP", "experts_transformers", "transformers"),
        ours(ranks, ep=ranks, zero=0),
        ours(ranks, ep=ranks, zero=1),
        ours(ranks, ep=ranks, zero=3),
        ours(ranks, tp=ranks, zero=0),
        ours(ranks, zero=3),
    ]
    options: dict[str, Any] = {"environment": ENVIRONMENT, "timeout": RUN_TIMEOUT}
    alone = measure_sequences(work, [ours(1, zero=0)], 1, rounds=1, expected=None, **options)
    loss = next(iter(alone.values())).loss
    measurements = measure_sequences(work, lineup, ranks, rounds=rounds, expected=loss, **options)
    exchanged = {name: of for name, of in measurements.items() if of.received_bytes}
    samples = {
        "cpu_seconds": {name: of.cpu_seconds for name, of in measurements.items()},
        "step_seconds": {name: of.step_seconds for name, of in measurements.items()},
        "peak_bytes": {name: [of.peak_bytes] for name, of in measurements.items()},
        "received_bytes": {name: [of.received_bytes] for name, of in exchanged.items()},
        "of_formula": {name: [of.received_bytes / work.exchanged_bytes(ranks)] for name, of in exchanged.items()},
    }
    return Group(
        title=f"{work.experts} experts, {ranks} ranks",
        date=date.today().isoformat(),
        versions=installed_versions(["torch", "transformers", "tensorshard"]),
        settings={"rounds": rounds, **asdict(work)},
        rows=make_rows(samples, ours=[c.name for c in lineup if c.ours], notes=NOTES),
    )


def run(arguments: argparse.Namespace) -> int:
    console = make_console()
    rounds = 2 if arguments.quick else arguments.rounds
    for name in arguments.experts or WORKS:
        for ranks in arguments.ranks or DEGREES:
            with console.status(f"{name} experts, {ranks} ranks"):
                group = measure(name, ranks, rounds)
            print_group(console, group, QUANTITIES)
            if not arguments.quick:  # at once, so that an interrupted run keeps what it has measured
                write_results(console, "experts", QUANTITIES, [group])
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--experts", nargs="+", choices=list(WORKS), help="mixtures of so many experts")
    parser.add_argument("--ranks", nargs="+", type=int, choices=DEGREES, help="numbers of ranks")
    parser.add_argument("--rounds", type=positive_int, default=7, help="turns of each contender")
    parser.add_argument("--quick", action="store_true", help="a few rounds, and no results file")


SUITE = Suite("experts", "mixtures of experts: time, memory and bytes of ep, tp and ZeRO 3", add_arguments, run)
