"""Errors by which this package refuses what it was asked: said once, in its sentence and with the user's line.

All ranks meet such an error at the same place. Their tracebacks through this package would say nothing that the
sentence does not say.
"""

import json
import os
import signal
import sys
import sysconfig
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from tensorshard.comm.call_watch import is_of_collective, noted_cause
from tensorshard.torch_private.process_groups import default_store

FULL = "TENSORSHARD_TRACEBACK"
"""Environment variable: if it is set, refusals in scripts come with their tracebacks, from every rank."""

_PACKAGE = Path(__file__).parents[1]
_MODELS = _PACKAGE / "models"  # they count as users' models
_LIBRARIES = (_PACKAGE, Path(torch.__file__).parent, Path(sysconfig.get_path("stdlib")))
_REFUSALS = (ValueError, TypeError, RuntimeError)
_KEY = "tensorshard/refusal"
_PATIENCE_SECONDS = 5.0
_AGENT_SECONDS = 60.0  # the first process runs its exit handlers before it ends
_CHARACTERS = 150


def is_refusal(error: BaseException) -> bool:
    """Whether this package has raised `error` itself, to say that something cannot be done as asked."""
    frames = _frames(error.__traceback__)
    if not frames or not isinstance(error, _REFUSALS) or is_of_collective(error):
        return False
    file = Path(frames[-1].f_code.co_filename)
    return file.is_relative_to(_PACKAGE) and not file.is_relative_to(_MODELS)


def sentence(error: BaseException) -> str:
    """The message of `error`, and its notes."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


@cache
def report_refusals_once() -> None:
    """If a refusal ends this process, one of several: rank 0 writes it with the line of the user's code, and the others
    write a line. Of a collective that could not end, each rank writes what the others did.

    It is also the root cause in torchrun's report, which comes last and would otherwise say nothing of it. That report
    has seven lines for each failed process, so the others let torchrun end them, which is no failure of their own.
    """
    usual = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> Any:
        cause = noted_cause(error)
        if FULL in os.environ or not (cause or is_refusal(error)):
            return usual(kind, error, traceback)
        rank, said = int(os.environ["RANK"]), f"{kind.__name__}: {cause or sentence(error)}"
        is_cause = rank == 0 or os.environ.get("LOCAL_RANK") == "0"  # each machine's torchrun reports its own
        if rank == 0:
            text = f"{_users_line(error)}{said}\n({FULL}=1 shows the whole traceback)"
            _tell_others(error)
        elif cause is None and _is_said_by_first(error):
            text = f"{kind.__name__}, as on rank 0"
        elif dist.is_initialized():
            text, is_cause = f"{_users_line(error)}{said}", True
        else:
            text = f"{said[:_CHARACTERS]} ..."
        print(text, file=sys.stderr, flush=True)
        if is_cause:
            tell_agent(said)
        if rank:
            _wait_for_agent(is_cause)
        return None

    sys.excepthook = report


def _tell_others(error: BaseException) -> None:
    if dist.is_initialized():
        with suppress(RuntimeError):
            default_store().set(_KEY, str(error))


def tell_agent(said: str) -> None:
    """Leaves what was said where torchrun looks for the cause of a failure, in its own format."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file and Path(file).parent.is_dir():
        cause = {"py_callstack": said, "timestamp": str(int(time.time()))}
        Path(file).write_text(json.dumps({"message": {"message": said, "extraInfo": cause}}))


def _wait_for_agent(is_cause: bool) -> None:
    """Gives the launcher time to end this process, as it does when the first one has ended."""
    seconds = 1.0
    if not is_cause and "TORCHELASTIC_RUN_ID" in os.environ and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        seconds = _AGENT_SECONDS
    time.sleep(seconds)


def _is_said_by_first(error: BaseException) -> bool:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    with suppress(RuntimeError):
        while dist.is_initialized() and time.monotonic() < deadline:
            if default_store().check([_KEY]):
                return bool(default_store().get(_KEY).decode() == str(error))
            time.sleep(0.05)
    return False


def _users_line(error: BaseException) -> str:
    """The innermost line of code that is neither this package's nor a library's."""
    for traceback in reversed(_tracebacks(error.__traceback__)):
        file = traceback.tb_frame.f_code.co_filename
        if not file.startswith("<") and not any(Path(file).is_relative_to(folder) for folder in _LIBRARIES):
            return f'File "{file}", line {traceback.tb_lineno}, in {traceback.tb_frame.f_code.co_name}\n'
    return ""


def _tracebacks(traceback: TracebackType | None) -> list[TracebackType]:
    tracebacks = []
    while traceback is not None:
        tracebacks.append(traceback)
        traceback = traceback.tb_next
    return tracebacks


def _frames(traceback: TracebackType | None) -> list[FrameType]:
    return [each.tb_frame for each in _tracebacks(traceback)]
