"""ZeRO 0 to 3 on CPU ranks: the same GPT under tensorshard and under the libraries that do the same."""

import argparse
from collections.abc import Mapping, Sequence

from rich.console import Console

from benchmarks.harness.contender import Contender
from benchmarks.harness.report import make_console, print_group, write_results
from benchmarks.harness.results import Group
from benchmarks.harness.training_group import QUANTITIES, Steps, measure_training_group
from benchmarks.registry import Suite, positive_int
from benchmarks.workload import GPT2_SMALL, Workload
from tensorshard.trainer.launch.launcher import worker_environment

WORLD_SIZE = 2

WORKLOADS = {
    "17M": Workload("17M", num_layers=6, num_heads=6, width=384, vocab_size=8192, context_length=128, batch_size=4),
    "60M": Workload("60M", num_layers=10, num_heads=10, width=640, vocab_size=8192, context_length=128, batch_size=2),
    "124M": GPT2_SMALL,
}
LARGE = (GPT2_SMALL,)
"""Those of which a machine of 24 GB does not hold all contenders at once."""


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
    steps: Steps,
    *,
    environment: Mapping[str, str],
    reference: dict[str, list[float]],
    console: Console,
) -> Group:
    """Measures all contenders of a level.

    Args:
        environment: further variables of every contender's ranks.
        reference: losses that those measured here must agree with; gains those that are measured.

    Raises:
        LossMismatchError: a contender did not train as the others did.
    """
    lineup = contenders(level)
    return measure_training_group(
        lineup,
        workload,
        WORLD_SIZE,
        steps,
        title=f"{workload.name}{' parameters' * workload.name[0].isdigit()}, ZeRO {level}",
        packages=["torch", "deepspeed", "accelerate", "tensorshard"],
        obstacles={contender.name: "not installed" for contender in lineup if not contender.installed},
        environment=environment,
        reference=reference,
        console=console,
    )


def run(arguments: argparse.Namespace) -> int:
    console = make_console()
    rounds, warmup, measured = (1, 1, 2) if arguments.quick else (arguments.rounds, 2, arguments.steps)
    models = [arguments.model] if arguments.model else ["17M"] if arguments.quick else list(WORKLOADS)
    levels: Sequence[int] = [int(arguments.only.removeprefix("zero"))] if arguments.only else range(4)
    for model in models:
        reference: dict[str, list[float]] = {}
        for level in levels:
            group = measure_group(
                WORKLOADS[model],
                level,
                Steps(rounds, min(warmup, measured), measured, in_turn=WORKLOADS[model] not in LARGE),
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
        "--rounds", type=positive_int, default=3, help="how often each contender is started (default %(default)s)"
    )
    parser.add_argument(
        "--steps", type=positive_int, default=12, help="steps of a round that are measured (default %(default)s)"
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
