"""Runs cells, each a case under a plan, on their own processes, and judges the results."""

import multiprocessing as mp
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import models_rank
from benchmarks.harness.models_judge import (
    Difference,
    Failure,
    bf16_allowance,
    bf16_distance,
    difference,
    is_exact,
)
from benchmarks.harness.models_training import Trained
from benchmarks.models.case import Case
from benchmarks.models.plans import PlanCase
from benchmarks.models.registry import is_installed

# One process imports these modules, and all others are forked from it. No module starts a thread, which a fork loses.
_PRELOADED = [
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "tensorshard",
    "tensorshard.parallelize.build",
    "benchmarks.harness.models_rank",
    "benchmarks.models.imports",
]
RESTING = 1e-4  # weights that move less than this in fp32, at a learning rate of 3e-3, count as unchanged
_SAVE = {"weights_only": False}  # this run's own files


class BrokenCaseError(RuntimeError):
    """One plain process cannot train the case either, so there is nothing to compare with."""


@dataclass
class Cell:
    """The result of one case under one plan.

    Args:
        status: "exact", "refused" with one of tensorshard's sentences, "crashed" with any other exception, "wrong"
            where numbers differ, or "hung".
        detail: the error's first sentence, or what differs.
        stage: what was going on: "parallelize", "step 1" and so on.
        where: the line that raised the error.
        split_share: share of the weights that tp splits.
        kept_share: share of the weights that tp splits only in memory. Every rank computes with all of them.
        gathered: names of operations that cp computed on whole sequences, since no rule knows them.
        samples: whether each sample was seen to be computed alone, or why not; "" where the batch is not cut.
        cpu_seconds, wall_seconds: of ``parallelize`` on the first rank.
        compared: "fp32", "fp64" if fp32 left doubt, or "bf16"; with ", compiled" if one process was compiled too.
        with_samples: the result with ``sample_inputs``, if the default call was not exact or split nothing.
    """

    status: str
    detail: str = ""
    stage: str = ""
    where: str = ""
    split_share: float | None = None
    kept_share: float | None = None
    gathered: list[str] = field(default_factory=list)
    samples: str = ""
    cpu_seconds: float | None = None
    wall_seconds: float | None = None
    compared: str = "fp32"
    with_samples: "Cell | None" = None


@dataclass
class CellRunner:
    """Runs cells one after the other.

    Args:
        folder: for this runner's files.
        limit: seconds that a cell may take.
    """

    folder: Path
    limit: float
    _count: int = 0
    _alone: dict[tuple[str, int, str, bool], Trained | Failure] = field(default_factory=dict)

    def __post_init__(self) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ.setdefault("KERAS_BACKEND", "torch")
        os.environ["TENSORSHARD_CACHE"] = "off"  # the seconds include the search
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED)

    def run(self, case: Case, plan: PlanCase) -> Cell:
        """Runs the case under the plan by the default call, and with ``sample_inputs`` where that may help."""
        cell = self._run(case, plan, with_samples=False)
        unsplit = cell.split_share is not None and cell.split_share < 0.5
        if plan.takes_samples and (cell.status != "exact" or unsplit):
            cell.with_samples = self._run(case, plan, with_samples=True)
        return cell

    def _run(self, case: Case, plan: PlanCase, with_samples: bool) -> Cell:
        if "precision" in plan.fields:
            return self._run_bf16(case, plan)
        expected = self._reference(case, plan, "float32")
        if isinstance(expected, Failure):
            raise BrokenCaseError(f"{case.key} alone: {expected.kind} at {expected.where}: {expected.message}")
        cell, trained = self._train(case, plan, "float32", with_samples)
        if trained is None:
            return cell
        apart = difference(trained, expected)
        if is_exact(apart):
            return cell
        finer = self._difference_in_fp64(case, plan, with_samples)
        cell.compared = "fp32" if finer is None else "fp64"
        if plan.fields.get("compile") and not is_exact(apart, finer):
            # Code that torch compiles computes some functions, such as exp, in another way than torch itself.
            compiled = self._reference(case, plan, "float32", compiled=True)
            if not isinstance(compiled, Failure):
                cell.compared += ", compiled"
                apart = difference(trained, compiled)
                if not is_exact(apart):
                    finer = self._difference_in_fp64(case, plan, with_samples, compiled=True)
        cell.status = "exact" if is_exact(apart, finer) else "wrong"
        cell.detail = f"in fp32 {apart.describe()}" + (f"; in fp64 {finer.describe()}" if finer else "")
        return cell

    def _difference_in_fp64(
        self, case: Case, plan: PlanCase, with_samples: bool, *, compiled: bool = False
    ) -> Difference | None:
        expected = self._reference(case, plan, "float64", compiled=compiled)
        if isinstance(expected, Failure):
            return None
        trained = self._train(case, plan, "float64", with_samples)[1]
        return None if trained is None else difference(trained, expected)

    def _run_bf16(self, case: Case, plan: PlanCase) -> Cell:
        path, store = self._file(), self._file()
        outcome = self._processes(models_rank.run_bf16_alone, [(case.key, store, path)])
        failed = _failed_cell(outcome)
        if failed is not None:
            failed.compared = "bf16"
            failed.stage = f"one process, {failed.stage}"
            return failed
        alone, *others = torch.load(path, **_SAVE)
        cell, trained = self._train(case, plan, "float32", False)
        cell.compared = "bf16"
        if trained is None:
            return cell
        plain = self._reference(case, plan, "float32")
        resting = {n for n, moved in plain.moved.items() if moved < RESTING} if isinstance(plain, Trained) else set()
        distances, bounds = bf16_distance(trained, alone, resting), bf16_allowance(alone, others, resting)
        if any(distance > bound for distance, bound in zip(distances, bounds, strict=True)):
            cell.status = "wrong"
            cell.detail = (
                f"losses by {distances[0]:.1e}, {bounds[0]:.1e} allowed; "
                f"weights by {distances[1]:.1e}, {bounds[1]:.1e} allowed"
            )
            return cell
        if isinstance(plain, Trained):
            away, *alone_away = (
                max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(run.losses, plain.losses, strict=True))
                for run in (trained, alone, *others)
            )
            # Batch norms over few samples drift far in bf16. How far depends on the order of the samples.
            if not away <= max(0.05, 1.2 * max(alone_away)):
                cell.status, cell.detail = "wrong", f"losses are {away:.1%} from those of fp32"
        return cell

    def _reference(self, case: Case, plan: PlanCase, dtype: str, *, compiled: bool = False) -> Trained | Failure:
        key = case.key, plan.micro_batches, dtype, compiled, plan.random_of(case)
        if key not in self._alone:
            if any(known[0] != case.key for known in self._alone):
                self._alone.clear()  # those of the case before
            path = self._file()
            outcome = self._processes(models_rank.run_alone, [(*key, path)])
            if outcome == "hung" or isinstance(outcome, str):
                raise BrokenCaseError(f"{case.key} alone: {outcome}")
            failure = outcome[0].get("failure")
            self._alone[key] = failure if failure else torch.load(path, **_SAVE)
            Path(path).unlink(missing_ok=True)
        return self._alone[key]

    def _train(self, case: Case, plan: PlanCase, dtype: str, with_samples: bool) -> tuple[Cell, Trained | None]:
        path, store = self._file(), self._file()
        options = {"dtype": dtype, "with_samples": with_samples, "limit": self.limit + 30}
        ranks = [(case.key, plan.key, rank, store, path, options) for rank in range(plan.ranks)]
        outcome = self._processes(models_rank.run_rank, ranks)
        failed = _failed_cell(outcome)
        if failed is not None:
            return failed, None
        trained: Trained = torch.load(path, **_SAVE)
        Path(path).unlink()
        cell = Cell("exact", split_share=trained.split_share, kept_share=trained.kept_share, gathered=trained.gathered)
        cell.samples = trained.samples
        cell.cpu_seconds, cell.wall_seconds = round(trained.cpu_seconds, 2), round(trained.wall_seconds, 2)
        return cell, trained

    def _file(self) -> str:
        self._count += 1
        return str(self.folder / f"{self._count}")

    def _processes(
        self, target: Callable[..., None], arguments: Sequence[tuple[Any, ...]]
    ) -> list[dict[str, Any]] | str:
        """What each process reported; "hung" if they took too long, or the end of the log of one that died."""
        started: list[tuple[Any, Connection, Path]] = []
        try:
            for given in arguments:
                ours, theirs = self._context.Pipe()
                log = Path(self._file())
                process = self._context.Process(target=target, args=(theirs, str(log), *given), daemon=True)
                process.start()
                theirs.close()
                started.append((process, ours, log))
            return _collect(started, self.limit)
        finally:
            for process, connection, log in started:
                connection.close()
                process.kill()
                process.join()
                log.unlink(missing_ok=True)


def _collect(started: Sequence[tuple[Any, Connection, Path]], limit: float) -> list[dict[str, Any]] | str:
    deadline = time.monotonic() + limit
    outcomes: dict[int, dict[str, Any]] = {}
    pending: dict[Any, int] = {connection: index for index, (_, connection, _) in enumerate(started)}
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            index = pending.pop(connection)
            try:
                outcomes[index] = connection.recv()  # type: ignore[union-attr, call-arg]
            except EOFError:
                log = started[index][2]
                lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
                return "died: " + " | ".join(lines[-4:])
            if "failure" in outcomes[index]:
                deadline = min(deadline, time.monotonic() + 3.0)
    if pending and not any("failure" in outcome for outcome in outcomes.values()):
        return "hung"
    for index, (_, connection, _) in enumerate(started):
        if index in outcomes:
            connection.send(True)
    return [outcomes[index] for index in sorted(outcomes)]


def _failed_cell(outcome: list[dict[str, Any]] | str) -> Cell | None:
    """The cell for processes that did not all succeed; None if they did."""
    if isinstance(outcome, str):
        return Cell("hung" if outcome == "hung" else "crashed", detail=outcome)
    failures = [one["failure"] for one in outcome if "failure" in one]
    if not failures:
        return None
    first = min(failures, key=lambda failure: (failure.is_relayed, failure.time))
    share = next((one["split_share"] for one in outcome if one.get("split_share") is not None), None)
    detail = first.first_sentence if first.is_sentence else f"{first.kind}: {first.first_sentence}"
    return Cell("refused" if first.is_sentence else "crashed", detail, first.stage, first.where, split_share=share)


def installed(cases: Sequence[Case]) -> list[Case]:
    """The cases whose libraries are installed."""
    return [case for case in cases if is_installed(case)]
