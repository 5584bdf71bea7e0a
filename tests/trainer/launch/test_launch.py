"""Starting workers: what they get, what is shown when one fails, and that signals leave none behind."""

import atexit
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from tensorshard.comm.world import as_timedelta
from tensorshard.config import ConfigError
from tensorshard.trainer.launch import launcher as launch_module
from tensorshard.trainer.launch.launch_errors import LaunchError, LaunchInterrupted, WorkerFailedError
from tensorshard.trainer.launch.launcher import World, launch

_PATIENCE_SECONDS = 60.0


# What workers do.


def say(folder: str) -> None:
    rank = os.environ["RANK"]
    names = ("LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "MALLOC_ARENA_MAX")
    print(f"rank {rank}", *(f"{name}={os.environ[name]}" for name in names), f"tty={sys.stdout.isatty()}")


def fail_in_rank_1(folder: str) -> None:
    marker = Path(folder, "failed")
    if os.environ["RANK"] == "1":
        marker.touch()
        raise ValueError("the culprit")
    _wait_for(marker.exists)
    time.sleep(0.02)
    raise RuntimeError("a peer is gone")


def find_a_mistake(folder: str) -> None:
    raise ConfigError("that cannot be")


def list_listeners(folder: str) -> None:
    """Writes the addresses at which this process, and the one that started it, wait for connections."""
    from tensorshard.comm.world import join_world

    join_world(torch.device("cpu"))
    torch.distributed.barrier()
    listening = {inode: address for pid in ("self", os.getppid()) for inode, address in _listening(pid).items()}
    Path(folder, f"listeners{os.environ['RANK']}").write_text("\n".join(sorted(set(listening.values()))))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


class _AbortsLate:
    """Stands for a thread of Gloo that is still there when the interpreter is finalized."""

    def __del__(self) -> None:
        os.abort()


def leave_work_for_the_end(folder: str) -> None:
    """Leaves a thread, a pool and an exit handler, and an object that must not live to see the interpreter's end."""
    sys.modules["aborts_late"] = _AbortsLate()  # type: ignore[assignment]
    path = Path(folder, f"rank{os.environ['RANK']}")
    threading.Thread(target=lambda: (time.sleep(0.2), path.with_suffix(".thread").touch())).start()
    ThreadPoolExecutor(1).submit(path.with_suffix(".pool").touch)
    atexit.register(path.with_suffix(".handler").touch)
    print("the last words")


def _listening(pid: int | str) -> dict[str, str]:
    """Addresses at which a process listens, in the kernel's hexadecimal notation, by the inodes of its sockets."""
    own = {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()}
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found[fields[9]] = fields[1].partition(":")[0]
    return found


def sleep(folder: str) -> None:
    _register(folder)
    try:
        time.sleep(_PATIENCE_SECONDS)
    except KeyboardInterrupt:
        print(f"rank {os.environ['RANK']} tidied up")
        raise


def sleep_deafly(folder: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _register(folder)
    time.sleep(_PATIENCE_SECONDS)


def _register(folder: str) -> None:
    partial = Path(folder, f"{os.environ['RANK']}.partial")
    partial.write_text(str(os.getpid()))
    partial.rename(partial.with_suffix(".pid"))


# What starts them, in a process of its own: `launch` owns signals and the terminal.


def start(entrypoint: Callable[[str], None], folder: str) -> int:
    try:
        launch(entrypoint, (folder,), World(nproc=2), worker_env={"MALLOC_ARENA_MAX": "1"})
    except LaunchInterrupted as error:
        return 128 + error.signal
    except WorkerFailedError as error:
        print(error.mistake or error, file=sys.stderr)
        return 2 if error.mistake else 1
    return 0


def _parent(entrypoint: Callable[[str], None], folder: Path, **kwargs: object) -> "subprocess.Popen[str]":
    code = f"import sys, test_launch as t; sys.exit(t.start(t.{entrypoint.__name__}, {str(folder)!r}))"
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(folder)}
    environment.pop("OMP_NUM_THREADS", None)
    kwargs = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **kwargs}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, **kwargs)  # type: ignore[call-overload]


def _wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def _workers(folder: Path) -> list[int]:
    """The process numbers of two workers, once both are at work."""
    _wait_for(lambda: len(list(folder.glob("*.pid"))) == 2)
    return [int(path.read_text()) for path in folder.glob("*.pid")]


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
def test_rank_0_has_the_terminal_and_every_rank_its_environment(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    (tmp_path / f"tensorshard-run-{killed.pid}-left").mkdir()
    parent = _parent(say, tmp_path, stdout=theirs)
    _, errors = parent.communicate(timeout=_PATIENCE_SECONDS)
    os.close(theirs)
    lines = os.read(ours, 4096).decode().splitlines()
    os.close(ours)

    assert (parent.returncode, errors) == (0, "")
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert lines == [f"rank 0 LOCAL_RANK=0 WORLD_SIZE=2 OMP_NUM_THREADS={threads} MALLOC_ARENA_MAX=1 tty=True"]
    assert not list(tmp_path.iterdir()), "temporary files were left behind"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux says of sockets")
def test_on_one_machine_nothing_listens_to_the_network(tmp_path: Path) -> None:
    parent = _parent(list_listeners, tmp_path)
    _, errors = parent.communicate(timeout=_PATIENCE_SECONDS)
    assert (parent.returncode, errors) == (0, "")
    found = [(tmp_path / f"listeners{rank}").read_text().split() for rank in (0, 1)]
    assert found == [["0100007F"], ["0100007F"]], "127.0.0.1, at which Gloo's connections are made, and no other"


@pytest.mark.slow
def test_the_first_failing_rank_is_shown_once(tmp_path: Path) -> None:
    parent = _parent(fail_in_rank_1, tmp_path)
    output, errors = parent.communicate(timeout=_PATIENCE_SECONDS)

    assert (parent.returncode, output) == (1, "")
    assert errors.startswith("rank 1 of 2 failed:\n")
    assert errors.count("Traceback") == 1
    assert "ValueError: the culprit" in errors
    assert "a peer is gone" not in errors
    assert "torchelastic" not in errors.lower()


@pytest.mark.slow
def test_a_mistake_that_workers_find_is_handed_on_as_a_sentence(tmp_path: Path) -> None:
    parent = _parent(find_a_mistake, tmp_path)
    output, errors = parent.communicate(timeout=_PATIENCE_SECONDS)
    assert (parent.returncode, output, errors) == (2, "", "that cannot be\n")


@pytest.mark.slow
def test_workers_end_after_their_handlers_and_before_the_interpreter_is_finalized(tmp_path: Path) -> None:
    parent = _parent(leave_work_for_the_end, tmp_path)
    output, errors = parent.communicate(timeout=_PATIENCE_SECONDS)
    assert parent.returncode == 0, errors
    assert "the last words" in output
    left = {f"rank{rank}.{what}" for rank in range(2) for what in ("thread", "pool", "handler")}
    assert {path.name for path in tmp_path.iterdir()} >= left


@pytest.mark.slow
def test_ctrl_c_reaches_the_workers_and_leaves_none(tmp_path: Path) -> None:
    parent = _parent(sleep, tmp_path)
    workers = _workers(tmp_path)
    parent.send_signal(signal.SIGINT)
    output, errors = parent.communicate(timeout=_PATIENCE_SECONDS)

    assert parent.returncode == 128 + signal.SIGINT
    assert (output, errors) == ("rank 0 tidied up\n", "")
    assert not [pid for pid in workers if _is_running(pid)]
    assert not list(tmp_path.glob("tensorshard-*")), "temporary files were left behind"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the kernel does not end a dead parent's workers")
def test_a_second_ctrl_c_ends_everything_at_once(tmp_path: Path) -> None:
    parent = _parent(sleep_deafly, tmp_path)
    workers = _workers(tmp_path)
    parent.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert parent.poll() is None, "workers that do not listen are waited for"
    parent.send_signal(signal.SIGINT)
    parent.communicate(timeout=_PATIENCE_SECONDS)

    assert parent.returncode == 128 + signal.SIGINT
    _wait_for(lambda: not [pid for pid in workers if _is_running(pid)])
    assert not list(tmp_path.glob("tensorshard-*")), "temporary files were left behind"


def _failure(rank: int, exitcode: int, error_file: Path = Path("<N/A>")) -> ProcessFailure:
    return ProcessFailure(local_rank=rank, pid=rank, exitcode=exitcode, error_file=str(error_file))


def test_a_killed_worker_comes_before_its_complaining_peers(tmp_path: Path) -> None:
    complaint = tmp_path / "rank0.error.json"
    complaint.write_text('{"message": {"message": "E", "extraInfo": {"py_callstack": "lost", "timestamp": "1"}}}')
    (tmp_path / "rank1.stderr.log").write_text("first words\nlast words\n")
    failures = {
        0: _failure(0, 1, complaint),
        1: _failure(1, -signal.SIGKILL),
        2: _failure(2, -signal.SIGTERM),
    }
    error = WorkerFailedError(failures, 3, tmp_path)

    assert error.rank == 1
    assert str(error).startswith("rank 1 of 3 was killed by SIGKILL, most often the kernel's answer")
    assert "last words" in str(error)


def test_an_abort_is_explained_by_what_nccl_does(tmp_path: Path) -> None:
    error = WorkerFailedError({0: _failure(0, -signal.SIGABRT)}, 2, tmp_path)

    assert str(error).startswith("rank 0 of 2 was killed by SIGABRT")
    assert "NCCL's watchdog, after a collective that did not end within the timeout" in str(error)
    assert "flight recorder" in str(error)


@pytest.mark.parametrize("name", ["", "TORCH_FR_DUMP_TEMP_FILE"])
def test_ranks_on_gpus_record_their_collectives_beside_their_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    environments: list[dict[str, str]] = []

    def streams(folder: Path, environment: dict[str, str], restarts: int) -> None:
        environments.append(environment)
        raise InterruptedError

    monkeypatch.setattr(launch_module, "_Streams", streams)
    monkeypatch.setattr(launch_module, "visible_gpus", lambda: 2)
    if name:
        monkeypatch.setenv(name, "elsewhere")
    with pytest.raises(InterruptedError):
        launch(as_timedelta, [1], World(2), log_dir=tmp_path)
    assert environments[0].get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE") == (None if name else str(tmp_path / "nccl-rank"))


def test_a_worker_killed_for_not_leaving_comes_after_the_one_that_raised(tmp_path: Path) -> None:
    raised = tmp_path / "rank1.error.json"
    raised.write_text('{"message": {"message": "E", "extraInfo": {"py_callstack": "E: why", "timestamp": "1"}}}')
    a_while_ago = time.time() - 30
    os.utime(raised, (a_while_ago, a_while_ago))
    error = WorkerFailedError({0: _failure(0, -signal.SIGKILL), 1: _failure(1, 1, raised)}, 2, tmp_path)

    assert error.rank == 1
    assert "E: why" in str(error)


def test_an_exit_without_an_exception_is_told(tmp_path: Path) -> None:
    error = WorkerFailedError({0: _failure(0, 3)}, 2, tmp_path)
    assert str(error).startswith("rank 0 of 2 ended with exit code 3 and no Python exception")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nproc": 0}, "nproc is 0; at least 1 process"),
        ({"nproc": -2}, "nproc is -2; at least 1 process"),
        ({"nproc": 1, "nnodes": 0}, "nnodes is 0; at least 1 machine"),
        ({"nproc": 1, "nnodes": 2}, "give rdzv_endpoint the HOST:PORT"),
        ({"nproc": 1, "nnodes": 2, "min_nodes": 3, "rdzv_endpoint": "a:1"}, "nnodes is 3:2; it must be MIN:MAX"),
        ({"nproc": 1, "max_restarts": -1}, "max_restarts is -1; it must be 0 or more"),
        ({"nproc": 1, "nnodes": 2, "rdzv_endpoint": "node0"}, "'node0'; it must be HOST:PORT"),
        ({"nproc": 1, "nnodes": 2, "rdzv_endpoint": "node0:99999"}, "it must be HOST:PORT"),
        (
            {"nproc": 1, "nnodes": 2, "rdzv_endpoint": "a:1", "node_rank": 2},
            "node_rank is 2; with 2 machines",
        ),
        ({"nproc": 1, "node_rank": -1}, "node_rank is -1"),
    ],
)
def test_a_world_that_cannot_be_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        World(**arguments)  # type: ignore[arg-type]


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "visible_gpus", lambda: 2)
    assert World(nproc=2, nnodes=3, rdzv_endpoint="node0:29500").size == 6
    with pytest.raises(LaunchError, match=r"nproc is 3, but 2 GPUs are visible.*at most 2"):
        World(nproc=3)


def test_an_unknown_meeting_place_is_refused_at_once() -> None:
    with pytest.raises(LaunchError, match=r"the host 'no-such-host\.invalid' is not known on this machine"):
        launch(say, ("",), World(nproc=1, nnodes=2, rdzv_endpoint="no-such-host.invalid:29500"))


def test_an_entrypoint_that_workers_cannot_import_is_refused() -> None:
    def local() -> None: ...

    with pytest.raises(ValueError, match="define it at the top level"):
        launch(local, (), World(nproc=1))
