"""The lines of docs/clusters.md start worlds that train: by two of torchrun's agents, by ranks alone, and by Ray."""

import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest
import yaml

from pages import Block, blocks
from tensorshard.trainer.launch.launcher import free_port

_BLOCKS = blocks("docs/clusters.md")
_SECONDS = 300


def _block(language: str, beginning: str) -> Block:
    (found,) = (block for block in _BLOCKS if block.language == language and block.code.startswith(beginning))
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the page's two scripts."""
    for name in ("train.py", "with_ray.py"):
        (tmp_path / name).write_text(_block("python", f"# {name}").code)
    return tmp_path


def _together(commands: list[list[str]], folder: Path, environments: list[dict[str, str]]) -> str:
    """What the commands print, each run as if on a machine of its own."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    running = [
        subprocess.Popen(
            command, cwd=folder, env={**inherited, **environment}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for command, environment in zip(commands, environments, strict=True)
    ]  # fmt: skip
    try:
        said = "".join(process.communicate(timeout=_SECONDS)[0] for process in running)
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * len(running), said
    return said


def _torchrun_lines() -> list[list[str]]:
    """The torchrun command of each way to start, as words."""
    shell = [line for block in _BLOCKS if block.language == "bash" for line in block.code.splitlines()]
    commands = [line.removeprefix("srun ") for line in shell]
    lines = [shlex.split(command) for command in commands if command.startswith("torchrun")]
    _, job = yaml.safe_load_all(_block("yaml", "apiVersion").code)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return [*lines, container["command"]]


def test_all_ways_start_torchrun_alike():
    lines = _torchrun_lines()
    assert len(lines) == 3
    variable = {"--rdzv-id", "--rdzv-endpoint"}
    fixed = [[w for i, w in enumerate(line) if line[i - 1] not in variable] for line in lines]
    assert fixed[0] == fixed[1] == fixed[2]


def _alone(folder: Path) -> str:
    """What the script says on one process."""
    said = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(said):
        runpy.run_path("train.py", run_name="__main__")
    return said.getvalue()


def _same_loss(said: str, alone: str) -> bool:
    two, one = re.search(r"2 ranks: loss ([\d.]+)", said), re.search(r"1 ranks: loss ([\d.]+)", alone)
    return two is not None and one is not None and two[1] == one[1]


@pytest.mark.slow
def test_two_machines(folder, ranks):
    """Two agents on one machine, each with one process, by the page's line."""
    text = shlex.join(_torchrun_lines()[0])
    text = text.replace("--nproc-per-node 8", "--nproc-per-node 1 --local-addr 127.0.0.1")
    words = shlex.split(text.replace("host0:29500", f"127.0.0.1:{free_port()}"))
    command = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    said = _together([command, command], folder, [{}, {}])
    (folder / "checkpoints" / "step-4").rename(folder / "theirs")
    assert _same_loss(said, ranks(1, _alone, folder)[0])


@pytest.mark.slow
def test_ranks_by_the_scheduler(folder, ranks):
    """Slurm's other way: no torchrun, the scheduler's numbers as ranks."""
    line = next(line for block in _BLOCKS for line in block.code.splitlines() if line.startswith("srun bash"))
    started = shlex.split(line)[-1].replace("python", shlex.quote(sys.executable))
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "SLURM_NTASKS": "2"}
    tasks = [{**meet, "SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in "01"]
    said = _together([["bash", "-c", started]] * 2, folder, tasks)
    (folder / "checkpoints" / "step-4").rename(folder / "theirs")
    assert _same_loss(said, ranks(1, _alone, folder)[0])


@pytest.mark.skipif(util.find_spec("ray") is None, reason="needs Ray")
def test_ray(folder):
    script = (folder / "with_ray.py").read_text()
    (folder / "quiet.py").write_text(
        script.replace("ray.init(num_cpus=4)", "ray.init(num_cpus=4, include_dashboard=False)")
    )
    assert "2 ranks: loss" in _together([[sys.executable, "quiet.py"]], folder, [{}])
