"""Kills runs at random instants and resumes them: nothing is lost but the steps since the last save.

As a program it does so often: ``PYTHONPATH=tests/helpers python tests/helpers/killed_runs.py --kills 1000 --nproc 4``.
With ``--program dcp`` the same model, data and optimizer are trained by FSDP2, and saved by ``dcp.save`` to one path
(``killed_dcp.py``). Ranks are forks of this process, see ``forked_ranks.py``.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from forked_ranks import ForkedRanks, KillAtFile, import_what_they_import
from tensorshard.checkpoint.integrity import check
from tensorshard.commands.train import train_worker
from tensorshard.trainer.launch.worker import run_worker
from tensorshard.trainer.loggers import read_metrics
from tensorshard.trainer.planned_run import read_config
from tensorshard.trainer.run_directory import RunDirectory
from tensorshard.weights.files.checkpoint_files import read_tensors

CONFIG = """
from torch.nn.functional import mse_loss
from torch.optim import AdamW

from tensorshard.config import LazyCall, get_config
from tensorshard.trainer.schedulers import warmup_cosine
from killed_runs import Net, Sums

train = get_config("common/train.py").train
train.steps = 40
train.estimate = False
train.global_batch_size = 8
train.eval_every = 0
train.save_every = 3
train.keep_checkpoints = 2
train.log_every = 1
model = LazyCall(Net)()
optimizer = LazyCall(AdamW, partial=True)(lr=0.01)
scheduler = LazyCall(warmup_cosine, partial=True)(warmup_steps=3, total_steps="${train.steps}")
loss = LazyCall(mse_loss, partial=True)()
data = {"train": LazyCall(Sums)()}
"""


class Net(torch.nn.Module):
    """A layer, dropout, and another layer."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.dropout = dropout
        self.inlet, self.outlet = torch.nn.Linear(4, 64), torch.nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outlet(torch.dropout(torch.relu(self.inlet(x)), self.dropout, self.training))


class Sums(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Four numbers and their sum. Reading a sample takes a while, so that kills find a run in all of its moments."""

    def __init__(self) -> None:
        self.inputs = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(0.002)
        return self.inputs[index], self.inputs[index].sum(dim=0, keepdim=True)


@dataclass
class Outcome:
    """What came of one run.

    Attributes:
        kills: how often it was killed, by what it was doing.
        found: how often, by what was there after a kill.
        faults: what should not have happened, one sentence each.
    """

    kills: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


class Program(Protocol):
    """What is killed."""

    def prepare(self, output: Path, *, background: bool) -> Callable[[], object]:
        """What each rank calls, to begin a run in `output`, or to continue the one that is there.

        Args:
            background: whether it saves in the background, if it can.
        """

    def doing(self, output: Path, touched: str = "") -> str:
        """What is under way: "start", "step", "save" or "prune". `touched`: the path that a rank opens or renames."""

    def find(self, output: Path) -> str:
        """What is there after a kill: "whole", "nothing yet", or what is wrong with it."""

    def compare(self, undisturbed: Path, output: Path) -> list[str]:
        """How the end of a run differs from that of the undisturbed one."""


class TensorShard:
    """What the workers of ``tensorshard train`` call. It saves each checkpoint under a name of its own."""

    def __init__(self) -> None:
        self._left: set[tuple[str, int]] = set()  # by saves that were killed earlier
        self._starts = 0  # bytes of the record of starts, before this one

    def prepare(self, output: Path, *, background: bool) -> Callable[[], object]:
        newest = RunDirectory(output).newest_checkpoint()
        if newest is None:
            shutil.rmtree(output, ignore_errors=True)  # killed before its first checkpoint: begun anew
        self._left, self._starts = self._hidden(output), self._recorded(output)
        file = output.parent / "small.py"
        file.write_text(CONFIG)
        overrides = [f"train.save_in_background={str(background).lower()}"]
        config = read_config(str(file), overrides, allow=["killed_runs"]).config
        call = (config, "latest" if newest else None, str(output))
        return lambda: run_worker(train_worker, call, report=True)

    def doing(self, output: Path, touched: str = "") -> str:
        if self._recorded(output) in (self._starts, 0):
            return "start"
        names = [touched] if touched else [name for name, _ in self._hidden(output) - self._left]
        doing = "save" if any(".saving" in name for name in names) else "step"
        return "prune" if any(".deleting" in name for name in names) else doing

    def _recorded(self, output: Path) -> int:
        sessions = RunDirectory(output).sessions
        return sessions.stat().st_size if sessions.is_file() else 0

    def _hidden(self, output: Path) -> set[tuple[str, int]]:
        folder = output / "checkpoints"
        with suppress(FileNotFoundError):
            return {(entry.name, entry.inode()) for entry in os.scandir(folder) if entry.name.startswith(".")}
        return set()

    def find(self, output: Path) -> str:
        logged = output / "rank0.log"
        saved = re.findall(r"saved checkpoint \S*step-(\d+)", logged.read_text()) if logged.is_file() else []
        newest = RunDirectory(output).newest_checkpoint()
        if newest is None:
            return "nothing yet" if not saved else "lost"
        check(newest)
        return "whole" if not saved or int(newest.name.removeprefix("step-")) >= int(saved[-1]) else "older"

    def compare(self, undisturbed: Path, output: Path) -> list[str]:
        paths = [RunDirectory(path).newest_checkpoint() for path in (undisturbed, output)]
        if None in paths or paths[0].name != paths[1].name:  # type: ignore[union-attr]
            return [f"the last checkpoints are {paths}"]
        whole, resumed = (read_tensors(path, "") for path in paths)  # type: ignore[arg-type]
        differ = [name for name, value in whole.items() if not torch.equal(value, resumed[name])]
        losses = [[line["loss"] for line in read_metrics(path / "metrics.jsonl")] for path in (undisturbed, output)]
        return [f"{differ} differ"] * bool(differ) + ["the losses differ"] * (losses[0] != losses[1])


def undisturbed(folder: Path, nproc: int, program: Program | None = None) -> float:
    """Trains to the end in ``folder / "undisturbed"``; returns the seconds from the start of the ranks to their end.

    This process imports what the ranks have imported, so that later ones begin faster.
    """
    program, output, names = program or TensorShard(), folder / "undisturbed", folder / "imported"
    train = program.prepare(output, background=False)

    def train_and_tell() -> None:
        train()
        if os.environ["RANK"] == "0":
            names.write_text("\n".join(sys.modules))

    ranks = ForkedRanks(nproc, train_and_tell, folder / "meeting-undisturbed", folder / "undisturbed.log")
    codes = ranks.wait(600)
    assert not any(codes), (folder / "undisturbed.log").read_text()
    import_what_they_import(set(names.read_text().split("\n")))
    return _timed(program, folder / "timed", nproc)


def _timed(program: Program, output: Path, nproc: int) -> float:
    """Seconds that a run takes whose modules are imported."""
    train, started = program.prepare(output, background=False), time.monotonic()
    codes = ForkedRanks(nproc, train, Path(f"{output}-meeting"), Path(f"{output}.log")).wait(600)
    assert not any(codes), Path(f"{output}.log").read_text()
    shutil.rmtree(output)
    return time.monotonic() - started


def kill_and_resume(
    folder: Path, nproc: int, seed: int, seconds: float, most: int = 12, program: Program | None = None
) -> Outcome:
    """A run beside the undisturbed one of `folder`, killed up to `most` times, and resumed until it ends.

    Half of the kills, by chance, come after some time, and half as a rank opens, renames or removes a file of a
    checkpoint: saves and prunes are short, and few of the others would meet one. Runs with an odd seed save in the
    background, if the program can.

    Args:
        seconds: that the undisturbed one took.
    """
    program = program or TensorShard()
    draws, outcome, output = random.Random(seed), Outcome(), folder / f"run-{seed}"
    log, note, starts = Path(f"{output}.log"), folder / f"note-{seed}", 0
    while True:
        may_kill = sum(outcome.kills.values()) < most
        by_file = may_kill and draws.random() < 0.5
        kill = _kill_at_file(program, output, note, nproc, draws) if by_file else None
        train = program.prepare(output, background=bool(seed % 2))
        ranks = ForkedRanks(nproc, train, folder / f"meeting-{seed}-{starts}", log, kill)
        starts += 1
        who = doing = ""
        if may_kill and not by_file:
            _wait(ranks, draws.uniform(0, seconds / 2))  # later instants come after the next start
            doing = program.doing(output)
            who = ranks.kill(draws)
        try:
            codes = ranks.wait(600)
        except TimeoutError as error:
            outcome.faults.append(f"seed {seed}: {error}: {log.read_text()[-2000:]}")
            return outcome
        if not any(codes):
            break
        if -signal.SIGKILL not in codes:
            outcome.faults.append(f"seed {seed}: a start failed: {log.read_text()[-2000:]}")
            return outcome
        if kill is not None:
            doing, who = note.read_text(), "all" if kill.everyone else "one"
        outcome.kills[f"{doing}, {who}"] += 1
        found = program.find(output)
        outcome.found[found] += 1
        if found not in ("whole", "nothing yet"):
            outcome.faults.append(f"seed {seed}: after a kill the checkpoint is {found}")
    outcome.faults += [f"seed {seed}: {fault}" for fault in program.compare(folder / "undisturbed", output)]
    shutil.rmtree(output)
    return outcome


def _kill_at_file(program: Program, output: Path, note: Path, nproc: int, draws: random.Random) -> KillAtFile:
    rank = draws.randrange(nproc) if draws.random() < 0.5 else 0  # which does most of it
    return KillAtFile(
        output,
        rank,
        event=draws.randrange(60 if rank == 0 else 6),
        delay=draws.choice([0.0, draws.uniform(0, 0.01)]),
        in_start=draws.random() < 0.2,
        everyone=draws.random() < 0.5,
        note=note,
        doing=lambda path: program.doing(output, path),
    )


def _wait(ranks: ForkedRanks, seconds: float) -> None:
    """Waits so long, or until all ranks have ended."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and len(ranks.ended()) < len(ranks.pids):
        time.sleep(0.002)


def main() -> None:
    """Kills and resumes until there were so many kills; writes the result as JSON."""
    from killed_dcp import Dcp

    programs: dict[str, Program] = {"tensorshard": TensorShard(), "dcp": Dcp()}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", choices=list(programs), default="tensorshard")
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no further run is begun after so many")
    parser.add_argument("--out", type=Path, help="a JSON file; what it holds is added to")
    args = parser.parse_args()
    torch.set_num_threads(1)
    program = programs[args.program]
    results = json.loads(args.out.read_text()) if args.out is not None and args.out.exists() else {}
    total, end, runs = Outcome(), time.monotonic() + args.seconds, 0
    if args.program in results:
        earlier = results[args.program]
        total.kills, total.found = Counter(earlier["killed during"]), Counter(earlier["found after a kill"])
        total.faults, runs = earlier["faults"], earlier["runs"]
    with tempfile.TemporaryDirectory() as name:
        seconds = undisturbed(Path(name), args.nproc, program)
        while sum(total.kills.values()) < args.kills and time.monotonic() < end:
            found = kill_and_resume(Path(name), args.nproc, runs, seconds, program=program)
            total.kills += found.kills
            total.found += found.found
            total.faults += found.faults
            runs += 1
            result = {
                "ranks": args.nproc, "runs": runs, "kills": sum(total.kills.values()),
                "killed during": dict(sorted(total.kills.items())),
                "found after a kill": dict(sorted(total.found.items())), "faults": total.faults,
            }  # fmt: skip
            print(json.dumps({**result, "faults": len(total.faults)}), flush=True)
            if args.out is not None:
                args.out.write_text(json.dumps({**results, args.program: result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
