"""An update in the background. Code that needs a parameter waits until that parameter is updated."""

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn


class BackgroundUpdate:
    """Runs one update at a time in a thread, and notes which master weights it has updated.

    The next update goes in the order in which the last forward needed the master weights.

    Args:
        begin: called first in each thread that updates.
    """

    def __init__(self, begin: Callable[[], None] = lambda: None) -> None:
        self._begin = begin
        self._changed = threading.Condition()
        self._pending: set[nn.Parameter] = set()  # master weights that are not updated yet
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._needed: dict[nn.Parameter, None] = {}  # in the order in which the last forward needed them
        self._ends_at_exit = False

    def in_order(self, masters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """`masters` as the next forward will need them, as far as that is known."""
        place = {master: number for number, master in enumerate(self._needed)}
        self._needed = {}
        return sorted(masters, key=lambda master: place.get(master, len(place)))

    def start(self, update: Callable[[], None], masters: Sequence[nn.Parameter], failure: Exception | None) -> None:
        """Begins `update`, which calls :meth:`done` with `masters` as it goes. An earlier update must be over.

        Args:
            failure: an earlier error; with one, nothing is begun.
        """
        assert self._thread is None
        if not self._ends_at_exit:
            self._ends_at_exit = True
            # At its end, the interpreter stops pools of threads before it calls atexit functions. Updates need these
            # pools.
            threading._register_atexit(partial(_finish_at_exit, weakref.ref(self)))  # type: ignore[attr-defined]
        self._failure = failure
        if failure is None:
            self._pending = set(masters)
            self._thread = threading.Thread(target=self._run, args=(update,), name="tensorshard-update", daemon=True)
            self._thread.start()

    def _run(self, update: Callable[[], None]) -> None:
        failure: Exception | None = None
        try:
            self._begin()
            with torch.no_grad():
                update()
        except Exception as error:
            failure = error
        with self._changed:
            self._failure = failure
            self._pending = set()
            self._changed.notify_all()

    def done(self, masters: Iterable[nn.Parameter]) -> None:
        """Notes that `masters` are updated, and wakes threads that wait for them."""
        with self._changed:
            self._pending.difference_update(masters)
            self._changed.notify_all()

    def is_done(self, masters: Iterable[nn.Parameter]) -> bool:
        """Whether all of `masters` are updated."""
        return self._pending.isdisjoint(masters)

    def wait(self, masters: Sequence[nn.Parameter]) -> None:
        """Waits until `masters` are updated. It also returns if the update has failed, since other ranks may wait for
        this one."""
        self._needed.update(dict.fromkeys(masters))
        if self._pending:
            with self._changed:
                self._changed.wait_for(lambda: self.is_done(masters))

    def finish(self) -> Exception | None:
        """Waits until the update is over; returns its error, if any, until :meth:`take_failure` has returned that."""
        thread = self._thread
        if thread is not None:
            thread.join()
            self._thread = None
        return self._failure

    def take_failure(self) -> Exception | None:
        """Returns what :meth:`finish` returns, and forgets it."""
        failure = self.finish()
        self._failure = None
        return failure


def _finish_at_exit(update: Any) -> None:
    running = update()
    failure = None if running is None else running.take_failure()
    if failure is not None:  # not raised: that would skip the other functions at exit, which stop pools of threads
        sys.excepthook(type(failure), failure, failure.__traceback__)
