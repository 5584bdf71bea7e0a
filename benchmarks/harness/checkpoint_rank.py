"""One rank that saves and loads the state of a GPT under ZeRO 3, by every contender in turn."""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

import tensorshard as ts
from benchmarks.suites.checkpoint import WORKLOADS
from benchmarks.workload import OPTIMIZER, loss_fn
from tensorshard.host.memory import status_bytes

_STEPS = 3  # whose time without a save is the yardstick


def main() -> None:
    name, rounds, folder, output = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    workload = WORKLOADS[name]
    dist.init_process_group("gloo")
    engine = ts.parallelize(workload.model(), ts.Plan(zero=3), optimizer=OPTIMIZER, loss_fn=loss_fn)
    tokens = torch.randint(workload.vocab_size, (workload.batch_size, workload.context_length + 1))

    def step() -> float:
        begin = time.perf_counter()
        engine.step(tokens[:, :-1], tokens[:, 1:])
        return time.perf_counter() - begin

    step()
    _own_group()
    engine.save(folder.with_name("first"), background=True)  # whose memory the later ones use
    engine.wait_for_save()
    alone = sorted(step() for _ in range(_STEPS))[_STEPS // 2]
    measured: dict[str, list[dict[str, float]]] = {}
    for _ in range(rounds):
        for contender, save in _contenders(engine).items():
            if dist.get_rank() == 0:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                os.sync()
            dist.barrier()
            measured.setdefault(contender, []).append(_measure(save, folder / "checkpoint", step, alone))
    if dist.get_rank() == 0:
        output.write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


Save = tuple[Callable[[Path], Callable[[], bool]], Callable[[Path], None]]
"""What begins a save and returns a function that says whether it is done; and what loads it."""


def _contenders(engine: ts.Engine) -> dict[str, Save]:
    return {
        "torch.save, gathered": (lambda path: _gathered(engine, path), _load_gathered),
        "DCP": (lambda path: _dcp(engine, path), lambda path: _dcp_load(engine, path)),
        "DCP, async": (lambda path: _dcp_async(engine, path), lambda path: _dcp_load(engine, path)),
        "tensorshard": (lambda path: _ours(engine, path, background=False), lambda path: _our_load(engine, path)),
        "tensorshard, background": (
            lambda path: _ours(engine, path, background=True),
            lambda path: _our_load(engine, path),
        ),
    }


def _measure(save: Save, path: Path, step: Callable[[], float], alone: float) -> dict[str, float]:
    begin, load = save
    before = status_bytes("RssAnon") or 0
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    start = time.perf_counter()
    is_done = begin(path)
    dist.barrier()
    blocked = time.perf_counter() - start
    steps: list[float] = []
    while True:
        done = torch.tensor(int(is_done()))
        dist.all_reduce(done, dist.ReduceOp.MIN)
        if done.item():
            break
        steps.append(step())
    saved = time.perf_counter() - start
    peak = max(0, (status_bytes("VmHWM") or 0) - (status_bytes("RssFile") or 0) - before)
    size = sum(file.stat().st_size for file in path.parent.rglob("*") if file.is_file())
    dist.barrier()
    start = time.perf_counter()
    load(path)
    dist.barrier()
    found = {"blocked": blocked, "saved": saved, "peak": float(peak), "bytes": float(size)}
    found["loaded"] = time.perf_counter() - start
    found["lost"] = blocked + max(0.0, sum(steps) - len(steps) * alone)
    return found


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
    whole = {}
    for name, tensor in _tensors(engine).items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if dist.get_rank() == 0:
            whole[name] = full
    if dist.get_rank() == 0:
        with path.open("wb") as stream:
            torch.save(whole, stream)
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
    room = {name: torch.zeros_like(tensor) for name, tensor in _tensors(engine).items()}
    dcp.load(room, storage_reader=dcp.FileSystemReader(path))


def _ours(engine: ts.Engine, path: Path, *, background: bool) -> Callable[[], bool]:
    engine.save(path, background=background)
    return lambda: engine.saving is None or _check(engine)


def _check(engine: ts.Engine) -> bool:
    engine._background.check()  # as the next update does
    return engine.saving is None


def _our_load(engine: ts.Engine, path: Path) -> None:
    engine.load(path)


if __name__ == "__main__":
    main()
