"""The search for plans: its choice against every plan of a grid, really run; within limits; for large models."""

import argparse

from benchmarks.harness.measured_hardware import measured_hardware
from benchmarks.harness.planner_document import (
    PlannerResults,
    print_findings,
    print_memory,
    print_runs,
    write_planner,
)
from benchmarks.harness.planner_memory import SIZES, run_size
from benchmarks.harness.planner_models import MODELS
from benchmarks.harness.planner_runs import GRID, run_model
from benchmarks.harness.planner_scale import SCALES, find
from benchmarks.harness.report import make_console
from benchmarks.registry import Suite, positive_int

_PARTS = ("runs", "memory", "scale")


def run(arguments: argparse.Namespace) -> int:
    console = make_console()
    parts = _PARTS if arguments.part is None else (arguments.part,)
    results = PlannerResults.load()
    if "runs" in parts:
        with console.status("how fast this machine is"):
            hardware = measured_hardware()
        names = arguments.model or (["GPT"] if arguments.quick else list(MODELS))
        grid = GRID[:2] if arguments.quick else GRID
        for name in names:
            with console.status(f"{name}: the search, {len(grid)} plans on 4 ranks, their estimates"):
                runs = run_model(name, hardware, 1 if arguments.quick else arguments.rounds, grid)
            print_runs(console, runs)
            results.models[name] = runs
            if not arguments.quick:  # at once, so that an interrupted run keeps what it has measured
                write_planner(console, results)
    if "memory" in parts and not arguments.quick:
        with console.status("how fast this machine is"):
            hardware = measured_hardware()
        for size in SIZES:
            with console.status(f"{size} MiB a rank: the search, and its choice in a memory cgroup"):
                results.memory[str(size)] = run_size(size, hardware)
            print_memory(console, [results.memory[str(size)]])
        write_planner(console, results)
    if "scale" in parts and not arguments.quick:
        for name in arguments.scale or list(SCALES):
            with console.status(f"{name}: the search"):
                results.scales[name] = find(SCALES[name])
            print_findings(console, [results.scales[name]])
            write_planner(console, results)
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", choices=_PARTS, help="one of the three, alone")
    parser.add_argument("--model", choices=list(MODELS), nargs="+", metavar="NAME", help=f"of: {', '.join(MODELS)}")
    parser.add_argument("--scale", choices=list(SCALES), nargs="+", metavar="NAME", help=f"of: {', '.join(SCALES)}")
    parser.add_argument("--rounds", type=positive_int, default=9, help="steps of each plan (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one model and two plans, of which nothing is written")


SUITE = Suite("planner", "the search's choice against plans that were really run; large models", add_arguments, run)
