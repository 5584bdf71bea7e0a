"""Kills runs at random instants and resumes them: nothing is lost but the steps since the last save.

As a program it does so often: ``PYTHONPATH=tests/helpers python tests/helpers/killed_runs.py --kills 1000 --nproc 4``.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tensorshard.trainer.loggers import read_metrics
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
        faults: what should not have happened, one sentence each.
    """

    kills: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def undisturbed(folder: Path, nproc: int) -> float:
    """Trains to the end in ``folder / "undisturbed"``; returns the seconds of its steps."""
    config = folder / "small.py"
    config.write_text(CONFIG)
    process = _start(config, folder / "undisturbed", nproc)
    assert process.wait(600) == 0, (folder / "undisturbed.log").read_text()
    return sum(line["step_seconds"] for line in read_metrics(folder / "undisturbed" / "metrics.jsonl"))


def kill_and_resume(folder: Path, nproc: int, seed: int, seconds: float, most: int = 4) -> Outcome:
    """A run beside the undisturbed one of `folder`, killed up to `most` times, and resumed until it ends.

    Args:
        seconds: that the undisturbed one trained.
    """
    draws, outcome, output = random.Random(seed), Outcome(), folder / f"run-{seed}"
    directory = RunDirectory(output)
    while True:
        process = _start(folder / "small.py", output, nproc)
        if sum(outcome.kills.values()) < most:
            before = _stamp(output)
            deadline = time.monotonic() + 300
            while process.poll() is None and _stamp(output) == before and time.monotonic() < deadline:
                time.sleep(0.005)
            # Sometimes in the end of the start, mostly somewhere in what is left of the steps.
            time.sleep(draws.uniform(0, seconds * 1.2))
            if process.poll() is None:
                outcome.kills[_kill(process, draws, directory)] += 1
                saved = _last_saved(output)
                newest = directory.newest_checkpoint()
                found = 0 if newest is None else int(newest.name.removeprefix("step-"))
                if found < saved:
                    outcome.faults.append(f"seed {seed}: step {saved} was saved, and {newest} is the newest whole one")
                continue
        if process.wait(600) == 0:
            break
        outcome.faults.append(f"seed {seed}: a start failed: {Path(f'{output}.log').read_text()[-2000:]}")
        return outcome
    _compare(folder / "undisturbed", output, outcome, seed)
    shutil.rmtree(output)
    return outcome


def _start(config: Path, output: Path, nproc: int) -> "subprocess.Popen[bytes]":
    newest = RunDirectory(output).newest_checkpoint()
    if newest is None:
        shutil.rmtree(output, ignore_errors=True)  # killed before its first checkpoint: begun anew
    command = [sys.executable, "-m", "tensorshard.cli", "train", str(config), "--nproc", str(nproc)]
    command += ["--output", str(output), "--allow", "killed_runs", *(["--resume"] if newest is not None else [])]
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    with Path(f"{output}.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": paths})


def _stamp(output: Path) -> int:
    """Changes when a start has begun to train."""
    sessions = output / "sessions.jsonl"
    return sessions.stat().st_size if sessions.is_file() else 0


def _kill(process: "subprocess.Popen[bytes]", draws: random.Random, directory: RunDirectory) -> str:
    """Kills one rank, or all processes; returns what was under way."""
    workers = _children(process.pid)
    folder = directory.path / "checkpoints"
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    doing = "save" if any(".saving" in name for name in names) else "step"
    doing = "prune" if any(".deleting" in name for name in names) else doing
    one = bool(workers) and draws.random() < 0.5
    for pid in [draws.choice(workers)] if one else [*workers, process.pid]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            doing = "end"
    process.wait(120)
    return f"{doing}, {'one' if one else 'all'}"


def _children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


def _last_saved(output: Path) -> int:
    logged = output / "rank0.log"
    found = re.findall(r"saved checkpoint \S*step-(\d+)", logged.read_text()) if logged.is_file() else []
    return int(found[-1]) if found else 0


def _compare(undisturbed: Path, output: Path, outcome: Outcome, seed: int) -> None:
    paths = [RunDirectory(path).newest_checkpoint() for path in (undisturbed, output)]
    if None in paths or paths[0].name != paths[1].name:  # type: ignore[union-attr]
        outcome.faults.append(f"seed {seed}: the last checkpoints are {paths}")
        return
    whole, resumed = (read_tensors(path, "") for path in paths)  # type: ignore[arg-type]
    differ = [name for name, value in whole.items() if not torch.equal(value, resumed[name])]
    if differ:
        outcome.faults.append(f"seed {seed}: {differ} differ from the undisturbed run's")
    losses = [[line["loss"] for line in read_metrics(path / "metrics.jsonl")] for path in (undisturbed, output)]
    if losses[0] != losses[1]:
        outcome.faults.append(f"seed {seed}: the losses differ from the undisturbed run's")


def main() -> None:
    """Kills and resumes until there were so many kills; writes the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no further run is begun after so many")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    total, end, runs = Outcome(), time.monotonic() + args.seconds, 0
    with tempfile.TemporaryDirectory() as name:
        seconds = undisturbed(Path(name), args.nproc)
        while sum(total.kills.values()) < args.kills and time.monotonic() < end:
            found = kill_and_resume(Path(name), args.nproc, runs, seconds)
            total.kills += found.kills
            total.faults += found.faults
            runs += 1
            result = {
                "ranks": args.nproc, "runs": runs, "kills": sum(total.kills.values()),
                "killed during": dict(sorted(total.kills.items())), "faults": total.faults,
            }  # fmt: skip
            print(json.dumps(result), flush=True)
            if args.out is not None:
                args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
