"""Real runs of cells under the ledger: one rank, which takes one cell after the other."""

import os
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tensorshard as ts
from benchmarks.harness.estimates import OPTIMIZER, Cell, Measured, batch_of, build, case_of
from benchmarks.harness.jobs import hand_in, load_job
from tensorshard.plan.storage import DeviceStorage
from tensorshard.predict.rank_estimate import summarize
from tensorshard.predict.watched_steps import watch_steps


@dataclass(frozen=True)
class LedgerJob:
    """Cells of one world, as plain data."""

    cells: list[dict[str, Any]]


def measure(cell: Cell) -> Measured:
    """Two steps of the cell under the ledger."""
    case = case_of(cell)

    def make_engine() -> ts.Engine:
        return ts.parallelize(
            partial(build, case),
            cell.plan(),
            optimizer=OPTIMIZER,
            loss_fn=case.loss,
            sample_inputs=batch_of(case, cell)[0],
        )

    ledger, known, engine = watch_steps(make_engine, lambda: batch_of(case, cell))
    mesh = engine.mesh
    memory = summarize(ledger, known, rank=mesh.rank, stage=mesh.index("pp"), device_bytes=0, storage=DeviceStorage())
    inputs, targets = batch_of(case, cell)
    start = time.process_time()
    engine.step(inputs, targets)
    seconds = time.process_time() - start
    return Measured(mesh.rank, mesh.index("pp"), memory.peak_allocated, memory.by_category, memory.phase, seconds)


def main() -> None:
    torch.set_num_threads(1)
    job_file = Path(sys.argv[1])
    dist.init_process_group("gloo")
    outcomes: list[dict[str, Any]] = []
    for fields in load_job(job_file, LedgerJob).cells:
        cell = Cell(**fields)
        try:
            outcome: dict[str, Any] = {"measured": asdict(measure(cell))}
        except Exception as error:
            outcome = {"failure": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
        failures: list[Any] = [None] * cell.world_size
        dist.all_gather_object(failures, outcome.get("failure"))
        outcomes.append(outcome)
    hand_in(job_file, int(os.environ["RANK"]), {"outcomes": outcomes})


if __name__ == "__main__":
    main()
