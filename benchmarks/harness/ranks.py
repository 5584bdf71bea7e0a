"""Runs a module on new rank processes, with the environment that torchrun would give them."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tensorshard.trainer.launch.launcher import free_port

_POLL_SECONDS = 0.05
_LOG_LINES = 30  # lines of a failed rank's log that the error has


class RankError(RuntimeError):
    """A rank failed or took too long."""


def run_ranks(
    module: str, arguments: Sequence[str], world_size: int, *, environment: Mapping[str, str], timeout: float
) -> None:
    """Runs ``python -m module arguments...`` on `world_size` ranks of this machine and waits for all of them.

    Every process gets one thread (torchrun's default too), so that ranks do not fight over cores.

    Args:
        environment: further variables of the ranks; they win over this process's.
        timeout: seconds after which the ranks are killed.

    Raises:
        RankError: a rank failed (the message has the end of the first such rank's log), or the time was up.
    """
    common = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "TENSORSHARD_PROCESS_SETTINGS": "1",  # these processes are ranks and nothing else
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        **environment,
    }
    command = [sys.executable, "-m", module, *arguments]
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(world_size)]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, log in enumerate(logs):
                with log.open("wb") as output:
                    processes.append(
                        subprocess.Popen(
                            command,
                            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                            stdin=subprocess.DEVNULL,
                            stdout=output,
                            stderr=subprocess.STDOUT,
                        )
                    )
            _wait(processes, logs, timeout)
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _wait(processes: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:  # neither running (None) nor well (0)
                raise RankError(f"rank {rank} ended with exit status {code}; its log ends\n{_tail(logs[rank])}")
        if None not in codes:
            return
        if time.monotonic() > deadline:
            rank = codes.index(None)
            raise RankError(f"rank {rank} still runs after {timeout:.0f} s; its log ends\n{_tail(logs[rank])}")
        time.sleep(_POLL_SECONDS)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
