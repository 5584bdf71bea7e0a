"""ZeRO 0 to 3 on CPU ranks: the same GPT under tensorshard and under the libraries that do the same."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import date

from rich.console import Console

from benchmarks.harness.contender import Contender
from benchmarks.harness.hardware import installed_versions
from benchmarks.harness.report import make_console, print_group, write_results
from benchmarks.harness.results import Group, Quantity, make_rows
from benchmarks.harness.statistics import check_losses_agree
from benchmarks.harness.training import TrainingJob, TrainingMeasurement, measure_training
from benchmarks.registry import Suite, positive_int
from benchmarks.workload import GPT2_SMALL, Workload
from tensorshard.launch.launcher import worker_environment

WORLD_SIZE = 2
LOSS_TOLERANCE = 2e-5  # relative; fp32 sums in other orders make a difference of about 1e-6
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
RUN_TIMEOUT = 600.0  # seconds; DeepSpeed compiles an operator at its first start

WORKLOADS = {
    "17M": Workload("17M", num_layers=6, num_heads=6, width=384, vocab_size=8192, context_length=128, batch_size=4),
    "60M": Workload("60M", num_layers=10, num_heads=10, width=640, vocab_size=8192, context_length=128, batch_size=2),
    "124M": GPT2_SMALL,
}

QUANTITIES = (
    Quantity("step_seconds", "step time", "s"),
    Quantity("cpu_seconds", "CPU time", "s", headline=False),
    Quantity("steady_peak_bytes", "peak memory per rank", "bytes"),
    Quantity("process_peak_bytes", "start included", "bytes", headline=False),
)


def contenders(level: int) -> list[Contender]:
    """The peers of a ZeRO level, then tensorshard."""
    return [*_peers(level), *_ours(level)]


def _peers(level: int) -> list[Contender]:
    ddp = "torch.nn.parallel.distributed"
    fsdp2 = "torch.distributed.fsdp"
    match level:
        case 0:
            return [
                Contender("DDP", "ddp", ddp),
                Contender("DDP, bucket views", "ddp", ddp, {"gradient_as_bucket_view": True}),
            ]
        case 1:
            bucket_views = {"gradient_as_bucket_view": True, "parameters_as_bucket_view": True}
            return [
                Contender("ZeroRedundancyOptimizer", "ddp", ddp, {"shard_optimizer": True, **bucket_views}),
                _deepspeed(1),
            ]
        case 2:
            return [
                Contender("FSDP2, no reshard", "fsdp2", fsdp2, {"reshard_after_forward": False}),
                _deepspeed(2),
            ]
        case 3:
            return [
                Contender("FSDP2", "fsdp2", fsdp2),
                Contender("Accelerate FSDP2", "accelerate_fsdp2", "accelerate"),
                _deepspeed(3),
            ]
    raise ValueError(f"there is no ZeRO level {level}; the levels are 0, 1, 2 and 3")


def _deepspeed(level: int) -> Contender:
    return Contender(f"DeepSpeed {level}", "deepspeed_zero", "deepspeed", {"stage": level}, {"DS_ACCELERATOR": "cpu"})


def _ours(level: int) -> list[Contender]:
    name, options = f"tensorshard zero={level}", {"zero": level}
    return [
        Contender(name, "ours", "tensorshard.engine", options),
        # with the allocator's settings that `tensorshard train` gives its workers
        Contender(f"{name}, as launched", "ours", "tensorshard.engine", options, worker_environment(WORLD_SIZE)),
    ]


def measure_group(
    workload: Workload,
    level: int,
    *,
    rounds: int,
    warmup_steps: int,
    measured_steps: int,
    environment: Mapping[str, str],
    reference: dict[str, list[float]],
    console: Console,
) -> Group:
    """Measures all contenders of a level in turn, `rounds` times over.

    Args:
        environment: further variables of every contender's ranks.
        reference: losses that those measured here must agree with; gains the first that is measured.

    Raises:
        LossMismatchError: a contender did not train as the others did.
    """
    lineup = contenders(level)
    installed = [contender for contender in lineup if contender.installed]
    runs: dict[str, list[TrainingMeasurement]] = {contender.name: [] for contender in installed}
    for round_number in range(1, rounds + 1):
        for contender in installed:
            job = TrainingJob(
                f"benchmarks.peers.{contender.builder}",
                contender.options,
                workload,
                warmup_steps,
                measured_steps,
            )
            with console.status(f"{workload.name}, round {round_number} of {rounds}: {contender.name}"):
                run = measure_training(
                    job,
                    WORLD_SIZE,
                    environment={**NO_GPU, **contender.environment, **environment},
                    timeout=RUN_TIMEOUT,
                )
            runs[contender.name].append(run)
            reference.setdefault(contender.name, run.losses)
            check_losses_agree({**reference, contender.name: run.losses}, LOSS_TOLERANCE)
    return Group(
        title=f"{workload.name}{' parameters' * workload.name[0].isdigit()}, ZeRO {level}",
        date=date.today().isoformat(),
        versions=installed_versions(["torch", "deepspeed", "accelerate", "tensorshard"]),
        settings={
            "ranks": WORLD_SIZE,
            "rounds": rounds,
            "warmup_steps": warmup_steps,
            "measured_steps": measured_steps,
            "environment": dict(environment),
            **asdict(workload),
        },
        rows=make_rows(
            {q.key: {name: [getattr(run, q.key) for run in of] for name, of in runs.items()} for q in QUANTITIES},
            ours=[contender.name for contender in lineup if contender.ours],
            losses={name: of[0].losses[-1] for name, of in runs.items()},
            notes={contender.name: "not installed" for contender in lineup if not contender.installed},
        ),
    )


def run(arguments: argparse.Namespace) -> int:
    console = make_console()
    rounds, warmup_steps, measured_steps = (1, 1, 2) if arguments.quick else (arguments.rounds, 2, 8)
    models = [arguments.model] if arguments.model else ["17M"] if arguments.quick else list(WORKLOADS)
    levels: Sequence[int] = [int(arguments.only.removeprefix("zero"))] if arguments.only else range(4)
    for model in models:
        reference: dict[str, list[float]] = {}
        for level in levels:
            group = measure_group(
                WORKLOADS[model],
                level,
                rounds=rounds,
                warmup_steps=warmup_steps,
                measured_steps=measured_steps,
                environment=dict(arguments.environment),
                reference=reference,
                console=console,
            )
            print_group(console, group, QUANTITIES)
            if not arguments.quick:  # at once, so that an interrupted run keeps what it has measured
                write_results(console, "zero", QUANTITIES, [group])
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=list(WORKLOADS), help="one model instead of all")
    parser.add_argument("--only", choices=[f"zero{level}" for level in range(4)], help="one level instead of all")
    parser.add_argument(
        "--rounds", type=positive_int, default=5, help="how often each contender runs (default %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="one round of a few steps, of which nothing is written")
    parser.add_argument(
        "--environment",
        metavar="NAME=VALUE",
        nargs="+",
        default=[],
        type=_variable,
        help="variables for every contender's ranks, to see what they alone change",
    )


def _variable(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not (name and separator):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE")
    return name, value


SUITE = Suite("zero", "ZeRO 0 to 3 on 2 CPU ranks against DDP, FSDP2, Accelerate and DeepSpeed", add_arguments, run)
