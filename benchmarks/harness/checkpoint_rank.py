"""One rank that saves and loads the state of a GPT under ZeRO 3, by every contender in turn."""

import ctypes
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

import tensorshard as ts
from benchmarks.harness.memory import peak_resident_bytes, reset_peak
from benchmarks.suites.checkpoint import WORKLOADS
from benchmarks.workload import OPTIMIZER, Workload, loss_fn
from tensorshard.host.memory import status_bytes

_STEPS = 3  # whose time without a save is the yardstick


Begin = Callable[[Path], Callable[[], bool]]
"""Begins a save, and returns a function that says whether it is done."""

Save = tuple[Begin, Callable[[Path], object]]
"""What begins a save, and what loads it."""

Train = Callable[[torch.Tensor, torch.Tensor], object]
"""One step."""


def main() -> None:
    name, rounds, folder, output = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    workload = WORKLOADS[name]
    dist.init_process_group("gloo")
    tokens = torch.randint(workload.vocab_size, (workload.batch_size, workload.context_length + 1))

    train, contenders = (_deepspeed if sys.argv[5] == "deepspeed" else _torch)(workload)

    def step() -> float:
        begin = time.perf_counter()
        train(tokens[:, :-1], tokens[:, 1:])
        return time.perf_counter() - begin

    step()
    path = folder / "checkpoint"
    peaks = {}  # of each one's first save, whose memory and plan the later ones use
    for contender, (begin, _) in contenders.items():
        _empty(folder)
        peaks[contender] = _more_memory(lambda begin=begin: _save(begin, path, step), step)  # type: ignore[misc]
    alone = sorted(step() for _ in range(_STEPS))[_STEPS // 2]
    measured: dict[str, list[dict[str, float]]] = {}
    for _ in range(rounds):
        for contender, (begin, load) in contenders.items():
            _empty(folder)
            blocked, saved, steps = _save(begin, path, step)
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            dist.barrier()
            start = time.perf_counter()
            load(path)
            dist.barrier()
            loaded = time.perf_counter() - start
            lost = blocked + max(0.0, sum(steps) - len(steps) * alone)
            times = {"blocked": blocked, "saved": saved, "loaded": loaded, "lost": lost}
            measured.setdefault(contender, []).append({**times, "peak": peaks[contender], "bytes": float(size)})
    if dist.get_rank() == 0:
        output.write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


def _torch(workload: Workload) -> tuple[Train, dict[str, Save]]:
    engine = ts.parallelize(workload.model(), ts.Plan(zero=3), optimizer=OPTIMIZER, loss_fn=loss_fn)
    _own_group()
    contenders: dict[str, Save] = {
        "torch.save, gathered": (partial(_gathered, engine), _load_gathered),
        "DCP": (partial(_dcp, engine), partial(_dcp_load, engine)),
        "DCP, async": (partial(_dcp_async, engine), partial(_dcp_load, engine)),
        "tensorshard": (partial(_ours, engine, background=False), engine.load),
        "tensorshard, background": (partial(_ours, engine, background=True), engine.load),
    }
    return engine.step, contenders


def _deepspeed(workload: Workload) -> tuple[Train, dict[str, Save]]:
    from benchmarks.peers.deepspeed_zero import make_engine

    engine = make_engine(workload.model, stage=3)

    def train(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        engine.backward(loss_fn(engine(inputs), targets))
        engine.step()

    def save(path: Path) -> Callable[[], bool]:
        engine.save_checkpoint(str(path))
        for file in path.rglob(f"*_rank_{dist.get_rank()}_*"):  # DeepSpeed itself does not wait for the disk
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        return _done

    return train, {"DeepSpeed 3": (save, lambda path: engine.load_checkpoint(str(path)))}


def _empty(folder: Path) -> None:
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        os.sync()
    dist.barrier()


def _save(begin: Begin, path: Path, step: Callable[[], float]) -> tuple[float, float, list[float]]:
    """Seconds until training can go on and until all is written, and those of each step meanwhile."""
    start = time.perf_counter()
    is_done = begin(path)
    dist.barrier()
    blocked = time.perf_counter() - start
    steps: list[float] = []
    while True:
        done = torch.tensor(int(is_done()))
        dist.all_reduce(done, dist.ReduceOp.MIN)
        if done.item():
            return blocked, time.perf_counter() - start, steps
        steps.append(step())


def _more_memory(save: Callable[[], object], step: Callable[[], object]) -> float:
    """Bytes that this rank holds at most while it saves, beyond what it holds at most in a step."""
    peaks = []
    for action in (step, save):
        ctypes.CDLL(None).malloc_trim(0)  # what earlier contenders have freed
        reset_peak()
        action()
        peaks.append(peak_resident_bytes() - (status_bytes("RssFile") or 0))
    return float(max(0, peaks[1] - peaks[0]))


def _tensors(engine: ts.Engine) -> dict[str, Any]:
    masters = engine.sharded.masters()
    tensors: dict[str, Any] = {f"model.{name}": master.detach() for name, master in masters.items()}
    for name, master in masters.items():
        for key, value in engine.optimizer.state[master].items():
            tensors[f"optimizer.{key}.{name}"] = value
    return tensors


def _done() -> bool:
    return True


def _gathered(engine: ts.Engine, path: Path) -> Callable[[], bool]:
    state = {}
    for name, tensor in _tensors(engine).items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if dist.get_rank() == 0:
            state[name] = full
    if dist.get_rank() == 0:
        with path.open("wb") as stream:
            torch.save(state, stream)
            os.fsync(stream.fileno())
    return _done


def _load_gathered(path: Path) -> None:
    torch.load(path, weights_only=True)


def _dcp(engine: ts.Engine, path: Path) -> Callable[[], bool]:
    dcp.save(_tensors(engine), storage_writer=dcp.FileSystemWriter(path))
    return _done


def _dcp_async(engine: ts.Engine, path: Path) -> Callable[[], bool]:
    future = dcp.async_save(_tensors(engine), storage_writer=dcp.FileSystemWriter(path), process_group=_own_group())
    return future.done  # type: ignore[union-attr]


@cache
def _own_group() -> dist.ProcessGroup:
    """A group whose collectives are those of saves alone."""
    return dist.new_group(backend="gloo")


def _dcp_load(engine: ts.Engine, path: Path) -> None:
    dcp.load(_tensors(engine), storage_reader=dcp.FileSystemReader(path))  # into the tensors that train


def _ours(engine: ts.Engine, path: Path, *, background: bool) -> Callable[[], bool]:
    engine.save(path, background=background)
    return lambda: engine.saving is None or _check(engine)


def _check(engine: ts.Engine) -> bool:
    engine._background.check()  # as the next update does
    return engine.saving is None


if __name__ == "__main__":
    main()
