"""Estimates against real runs on CPU ranks: peaks of small models' ledgers, and resident memory of larger ones."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Console

from benchmarks.harness.estimates import Cell, Outcome, all_cells, estimate_cell
from benchmarks.harness.estimates_document import print_outcomes, write_estimates
from benchmarks.harness.estimates_peers import others_say
from benchmarks.harness.estimates_rank import LedgerJob
from benchmarks.harness.jobs import run_job
from benchmarks.harness.report import make_console
from benchmarks.harness.resident_rank import ResidentJob
from benchmarks.registry import Suite
from benchmarks.workload import OPTIMIZER, Workload, loss_fn

_PARTS = ("ledger", "resident")
RUN_TIMEOUT = 900.0  # seconds, of all cells of one world
# Freed blocks of 64 KiB and more go back to the system at once, so that resident memory is what is held, and not what
# glibc keeps for later.
TIGHT_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(64 << 10), "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}
LARGER = Workload("57M", num_layers=8, num_heads=12, width=768, vocab_size=512, context_length=128, batch_size=2)
RESIDENT: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, dict(zero=0)),
    (1, dict(zero=0, recompute="full")),
    (2, dict(zero=0)),
    (2, dict(zero=1)),
    (2, dict(zero=2)),
    (2, dict(zero=3)),
    (2, dict(zero=3, precision="bf16")),
    (2, dict(tp=2, zero=0)),
    (2, dict(pp=2, micro_batches=2, zero=0)),
)


def run(arguments: argparse.Namespace) -> int:
    console = make_console()
    cells = [cell for cell in all_cells() if _is_asked(cell.name, arguments.only)]
    if arguments.quick:
        cells = [cell for cell in cells if cell.model == "GPT"]
    parts = _PARTS if arguments.part is None else (arguments.part,)
    outcomes = ledger_outcomes(cells, console) if "ledger" in parts else []
    resident = resident_outcomes(arguments.only, console) if "resident" in parts and not arguments.quick else []
    print_outcomes(console, "live tensors: the ledger of a real run", outcomes)
    print_outcomes(console, f"resident memory above the start: a GPT of {LARGER.name} parameters", resident)
    if not (arguments.quick or arguments.only):
        write_estimates(console, outcomes, resident)
    return 0


def ledger_outcomes(cells: Sequence[Cell], console: Console) -> list[Outcome]:
    """What the ledgers of real runs and the estimates say of `cells`."""
    outcomes = {cell.name: Outcome(cell.name) for cell in cells}
    for world in sorted({cell.world_size for cell in cells}):
        of_world = [cell for cell in cells if cell.world_size == world]
        with console.status(f"{len(of_world)} real runs on {world} ranks"):
            ranks = run_job(
                "benchmarks.harness.estimates_rank",
                LedgerJob([asdict(cell) for cell in of_world]),
                world,
                environment={"CUDA_VISIBLE_DEVICES": "", "TENSORSHARD_CACHE": "off"},
                timeout=RUN_TIMEOUT,
            )
        for index, cell in enumerate(of_world):
            _take_measured(outcomes[cell.name], [rank["outcomes"][index] for rank in ranks])
    for number, cell in enumerate(cells, start=1):
        outcome = outcomes[cell.name]
        with console.status(f"estimate {number} of {len(cells)}: {cell.name}"):
            try:
                estimate = estimate_cell(cell)
            except Exception as error:
                lines = str(error).splitlines() or [""]
                outcome.failure = outcome.failure or f"estimate: {type(error).__name__}: {lines[0]}"
                continue
            outcome.estimated = {rank.rank: rank.peak_allocated for rank in estimate.ranks}
            outcome.measured = {rank: peak for rank, peak in outcome.measured.items() if rank in outcome.estimated}
            outcome.others = others_say(cell)
    return list(outcomes.values())


def _take_measured(outcome: Outcome, ranks: Sequence[dict[str, Any]]) -> None:
    failures = [rank["failure"] for rank in ranks if "failure" in rank]
    if failures:
        outcome.failure = f"real run: {failures[0]}"
        return
    outcome.measured = {rank["measured"]["rank"]: rank["measured"]["peak"] for rank in ranks}
    outcome.cpu_seconds = max(rank["measured"]["cpu_seconds"] for rank in ranks)


def resident_outcomes(only: str | None, console: Console) -> list[Outcome]:
    """Resident memory of fresh ranks above what they held before the model, and the estimates of live tensors."""
    import tensorshard as ts

    outcomes = []
    for world, fields in RESIDENT:
        cell = Cell(f"GPT {LARGER.name}", world, fields)
        if not _is_asked(cell.name, only):
            continue
        with console.status(f"resident memory: {cell.name}"):
            ranks = run_job(
                "benchmarks.harness.resident_rank",
                ResidentJob(LARGER, fields),
                world,
                environment={"CUDA_VISIBLE_DEVICES": "", **TIGHT_MALLOC},
                timeout=RUN_TIMEOUT,
            )
            inputs, targets = LARGER.batch(0, 0)
            estimate = ts.estimate(
                partial(LARGER.model),
                cell.plan(),
                world_size=world,
                inputs=inputs,
                targets=targets,
                optimizer=OPTIMIZER,
                loss_fn=loss_fn,
                device="cpu",
            )
        estimated = {rank.rank: rank.peak_allocated for rank in estimate.ranks}
        measured = {number: rank["peak"] for number, rank in enumerate(ranks) if number in estimated}
        outcomes.append(Outcome(cell.name, estimated, measured))
    return outcomes


def _is_asked(name: str, only: str | None) -> bool:
    return only is None or only in name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", metavar="WORDS", help="cells whose names have these words; nothing is written")
    parser.add_argument("--part", choices=_PARTS, help="one of the tables; the others stay as they are")
    parser.add_argument("--quick", action="store_true", help="a few cells of the ledger's, of which nothing is written")


SUITE = Suite("estimate", "estimates of memory against real runs on CPU ranks", add_arguments, run)
