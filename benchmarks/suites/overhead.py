"""What parallel training costs the processor where the model costs it nearly nothing: a tiny GPT of many layers.

Its time is that of Python, of the dispatch of operators and of small messages. On a GPU these keep the kernels of a
small model waiting. Processor time is compared, since a machine's other work changes it far less than the time of a
step.
"""

import argparse

from benchmarks.harness.contender import Contender
from benchmarks.harness.report import make_console, print_group, write_results
from benchmarks.harness.results import Quantity
from benchmarks.harness.training_group import Steps, measure_training_group
from benchmarks.registry import Suite, positive_int
from benchmarks.suites.zero import WORLD_SIZE, contenders
from benchmarks.workload import Workload

QUANTITIES = (
    Quantity("cpu_seconds", "CPU time of a step", "s"),
    Quantity("step_seconds", "step time", "s", headline=False),
)
TINY = Workload("12 layers of width 32", 12, 4, 32, vocab_size=64, context_length=16, batch_size=4)
LEVELS = (0, 1, 3)


def lineup(level: int) -> list[Contender]:
    """The peers of a ZeRO level that are no wrappers of another one, and tensorshard."""
    ours = f"tensorshard zero={level}"
    return [c for c in contenders(level) if c.builder != "accelerate_fsdp2" and (not c.ours or c.name == ours)]


def run(arguments: argparse.Namespace) -> int:
    console = make_console()
    steps = Steps(1, 3, 5) if arguments.quick else Steps(arguments.rounds, 10, arguments.steps)
    for level in [arguments.level] if arguments.level is not None else LEVELS:
        members = lineup(level)
        group = measure_training_group(
            members,
            TINY,
            WORLD_SIZE,
            steps,
            title=f"{TINY.name}, ZeRO {level}",
            packages=["torch", "deepspeed", "tensorshard"],
            obstacles={contender.name: "not installed" for contender in members if not contender.installed},
            console=console,
        )
        print_group(console, group, QUANTITIES)
        if not arguments.quick:
            write_results(console, "overhead", QUANTITIES, [group])
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--level", type=int, choices=LEVELS, help="one ZeRO level instead of all")
    parser.add_argument(
        "--rounds", type=positive_int, default=5, help="how often each contender is started (default %(default)s)"
    )
    parser.add_argument(
        "--steps", type=positive_int, default=60, help="steps of a round that are measured (default %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="one round of a few steps, of which nothing is written")


SUITE = Suite("overhead", "CPU time of a step of a tiny model against DDP, FSDP2 and DeepSpeed", add_arguments, run)
