"""Ranks of a world as forks of this process, which has imported what they need, and what kills them.

A rank that is started anew imports torch for seconds; a fork begins at once. This process must have no process group
and no threads, which forks would lack.
"""

import gc
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from tensorshard.trainer.launch.launcher import local_environment
from tensorshard.trainer.launch.worker import die_with_parent

_PATIENCE = 120.0  # seconds that survivors of a kill may take to end after a SIGTERM, as torchrun's agent sends it
_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "shutil.rmtree")


@dataclass(frozen=True)
class KillAtFile:
    """A kill as a rank opens, renames or removes its next file, or lists a folder.

    Args:
        folder: that counts only files below it.
        rank: that is killed, or that kills all.
        event: at which such call of that rank, counted from 0.
        delay: seconds after it.
        in_start: whether calls count before training has begun, too.
        everyone: whether all ranks are killed.
        note: a file that gets what `doing` says of the path; "save in the background" if another thread touches it.
        doing: what is under way when a path is touched.
    """

    folder: Path
    rank: int
    event: int
    delay: float
    in_start: bool
    everyone: bool
    note: Path
    doing: Callable[[str], str]

    def arm(self) -> None:
        """Called in the rank: from here on its calls are counted."""
        left = self.event

        def see(event: str, args: tuple[Any, ...]) -> None:
            nonlocal left
            if event not in _EVENTS or not args or not str(args[0]).startswith(f"{self.folder}/"):
                return
            doing = self.doing(str(args[0]))
            if doing == "start" and not self.in_start:
                return
            left -= 1
            if left == -1:
                is_main = threading.current_thread() is threading.main_thread()
                self.note.write_text(doing if is_main else "save in the background")
                if self.delay:
                    threading.Timer(self.delay, self._kill).start()
                else:
                    self._kill()

        sys.addaudithook(see)

    def _kill(self) -> None:
        if self.everyone:
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


class ForkedRanks:
    """Ranks that run one function. They are a process group of the system, and end with this process.

    Args:
        count: of ranks.
        function: that each calls, in an environment as torchrun gives it to workers.
        folder: for the file in which they meet; it must not exist.
        log: that their output is added to.
        kill: of one of them by itself.
    """

    def __init__(
        self, count: int, function: Callable[[], object], folder: Path, log: Path, kill: KillAtFile | None = None
    ) -> None:
        folder.mkdir()
        sys.stdout.flush()
        sys.stderr.flush()
        self._codes: dict[int, int] = {}  # of those that have ended
        self.pids: list[int] = []
        for rank in range(count):
            pid = os.fork()
            if pid == 0:
                _be_rank(rank, count, function, folder, log, kill, self.pids)
            os.setpgid(pid, self.pids[0] if self.pids else pid)
            self.pids.append(pid)

    def ended(self) -> dict[int, int]:
        """The exit codes of the ranks that have ended, by their process; a negative one is a signal's."""
        for pid in set(self.pids) - set(self._codes):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                self._codes[pid] = os.waitstatus_to_exitcode(status)
        return self._codes

    def kill(self, draws: random.Random) -> str:
        """Kills one rank, or all; returns which: "one" or "all"."""
        one = draws.random() < 0.5
        for pid in [draws.choice(self.pids)] if one else self.pids:
            if pid not in self._codes:
                os.kill(pid, signal.SIGKILL)
        return "one" if one else "all"

    def wait(self, seconds: float) -> list[int]:
        """The exit codes of all ranks. If one of them fails, the others are asked to end, as torchrun's agent does.

        Raises:
            TimeoutError: they did not end in so many `seconds`. They are killed.
        """
        end, asked = time.monotonic() + seconds, False
        while len(self.ended()) < len(self.pids):
            if not asked and any(self._codes.values()):
                asked, end = True, min(end, time.monotonic() + _PATIENCE)
                for pid in set(self.pids) - set(self._codes):
                    os.kill(pid, signal.SIGTERM)
            if time.monotonic() > end:
                self.close()
                raise TimeoutError(f"ranks did not end, {'asked to' if asked else 'though none failed'}")
            time.sleep(0.002)
        return [self._codes[pid] for pid in self.pids]

    def close(self) -> None:
        """Ends those that are left."""
        for pid in set(self.pids) - set(self._codes):
            os.kill(pid, signal.SIGKILL)
            self._codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _be_rank(
    rank: int,
    count: int,
    function: Callable[[], object],
    folder: Path,
    log: Path,
    kill: KillAtFile | None,
    others: list[int],
) -> NoReturn:
    code = 1
    try:
        with suppress(ProcessLookupError, PermissionError):
            os.setpgid(0, others[0] if others else 0)  # the parent does so, too, whoever comes first
        die_with_parent()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (0, 1, 2):
            os.dup2(descriptor if stream else os.open(os.devnull, os.O_RDONLY), stream)
        os.environ.update(local_environment(folder))
        os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)})
        os.environ.update({"LOCAL_WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"})
        torch.set_num_threads(1)
        if kill is not None and kill.rank == rank:
            kill.arm()
        function()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # what this process has to do at its end is not theirs


def import_what_they_import(names: set[str]) -> None:
    """Imports modules here, so that forks have them. Those that cannot be imported here are left out.

    What is here now is no more looked at for garbage: each look would copy the memory of a fork.
    """
    for name in sorted(names - set(sys.modules)):
        with suppress(Exception):
            __import__(name)
    gc.collect()
    gc.freeze()
