"""Training with less memory than the states need: the update's kernel, and GPTs in a memory cgroup."""

import argparse
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import date
from importlib.util import find_spec
from typing import Any

from rich.console import Console

from benchmarks.harness.contender import Contender
from benchmarks.harness.hardware import installed_versions
from benchmarks.harness.offload_needs import describe_needs, reason_to_leave_out
from benchmarks.harness.offloaded_training import KilledError, OffloadJob, OffloadMeasurement, measure_offloaded
from benchmarks.harness.report import make_console, print_group, write_results
from benchmarks.harness.results import Group, Quantity, make_rows
from benchmarks.harness.updates import CONTENDERS, UpdateJob, measure_update
from benchmarks.offloads import SMOKE, WORKS, OffloadWork
from benchmarks.registry import Suite, positive_int

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
RUN_TIMEOUT = 3600.0  # seconds; a step of the largest reads and writes some 50 GB
_PACKAGES = ("torch", "deepspeed", "tensorshard")

UPDATE_QUANTITIES = (
    Quantity("step_seconds", "step time", "s"),
    Quantity("rate", "parameters a second", "parameters/s", headline=False),
    Quantity("bandwidth_share", "of a STREAM triad", "share"),
)
QUANTITIES = (
    Quantity("peak_bytes", "peak memory, page cache included", "bytes"),
    Quantity("step_seconds", "step time", "s"),
    Quantity("read_per_parameter", "read per parameter", "B/parameter"),
    Quantity("written_per_parameter", "written per parameter", "B/parameter"),
    Quantity("raw_share", "of the raw disk rate", "share"),
    Quantity("bound_ratio", "step / max(compute, I/O)", "times"),
)

PLANS: dict[str, Mapping[str, Any] | None] = {
    "tensorshard, all in memory": None,
    "tensorshard, states on disk": {"optimizer": "disk"},
    "tensorshard, states, gradients": {"optimizer": "disk", "gradients": "disk"},
    "tensorshard, states, gradients, updates behind": {"optimizer": "disk", "gradients": "disk", "overlap": True},
    "tensorshard, states, gradients, activations": {"optimizer": "disk", "gradients": "disk", "activations": "disk"},
    "tensorshard, states, gradients, parameters": {"optimizer": "disk", "gradients": "disk", "parameters": "disk"},
    "tensorshard, states, gradients, parameters, updates behind": {
        "optimizer": "disk",
        "gradients": "disk",
        "parameters": "disk",
        "overlap": True,
    },
}
"""What is offloaded, for each of our rows."""


def contenders(world_size: int) -> list[Contender]:
    """The peer, where it runs, then ours."""
    mapped = Contender("tensors mapped to a file, fused AdamW", "offload_mapped", "torch")
    ours = [
        Contender(name, "offload_ours", "tensorshard.engine", {"offload": None if plan is None else dict(plan)})
        for name, plan in PLANS.items()
    ]
    return [*([mapped] if world_size == 1 else []), *ours]


def measure_updates(numel: int, *, clip: bool, rounds: int, steps: int, threads: int, console: Console) -> Group:
    """All kernels in turn, `rounds` times over, each in a fresh process."""
    notes = {} if find_spec("deepspeed") else {"DeepSpeedCPUAdam, and casts": "not installed"}
    samples: dict[str, dict[str, list[float]]] = {q.key: {} for q in UPDATE_QUANTITIES}
    for number in range(1, rounds + 1):
        for name in CONTENDERS:
            if name in notes:
                continue
            with console.status(f"update, round {number} of {rounds}: {name}"):
                measurement = measure_update(UpdateJob(name, numel, clip, steps, threads), timeout=RUN_TIMEOUT)
            for key, value in (
                ("step_seconds", measurement.step_seconds),
                ("rate", numel / measurement.step_seconds),
                ("bandwidth_share", measurement.bandwidth_share(numel)),
            ):
                samples[key].setdefault(name, []).append(value)
    return Group(
        title=f"AdamW, {numel / 1e6:.0f} million parameters, {'clipped' if clip else 'not clipped'}",
        date=date.today().isoformat(),
        versions=installed_versions(_PACKAGES),
        settings={"parameters": numel, "rounds": rounds, "steps": steps, "threads": threads},
        rows=make_rows(samples, ours=["tensorshard"], notes=notes),
    )


def measure_training(
    work: OffloadWork, world_size: int, folder: str, *, steps: int, only: Sequence[str], console: Console
) -> Group:
    """All contenders, each on fresh ranks in a cgroup of its own."""
    threads = max(1, len(os.sched_getaffinity(0)) // world_size)
    environment = {**NO_GPU, "OMP_NUM_THREADS": str(threads)}
    lineup = [c for c in contenders(world_size) if not only or c.name in only]
    runs: dict[str, OffloadMeasurement] = {}
    notes: dict[str, str] = {}
    for contender in lineup:
        offloads = not contender.ours or contender.options["offload"] is not None
        reason = reason_to_leave_out(work, world_size, offloads=offloads)
        if reason is not None:
            notes[contender.name] = reason
            continue
        job = OffloadJob(work, contender.builder, contender.options, folder, steps)
        with console.status(f"{work.name}, {world_size} rank(s): {contender.name}"):
            try:
                runs[contender.name] = measure_offloaded(job, world_size, environment=environment, timeout=RUN_TIMEOUT)
            except KilledError as error:
                notes[contender.name] = str(error)
    limited = {run.limited for run in runs.values()} or {True}
    settings: dict[str, Any] = {
        **asdict(work),
        "parameters": work.parameters,
        "ranks": world_size,
        "threads": threads,
        "steps": steps,
        "on_disk": {name: run.on_disk for name, run in runs.items()},
        "memory": "limited by a cgroup" if True in limited else "not limited; VmHWM and the growth of the page cache",
    }
    within = f"{work.memory_bytes / 1e9:g} GB" if True in limited else "memory not limited"
    return Group(
        title=f"{work.name}, {'one process' if world_size == 1 else f'{world_size} ranks'}, {within}",
        date=date.today().isoformat(),
        versions=installed_versions(_PACKAGES),
        settings=settings,
        rows=make_rows(
            {q.key: {name: [getattr(run, q.key)] for name, run in runs.items()} for q in QUANTITIES},
            ours=[contender.name for contender in lineup if contender.ours],
            losses={name: run.loss for name, run in runs.items()},
            notes=notes,
        ),
    )


def run(arguments: argparse.Namespace) -> int:
    console = make_console()
    numel = 1_000_000 if arguments.quick else arguments.parameters
    rounds, steps = (1, 1) if arguments.quick else (arguments.rounds, arguments.steps)
    if arguments.only != "training":
        threads = len(os.sched_getaffinity(0))
        for clip in (True, False):
            group = measure_updates(numel, clip=clip, rounds=rounds, steps=steps, threads=threads, console=console)
            print_group(console, group, UPDATE_QUANTITIES)
            if not arguments.quick:
                write_results(console, "offload-update", UPDATE_QUANTITIES, [group])
    if arguments.only == "update":
        return 0
    works = [SMOKE] if arguments.quick else [WORKS[name] for name in arguments.model]
    given_works = [replace(w, memory_bytes=int(arguments.memory * 1e9)) if arguments.memory else w for w in works]
    try:
        for given in given_works:
            for world_size in arguments.ranks:
                console.print(describe_needs(given, world_size, arguments.folder))
    except ValueError as error:
        console.print(f"[red]{error}")
        return 1
    for given in given_works:
        for world_size in arguments.ranks:
            group = measure_training(
                given,
                world_size,
                arguments.folder,
                steps=steps,
                only=arguments.contender or (),
                console=console,
            )
            print_group(console, group, QUANTITIES)
            if not arguments.quick:  # at once, so that an interrupted run keeps what it has measured
                write_results(console, "offload", QUANTITIES, [group])
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=["update", "training"], help="one of the two instead of both")
    parser.add_argument("--model", choices=list(WORKS), nargs="+", default=["GPT-2 XL"], help="default: GPT-2 XL")
    parser.add_argument("--memory", type=float, metavar="GB", help="of all ranks, in place of the model's own limit")
    parser.add_argument("--ranks", type=positive_int, nargs="+", default=[1, 2], help="numbers of ranks (default 1 2)")
    parser.add_argument("--contender", nargs="+", help="these instead of all")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="of scratch files, on a local disk")
    parser.add_argument(
        "--parameters", type=positive_int, default=500_000_000, help="of the update (default: half a billion)"
    )
    parser.add_argument("--rounds", type=positive_int, default=3, help="of the update (default %(default)s)")
    parser.add_argument("--steps", type=positive_int, default=3, help="that are measured (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="the smallest sizes, of which nothing is written")


SUITE = Suite(
    "offload",
    "states and gradients on disk within a limit on memory, against tensors mapped to a file; the update's kernel",
    add_arguments,
    run,
)
