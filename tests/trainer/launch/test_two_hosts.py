"""Two hosts, in network namespaces of this machine: one is killed, and the run ends as the undisturbed one."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from killed_runs import CONFIG
from tensorshard.trainer.loggers import read_metrics
from tensorshard.trainer.run_directory import RunDirectory
from tensorshard.weights.files.checkpoint_files import read_tensors

pytestmark = pytest.mark.slow

_ETC = Path("/etc/netns")  # of the files that a namespace sees in /etc
_MEETING, _OTHER = (
    f"tensorshard-{os.getpid()}-{letter}" for letter in "ab"
)  # another process may run such a test, too
_HOSTS = {_MEETING: "10.77.0.1", _OTHER: "10.77.0.2"}


def _ip(*words: str) -> bool:
    return subprocess.run(["ip", *words], capture_output=True, check=False).returncode == 0


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two hosts with names, addresses, and a cable between them."""
    first, second = names = list(_HOSTS)
    try:
        if not all(_ip("netns", "add", name) for name in names):
            pytest.skip("needs iproute2 and the right to make network namespaces")
        assert _ip("link", "add", "cable-a", "netns", first, "type", "veth", "peer", "name", "cable-b", "netns", second)
        for name, cable in zip(names, ("cable-a", "cable-b"), strict=True):
            folder = _ETC / name
            folder.mkdir(parents=True, exist_ok=True)
            lines = [f"{address} {other}\n" for other, address in _HOSTS.items()]
            (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
            assert _ip("-n", name, "addr", "add", f"{_HOSTS[name]}/24", "dev", cable)
            assert _ip("-n", name, "link", "set", cable, "up") and _ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            _kill(name)
            _ip("netns", "del", name)
            shutil.rmtree(_ETC / name, ignore_errors=True)


def _kill(host: str) -> None:
    """Ends all processes of a host at once, as a power cut does."""
    listed = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True, check=False)
    for pid in listed.stdout.split():
        os.kill(int(pid), signal.SIGKILL)


def _start(host: str, folder: Path, output: str, *options: str) -> subprocess.Popen[bytes]:
    train = [
        sys.executable,
        "-m",
        "tensorshard.cli",
        "train",
        str(folder / "small.py"),
        "--allow",
        "killed_runs",
        "model.dropout=0",
    ]
    process = ["--output", str(folder / output), "--nproc", "2", "--rdzv-endpoint", f"{_MEETING}:29500", *options]
    script = f'hostname {host}; exec "$@"'
    with (folder / f"{output}-{host}.log").open("ab") as log:
        return subprocess.Popen(
            ["ip", "netns", "exec", host, "unshare", "--uts", "sh", "-c", script, "sh", *train, *process],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        )


def _until(reached: Callable[[], bool], folder: Path, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, _said(folder)
        time.sleep(0.05)


def _said(folder: Path) -> str:
    return "\n".join(f"== {log.name}\n{log.read_text()[-3000:]}" for log in sorted(folder.glob("*.log")))


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path) -> None:
    _until(lambda: all(process.poll() is not None for process in processes), folder)
    assert [process.returncode for process in processes] == [0] * len(processes), _said(folder)


@pytest.mark.parametrize("goes_on_alone", [False, True], ids=["comes back", "goes on alone"])
def test_a_host_that_is_killed(hosts, tmp_path, goes_on_alone):
    (tmp_path / "small.py").write_text(CONFIG)
    _wait([_start(host, tmp_path, "undisturbed", "--nnodes", "2") for host in hosts], tmp_path)
    options = ["--max-restarts", "5", "--nnodes", "1:2" if goes_on_alone else "2"]
    first = _start(hosts[0], tmp_path, "run", *options)
    _start(hosts[1], tmp_path, "run", *options)
    run = RunDirectory(tmp_path / "run")
    _until(lambda: any(step >= 6 for step in run.checkpoint_steps()), tmp_path)
    _kill(hosts[1])
    again = [] if goes_on_alone else [_start(hosts[1], tmp_path, "run", *options)]
    _wait([first, *again], tmp_path)
    expected, found = (
        [line["loss"] for line in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("undisturbed", "run")
    )
    # Half of the ranks sum in another order.
    rounding = {"rtol": 1e-5, "atol": 1e-6} if goes_on_alone else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), **rounding)
    whole = read_tensors(RunDirectory(tmp_path / "undisturbed").checkpoint(40), "")
    for name, value in read_tensors(run.checkpoint(40), "").items():
        if value.is_floating_point():  # not the streams of random numbers
            torch.testing.assert_close(value, whole[name], **rounding)
