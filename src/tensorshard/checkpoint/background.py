"""Saves that go on while training does: a thread of each rank writes, and rank 0's completes the checkpoint.

The threads make no collective. They tell each other through the key-value store of the world what they have written.
The main thread asks, at the next update, whether all is done; it compares that over all ranks, so that an error is
raised on all of them in the same step.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from tensorshard.checkpoint.writing import RankFile, Report, Staged
from tensorshard.torch_private.process_groups import default_store, own_client

_PROGRESS = 64 << 20  # bytes between two signs of life
_PAUSE = 0.02  # seconds between two looks
_PATIENCE = 300.0  # seconds in which another rank's thread must write something


class Messages:
    """What the ranks' threads tell each other about one save.

    Args:
        group: of all ranks. Making this is no collective, but all ranks make the same number of them.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._store: Any = None
        if self.size == 1 or dist.get_backend(group) == "fake":
            self.size = 1
            return
        store = default_store()
        number = store.add(f"tensorshard/saves/{self.rank}", 1)  # the same on all ranks
        # A client of its own, as another thread uses it.
        self._store = dist.PrefixStore(f"tensorshard/save/{number}", own_client(store))

    def close(self) -> None:
        """Lets go of the store while it is there."""
        self._store = None

    def progress(self, size: int) -> None:
        """Says how many bytes this rank has written."""
        if self._store is not None:
            self._store.set(f"{self.rank}/bytes", str(size))

    def report(self, report: Report) -> None:
        """Says what this rank has written."""
        if self._store is not None:
            self._store.set(f"{self.rank}/report", json.dumps(report))

    def reports_of_others(self, cancelled: threading.Event) -> list[Report]:
        """What the other ranks report, once all do.

        Raises:
            RuntimeError: a rank has written nothing for long, or has failed.
        """
        missing = [rank for rank in range(self.size) if rank != self.rank]
        reports = []
        seen: list[bytes] = []
        since = time.monotonic()
        while missing:
            for rank in list(missing):
                if self._store.check([f"{rank}/report"]):
                    report = json.loads(self._store.get(f"{rank}/report"))
                    if "error" in report:
                        raise RuntimeError(f"rank {rank}: {report['error']}")
                    reports.append(report)
                    missing.remove(rank)
            now = [self._store.get(f"{r}/bytes") for r in missing if self._store.check([f"{r}/bytes"])]
            if now != seen:
                seen, since = now, time.monotonic()
            if missing and (cancelled.wait(_PAUSE) or time.monotonic() - since > _PATIENCE):
                raise RuntimeError(f"rank {missing[0]} has not written its part")
        return reports


class BackgroundSave:
    """One save that goes on in the background.

    Args:
        target: the checkpoint, for messages.
        file: of this rank, to which what has no room in the copy is written already.
        staged: what the thread writes.
        messages: to the other ranks.
        complete: called with all ranks' reports, on rank 0.
        discard: called after an error, on rank 0.
    """

    def __init__(
        self,
        target: str,
        file: RankFile,
        staged: Staged,
        messages: Messages,
        *,
        complete: Callable[[Sequence[Report]], None],
        discard: Callable[[], None],
    ) -> None:
        self.target = target
        self.error: Exception | None = None
        self._file, self._staged, self._messages = file, staged, messages
        self._complete, self._discard = complete, discard
        self._cancelled = threading.Event()
        # No daemon: a process that ends waits for it.
        self._thread = threading.Thread(target=self._run, name=f"save to {target}")
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether this rank's thread has ended."""
        return not self._thread.is_alive()

    def cancel(self) -> None:
        """Makes this rank stop to wait for others, after an error."""
        self._cancelled.set()
        self._thread.join()

    def _run(self) -> None:
        _yield_to_training()
        try:
            report = self._write()
            if self._messages.rank == 0:
                self._complete([report, *self._messages.reports_of_others(self._cancelled)])
            else:
                self._messages.report(report)
        except Exception as error:
            self.error = error
            self._file.close()
            if self._messages.rank == 0:
                self._discard()
            else:
                self._tell(error)
        finally:
            self._messages.close()

    def _tell(self, error: Exception) -> None:
        with suppress(RuntimeError):  # the store is gone, and rank 0 with it
            self._messages.report({"error": f"{type(error).__name__}: {error}"})

    def _write(self) -> Report:
        said = self._file.size
        for item, value in self._staged.staged:
            if self._cancelled.is_set():
                raise RuntimeError("another rank has failed")
            self._file.append(item, value)
            if self._file.size - said > _PROGRESS:
                said = self._file.size
                self._messages.progress(said)
        return self._file.finish()


def _yield_to_training() -> None:
    """Lets this thread run where training leaves the processor idle."""
    if sys.platform == "linux":  # elsewhere this is the priority of a process
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
