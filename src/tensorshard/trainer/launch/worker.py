"""The worker's side of :mod:`tensorshard.trainer.launch`: runs one process of a run, and sets its exit code.

This file imports nothing heavy, so that Ctrl-C is handled before anything slow begins. A worker is started as
``python -m tensorshard.trainer.launch.worker CALL``, where CALL is the file that :func:`write_call` wrote.
"""

import atexit
import ctypes
import json
import logging
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tensorshard.common.words import fit, terminal_width
from tensorshard.host.process_settings import allow_process_settings

INTERRUPTED = 128 + signal.SIGINT
"""Exit code of a process that was ended by Ctrl-C, as shells define it."""

RUN_FILE = "TENSORSHARD_RUN_FILE"
"""Environment variable: a file of this machine's launcher, for what workers tell those that come after a restart."""

RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""Environment variable: how often the workers were started again."""

USAGE_ERROR = 2
"""Exit code after a mistake in the config or the arguments."""


def write_call(path: Path, entrypoint: Callable[..., Any], args: Sequence[Any]) -> None:
    """Writes the call ``entrypoint(*args)`` and this process's ``sys.path`` to a file, for workers on this machine.

    Raises:
        ValueError: workers could not import `entrypoint` by name.
        Exception: what pickle raises for `args` that cannot be sent.
    """
    if entrypoint.__module__ == "__main__" or "." in entrypoint.__qualname__:
        raise ValueError(
            f"{entrypoint.__qualname__} is defined in {entrypoint.__module__}, where other processes cannot "
            f"import it; define it at the top level of a module"
        )
    # Two pickles in a row: reading the second one imports modules, which needs the path of the first.
    path.write_bytes(pickle.dumps(sys.path) + pickle.dumps((entrypoint, tuple(args))))


def run_worker(entrypoint: Callable[..., Any], args: Sequence[Any], *, report: bool) -> None:
    """Runs ``entrypoint(*args)`` as one rank of a world; ends the process if that fails or is interrupted.

    An error goes to the file that the elastic agent has named (``TORCHELASTIC_ERROR_FILE``). The launcher shows the
    first error of all workers, once. Without such a file the error is printed here.

    Args:
        report: whether a mistake of the user (:class:`ConfigError`) is also printed here, as one sentence.
    """
    from torch.distributed.elastic.multiprocessing.errors import record

    from tensorshard.comm.refusals import tell_agent
    from tensorshard.config.lazy import ConfigError

    allow_process_settings()
    refused = _refused_file()
    if refused is not None and is_restart() and refused.is_file():  # again it would be the same
        hand_on_mistake(refused.read_text())
        _exit_at_once(USAGE_ERROR)
    try:
        record(entrypoint)(*args)
    except KeyboardInterrupt:
        _exit_at_once(INTERRUPTED)
    except ConfigError as error:
        hand_on_mistake(str(error))
        if refused is not None:
            refused.write_text(str(error))
        if report:
            print_mistake(str(error))
        _exit_at_once(USAGE_ERROR)
    except Exception as error:
        said = _in_short(error)
        if said is not None:
            tell_agent(said)
        if not os.environ.get("TORCHELASTIC_ERROR_FILE"):
            print(said or traceback.format_exc(), file=sys.stderr)
        _exit_at_once(1)


def _in_short(error: Exception) -> str | None:
    """What an error says that every rank raises at the same place, whose traceback says no more; None for others."""
    from tensorshard.comm.refusals import sentence
    from tensorshard.engine.gradients import NonFiniteLossError

    return f"{type(error).__name__}: {sentence(error)}" if isinstance(error, NonFiniteLossError) else None


def is_restart() -> bool:
    """Whether workers of this run have failed before."""
    return os.environ.get(RESTARTS, "0") != "0"


def told(run_file: Path) -> Path:
    """The file that is there once a run has said itself how it ended. `run_file`: as in :data:`RUN_FILE`."""
    return run_file.with_name(f"{run_file.name}.told")


def _refused_file() -> Path | None:
    return Path(os.environ[RUN_FILE] + ".refused") if RUN_FILE in os.environ else None


def hand_on_mistake(message: str) -> None:
    """Reports a mistake of the user to the elastic agent, if there is one, as a sentence without a traceback."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        Path(error_file).write_text(json.dumps({"message": message, "timestamp": int(time.time())}))


def end_process(cause: str) -> None:
    """Ends this process, which keeps the others waiting or cannot stop waiting, with `cause` as its error."""
    logging.getLogger("tensorshard").error("this rank is ended: %s", cause)
    hand_on_mistake(cause)
    _exit_at_once(1)


def print_mistake(message: str) -> None:
    """Prints a mistake of the user. All ranks of a machine find the same one, so only one of them prints it."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(fit(f"tensorshard: error: {message}", terminal_width(sys.stderr)), file=sys.stderr)


def main(call_path: str) -> None:
    """Makes the call that :func:`write_call` wrote to `call_path`."""
    # While modules are imported, Ctrl-C ends the process without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent()
    with open(call_path, "rb") as file:
        sys.path[:] = pickle.load(file)
        entrypoint, args = pickle.load(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run_worker(entrypoint, args, report=False)
    _exit_after_handlers()


def _exit_after_handlers() -> None:
    """Ends the process once its threads and exit handlers are done, but does not finalize the interpreter.

    While it is finalized, a thread of Gloo that still holds a tensor may abort the process ("terminate called without
    an active exception": torch's pull request 179291). Then a run that was over would count as failed.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does: ends pools, and waits for threads
    atexit._run_exitfuncs()
    _exit_at_once(0)


def _exit_at_once(code: int) -> None:
    """Ends the process without running destructors, since those of a broken process group may wait for ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def die_with_parent() -> None:
    """Asks the kernel to kill this process when the launcher dies for any reason (Linux only)."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
