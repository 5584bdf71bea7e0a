"""What a long search says on stderr while it runs, and when it ends with what it has found."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from types import FrameType
from typing import Any

_EVERY = 10.0  # seconds between lines, where nothing can be overwritten
_AGAIN = 1.0  # seconds, until a search that went on is asked to end again


class TimeIsUp(KeyboardInterrupt):
    """The time that was given to a search is over. It ends as by an interrupt."""


class _Shown:
    """A line of progress, of this process alone."""

    def __init__(self, title: str, end: float | None, bar: Any, *, is_command: bool) -> None:
        self.end, self.answers = end, is_command
        self._title, self._bar, self._lines = title, bar, is_command
        self._task = None if bar is None else bar.add_task(title, total=None)
        self._begin = time.monotonic()
        self._next = self._begin
        self._process = os.getpid()

    def say(self, text: str) -> None:
        if os.getpid() != self._process:
            return
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, description=f"{self._title}: {text}")
        elif self._lines and now >= self._next:
            self._next = now + _EVERY
            print(f"{self._title}, {now - self._begin:.0f} s: {text}", file=sys.stderr, flush=True)
        self.check()

    def check(self, *_: object) -> None:
        if self.end is not None and time.monotonic() >= self.end:
            raise TimeIsUp


_shown: ContextVar[_Shown | None] = ContextVar("_shown", default=None)


@contextmanager
def progress(title: str, *, until: float | None = None, is_command: bool = False) -> Iterator[None]:
    """A context in which :func:`say` shows what is done, in one line of a terminal; inside another one, nothing new.

    Args:
        until: by ``time.monotonic``; then :class:`TimeIsUp` is raised inside. None for never.
        is_command: whether an interrupt ends the search alone, which gives its answer; and whether to print lines where
            stderr is no terminal, the first at once and then one in ten seconds.
    """
    if _shown.get() is not None:
        yield
        return
    bar = _bar() if sys.stderr.isatty() else None
    shown = _Shown(title, until, bar, is_command=is_command)
    token = _shown.set(shown)
    try:
        with bar if bar is not None else nullcontext(), _alarm(shown):
            yield
    finally:
        _shown.reset(token)


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Column

    text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
    return Progress(
        SpinnerColumn(),
        TimeElapsedColumn(),
        text,
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,  # a fork would write by its copy, whose lock may be taken
        redirect_stderr=False,
    )


def say(text: str) -> None:
    """Says what is done now, within :func:`progress`; else nothing.

    Raises:
        TimeIsUp: the time is over.
    """
    shown = _shown.get()
    if shown is not None:
        shown.say(text)


def end_words(stop: KeyboardInterrupt) -> str:
    """How a search that `stop` has ended says so, for the answer that it gives now: it has all the time for that.

    Raises:
        KeyboardInterrupt: `stop` itself, where nobody has said that interrupts are answered.
    """
    shown = _shown.get()
    if shown is None or not (shown.answers or isinstance(stop, TimeIsUp)):
        raise stop
    shown.end = None
    return "its time was over" if isinstance(stop, TimeIsUp) else "it was interrupted"


@contextmanager
def _alarm(shown: _Shown) -> Iterator[None]:
    """Ends what runs in the main thread when the time is over, also where it says nothing for long."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if shown.end is None or not in_main_thread or not hasattr(signal, "setitimer"):
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        shown.check()

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(_AGAIN, shown.end - time.monotonic()), _AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
