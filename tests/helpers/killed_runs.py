"""Kills runs at random instants and resumes them: nothing is lost but the steps since the last save.

As a program it does so often: ``PYTHONPATH=tests/helpers python tests/helpers/killed_runs.py --kills 1000 --nproc 4``.
With ``--program dcp`` the same model, data and optimizer are trained by FSDP2, and saved by ``dcp.save`` to one path.
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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from tensorshard.checkpoint.manifest import check
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
        found: how often, by what was there after a kill.
        faults: what should not have happened, one sentence each.
    """

    kills: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


class Program(Protocol):
    """What is killed."""

    def command(self, output: Path, nproc: int) -> list[str]:
        """Begins a run in `output`, or continues the one that is there."""

    def stamp(self, output: Path) -> int:
        """Changes when a start has begun to train."""

    def seconds(self, output: Path) -> float:
        """That a run which ended has trained."""

    def doing(self, output: Path) -> str:
        """What is under way: "step", "save" or "prune"."""

    def find(self, output: Path) -> str:
        """What is there after a kill: "whole", "nothing yet", or what is wrong with it."""

    def compare(self, undisturbed: Path, output: Path) -> list[str]:
        """How the end of a run differs from that of the undisturbed one."""


class TensorShard:
    """``tensorshard train``, which saves each checkpoint under a name of its own."""

    def __init__(self) -> None:
        self._left: set[tuple[str, int]] = set()  # by saves that were killed earlier

    def command(self, output: Path, nproc: int) -> list[str]:
        self._left = self._hidden(output)
        newest = RunDirectory(output).newest_checkpoint()
        if newest is None:
            shutil.rmtree(output, ignore_errors=True)  # killed before its first checkpoint: begun anew
        config = output.parent / "small.py"
        config.write_text(CONFIG)
        command = [sys.executable, "-m", "tensorshard.cli", "train", str(config), "--nproc", str(nproc)]
        return [*command, "--output", str(output), "--allow", "killed_runs", *(["--resume"] if newest else [])]

    def stamp(self, output: Path) -> int:
        sessions = output / "sessions.jsonl"
        return sessions.stat().st_size if sessions.is_file() else 0

    def seconds(self, output: Path) -> float:
        return sum(line["step_seconds"] for line in read_metrics(output / "metrics.jsonl"))

    def doing(self, output: Path) -> str:
        names = {name for name, _ in self._hidden(output) - self._left}
        doing = "save" if any(".saving" in name for name in names) else "step"
        return "prune" if any(".deleting" in name for name in names) else doing

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


class Dcp:
    """FSDP2 under torchrun, saved by torch's distributed checkpoints: ``dcp.save`` again and again to one path."""

    def command(self, output: Path, nproc: int) -> list[str]:
        output.mkdir(exist_ok=True)
        (output / "saving").unlink(missing_ok=True)
        agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
        return [*agent, str(Path(__file__)), "--train", str(output)]

    def stamp(self, output: Path) -> int:
        return len(list(output.glob("started-*")))

    def seconds(self, output: Path) -> float:
        return float((output / "seconds").read_text())

    def doing(self, output: Path) -> str:
        return "save" if (output / "saving").exists() else "step"

    def find(self, output: Path) -> str:
        """Compares the checkpoint with those that the undisturbed run wrote, each to a file of its own."""
        from torch.distributed.checkpoint.api import CheckpointException  # which is no Exception

        if not (output / "saved").exists() and not (output / "checkpoint" / ".metadata").exists():
            return "nothing yet"
        try:
            found = _whole_state(output / "checkpoint")
            expected = torch.load(output.parent / "undisturbed" / f"step-{found['step']}.pt", weights_only=False)
        except (Exception, CheckpointException) as error:  # whatever it raises, the checkpoint cannot be read
            shutil.rmtree(output)
            return f"unreadable: {type(error).__name__}"
        if _tensors(found) == _tensors(expected):
            return "whole"
        shutil.rmtree(output)
        return "loads, and mixes two saves"

    def compare(self, undisturbed: Path, output: Path) -> list[str]:
        ends = [_tensors(_whole_state(path / "checkpoint")) for path in (undisturbed, output)]
        return ["the last checkpoint differs"] * (ends[0] != ends[1])


def _whole_state(checkpoint: Path) -> dict[str, Any]:
    """The state in a checkpoint of DCP, on one process."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with tempfile.TemporaryDirectory() as folder:
        dcp_to_torch_save(checkpoint, Path(folder) / "state.pt")
        return dict(torch.load(Path(folder) / "state.pt", weights_only=False))


def _tensors(state: Any, name: str = "") -> dict[str, Any]:
    if isinstance(state, dict):
        return {key: value for word, part in state.items() for key, value in _tensors(part, f"{name}.{word}").items()}
    return {name: state.tolist() if isinstance(state, torch.Tensor) else state}


def train_with_dcp(output: Path) -> None:
    """One rank of the other program. It marks what it does in files, for the one that kills."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    rank, size, data = dist.get_rank(), dist.get_world_size(), Sums()
    torch.manual_seed(0)
    model = fully_shard(Net(), mesh=dist.init_device_mesh("cpu", (size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    begin = 0

    def state(step: int) -> dict[str, Any]:
        weights, states = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": states, "step": step}

    checkpoint = output / "checkpoint"
    if (checkpoint / ".metadata").exists():
        loaded = state(0)
        dcp.load(loaded, checkpoint_id=checkpoint)
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        begin = loaded["step"]
    dist.barrier()
    if rank == 0:
        (output / f"started-{os.getpid()}").touch()
    seconds = 0.0
    for step in range(begin + 1, 41):
        started = time.monotonic()
        torch.manual_seed(step * size + rank)  # for dropout
        samples = [data[(8 * step + i) % len(data)] for i in range(rank, 8, size)]
        inputs, targets = (torch.stack(parts) for parts in zip(*samples, strict=True))
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 0 or step == 40:
            if rank == 0:
                (output / "saving").touch()
            dcp.save(state(step), checkpoint_id=checkpoint)
            if rank == 0:
                (output / "saving").unlink()
                (output / "saved").touch()
                seconds += time.monotonic() - started
                if output.name == "undisturbed":
                    torch.save(_whole_state(checkpoint), output / f"step-{step}.pt")
            dist.barrier()
        else:
            seconds += time.monotonic() - started
    if rank == 0:
        (output / "seconds").write_text(str(seconds))
    dist.destroy_process_group()


PROGRAMS: dict[str, Program] = {"tensorshard": TensorShard(), "dcp": Dcp()}


def undisturbed(folder: Path, nproc: int, program: Program = PROGRAMS["tensorshard"]) -> float:
    """Trains to the end in ``folder / "undisturbed"``; returns the seconds of its steps."""
    output = folder / "undisturbed"
    process = _start(program, output, nproc)
    assert process.wait(600) == 0, (folder / "undisturbed.log").read_text()
    return program.seconds(output)


def kill_and_resume(
    folder: Path, nproc: int, seed: int, seconds: float, most: int = 4, program: Program = PROGRAMS["tensorshard"]
) -> Outcome:
    """A run beside the undisturbed one of `folder`, killed up to `most` times, and resumed until it ends.

    Every other kill, by chance, waits for the next save: saves are short, and few kills would meet one.

    Args:
        seconds: that the undisturbed one trained.
    """
    draws, outcome, output = random.Random(seed), Outcome(), folder / f"run-{seed}"
    while True:
        before = program.stamp(output)
        process = _start(program, output, nproc)
        if sum(outcome.kills.values()) < most:
            _wait(process, lambda before=before: program.stamp(output) not in (before, 0), 300)  # type: ignore[misc]
            # Sometimes in the end of the start, mostly somewhere in what is left of the steps.
            time.sleep(draws.uniform(0, seconds * 1.2))
            if draws.random() < 0.5:
                _wait(process, lambda: program.doing(output) == "save", 300)
                time.sleep(draws.uniform(0, 0.03))
            if process.poll() is None:
                outcome.kills[_kill(process, draws, program, output)] += 1
                found = program.find(output)
                outcome.found[found] += 1
                if found not in ("whole", "nothing yet"):
                    outcome.faults.append(f"seed {seed}: after a kill the checkpoint is {found}")
                continue
        if process.wait(600) == 0:
            break
        outcome.faults.append(f"seed {seed}: a start failed: {Path(f'{output}.log').read_text()[-2000:]}")
        return outcome
    outcome.faults += [f"seed {seed}: {fault}" for fault in program.compare(folder / "undisturbed", output)]
    shutil.rmtree(output)
    return outcome


def _wait(process: "subprocess.Popen[bytes]", reached: Callable[[], bool], seconds: float) -> None:
    """Waits for what is `reached`, or for the end of the process."""
    deadline = time.monotonic() + seconds
    while process.poll() is None and not reached() and time.monotonic() < deadline:
        time.sleep(0.002)


def _start(program: Program, output: Path, nproc: int) -> "subprocess.Popen[bytes]":
    command = program.command(output, nproc)
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    with Path(f"{output}.log").open("ab") as log:
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def _kill(process: "subprocess.Popen[bytes]", draws: random.Random, program: Program, output: Path) -> str:
    """Kills one rank, or all processes; returns what was under way."""
    workers = _children(process.pid)
    doing = program.doing(output)
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


def main() -> None:
    """Kills and resumes until there were so many kills; writes the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", choices=list(PROGRAMS), default="tensorshard")
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no further run is begun after so many")
    parser.add_argument("--out", type=Path, help="a JSON file; what it holds is added to")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)  # a rank of DCP's program
    args = parser.parse_args()
    if args.train is not None:
        train_with_dcp(args.train)
        return
    program = PROGRAMS[args.program]
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
            print(json.dumps(result), flush=True)
            if args.out is not None:
                args.out.write_text(json.dumps({**results, args.program: result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
