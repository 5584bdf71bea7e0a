"""What the processes of one cell do. They are forked from one that has imported everything."""

import os
import sys
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness.models_judge import failure_of
from benchmarks.harness.models_training import train_alone, train_under
from benchmarks.models.plans import PLANS, PlanCase
from benchmarks.models.registry import find_cases


def run_alone(
    connection: Connection, log: str, key: str, micro_batches: int, dtype: str, compiled: bool, random: str, path: str
) -> None:
    """A plain process trains the case and saves the result to `path`."""
    _prepare(log)
    try:
        kind = getattr(torch, dtype)
        trained = train_alone(find_cases()[key], micro_batches, kind, compiled=compiled, random=random)
        torch.save(trained, path)
        outcome: Any = {"done": True}
    except BaseException as error:
        traceback.print_exc()
        outcome = {"failure": failure_of(error, "alone", time.monotonic())}
    _hand_in(connection, outcome)


def run_bf16_alone(connection: Connection, log: str, key: str, store: str, path: str) -> None:
    """One process trains the case in bf16: with the samples of a batch in three orders, and in two micro-batches. Their
    gradients are rounded separately, as those of two data ranks are."""
    _prepare(log)
    plan = PlanCase("bf16-alone", "", 1, dict(zero=0, precision="bf16"))
    in_two = PlanCase("bf16-in-two", "", 1, dict(zero=0, precision="bf16", micro_batches=2))
    progress: dict[str, Any] = {"stage": "join"}
    try:
        _join(store, 0, 1, 600.0)
        runs = [(plan, "as drawn"), (plan, "flipped"), (plan, "rolled"), (in_two, "as drawn")]
        case = find_cases()[key]
        torch.save([train_under(case, under, order=order, progress=progress) for under, order in runs], path)
        outcome: Any = {"done": True}
    except BaseException as error:
        traceback.print_exc()
        outcome = {"failure": failure_of(error, progress["stage"], time.monotonic())}
    _hand_in(connection, outcome)


def run_rank(
    connection: Connection,
    log: str,
    key: str,
    plan: str,
    rank: int,
    store: str,
    path: str,
    options: dict[str, Any],
) -> None:
    """One rank trains the case under a plan; the first rank saves the result to `path`."""
    _prepare(log)
    chosen = PLANS[plan]
    progress: dict[str, Any] = {"stage": "join"}
    try:
        _join(store, rank, chosen.ranks, options["limit"])
        trained = train_under(
            find_cases()[key],
            chosen,
            dtype=getattr(torch, options["dtype"]),
            with_samples=options["with_samples"],
            progress=progress,
        )
        if rank == 0:
            torch.save(trained, path)
        outcome: Any = {"done": True}
    except BaseException as error:
        traceback.print_exc()
        outcome = {"failure": failure_of(error, progress["stage"], time.monotonic())}
    _hand_in(connection, {**outcome, "split_share": progress.get("split_share")})


def _prepare(log: str) -> None:
    """Sends output to a file, which is read if the process dies."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    torch.set_num_threads(1)


def _join(store: str, rank: int, ranks: int, limit: float) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timedelta(seconds=limit)
    )
    dist.barrier()


def _hand_in(connection: Connection, outcome: dict[str, Any]) -> None:
    connection.send(outcome)
    sys.stdout.flush()
    connection.recv()  # waits for all: if a process leaves, others may lose what they have not received yet
    os._exit(0)
