"""What importing tensorshard costs, against importing torch."""

import argparse
import os
import subprocess
import sys
import tempfile
from datetime import date

from benchmarks.harness.hardware import installed_versions
from benchmarks.harness.report import make_console, print_group, write_results
from benchmarks.harness.results import Group, Quantity, make_rows
from benchmarks.registry import Suite, positive_int

QUANTITIES = (Quantity("import_seconds", "import time", "s"),)

# What each title compares: a peer's statement, then ours. The second is what training with ZeRO needs.
STATEMENTS = {
    "package": ("import torch", "import tensorshard"),
    "what training needs": (
        "import torch; from torch.distributed.fsdp import fully_shard",
        "import torch; from tensorshard import Plan, parallelize",
    ),
}

_TIMED = "import time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"


def import_seconds(statement: str, bytecode: str) -> float:
    """How long `statement` takes in a fresh interpreter, whose own start is not counted.

    Bytecode is kept in the folder `bytecode`. An installed package has its own: pip writes it, whatever
    PYTHONDONTWRITEBYTECODE says to a checkout.
    """
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = bytecode
    command = [sys.executable, "-c", _TIMED.format(statement)]
    finished = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return float(finished.stdout)


def measure_group(title: str, rounds: int) -> Group:
    """Measures the statements of `title` in turn, after a round that fills caches and writes bytecode."""
    peer, ours = STATEMENTS[title]
    seconds: dict[str, list[float]] = {peer: [], ours: []}
    with tempfile.TemporaryDirectory() as bytecode:
        for round_number in range(rounds + 1):
            for statement, values in seconds.items():
                value = import_seconds(statement, bytecode)
                if round_number > 0:
                    values.append(value)
    return Group(
        title=title,
        date=date.today().isoformat(),
        versions=installed_versions(["torch", "tensorshard"]),
        settings={"rounds": rounds},
        rows=make_rows({"import_seconds": seconds}, ours=[ours]),
    )


def run(arguments: argparse.Namespace) -> int:
    console = make_console()
    groups = []
    for title in STATEMENTS:
        groups.append(measure_group(title, arguments.rounds))
        print_group(console, groups[-1], QUANTITIES)
    write_results(console, "import", QUANTITIES, groups)
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=positive_int, default=10, help="imports of each kind (default %(default)s)")


SUITE = Suite("import", "import tensorshard against import torch", add_arguments, run)
