"""``tensorshard check`` on each rank: a step that must be right, and how fast the machine is."""

import gc
import json
import math
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from tensorshard.comm.collectives import all_gather_into
from tensorshard.comm.groups import world_group
from tensorshard.comm.world import default_device, join_world
from tensorshard.host.memory import held_memory
from tensorshard.models import GPT, next_token_loss
from tensorshard.offload.scratch_file import ScratchFile
from tensorshard.plan.offload import Offload
from tensorshard.predict.hardware import Hardware, Link, Rates
from tensorshard.predict.operation_ledger import FORWARD, OperationLedger
from tensorshard.trainer.self_test import run as run_plans

PLANS = ("ZeRO 3", "tp 2")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NEAR_MATMUL = (0.6, 1.0)  # of the rate of a large product; a model's products are smaller
_NEAR_MEMORY = (0.6, 1.5)  # caches make it faster


def run(results: str) -> None:
    """Checks a few plans, and measures; rank 0 writes what it found as JSON to the file `results`.

    Raises:
        SelfTestError: a plan did not compute what one process does.
    """
    device = default_device()
    join_world(device)
    size = dist.get_world_size()
    run_plans(PLANS)
    context = process_bytes(device)
    rates, notes = measure_rates(device, size)
    if dist.get_rank() == 0:
        measured = {"memory": memory_of(device), "context": context, "rates": asdict(rates), "notes": notes}
        Path(results).write_text(json.dumps(measured))
    dist.destroy_process_group()


def measure_rates(device: torch.device, size: int) -> tuple[Rates, list[str]]:
    """The rates of a world of `size` ranks on this machine, and what could not be measured. A collective.

    All ranks compute at once, as in training.
    """
    notes = []
    flops = {str(dtype).removeprefix("torch."): matmul_rate(device, dtype) for dtype in _DTYPES}
    memory = memory_rate(device)
    host = host_rate(device) if device.type == "cuda" else memory
    overhead = operator_overhead(device)
    link = link_rates(world_group(), device) if size > 1 else Link(host, 2e-5)
    disk = None
    if dist.get_rank() == 0:
        try:
            disk = disk_rate()
        except (ValueError, OSError) as error:
            notes.append(f"the disk was not measured: {error}")
    dist.barrier()
    rates = Rates(
        flops,
        memory,
        _NEAR_MATMUL,
        _NEAR_MEMORY,
        overhead,
        asynchronous=device.type == "cuda",
        devices_per_node=torch.cuda.device_count() if device.type == "cuda" else 1024,
        within_node=link,
        between_nodes=link,
        host_bandwidth=host,
        disk_bandwidth=disk,
    )
    return rates, notes


def process_bytes(device: torch.device) -> int:
    """Bytes that this process holds without a model: on a CPU, its own memory now; on a GPU, an assumed number.

    Called after a few small models were trained and freed, so that libraries have allocated what they keep.
    """
    if device.type == "cuda":
        return Hardware.context
    gc.collect()
    memory = held_memory()
    return 0 if memory is None else memory.now


def memory_of(device: torch.device) -> int:
    """Bytes of memory of a device; for a CPU, those of the machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def describe(rates: Rates, seconds: float) -> str:
    """A line for each rate that was measured."""
    link = rates.within_node
    lines = {f"matmul {name}": f"{rate / 1e9:,.0f} GFLOP/s" for name, rate in rates.flops.items()}
    lines |= {
        "memory (triad)": f"{rates.memory_bandwidth / 1e9:,.1f} GB/s",
        "operator": f"{rates.launch * 1e6:.1f} us beside its work",
        "collectives": f"{link.latency * 1e6:,.0f} us a message, {link.bandwidth / 1e9:,.2f} GB/s",
    }
    if rates.disk_bandwidth is not None:
        lines["disk (direct)"] = f"{rates.disk_bandwidth / 1e9:,.2f} GB/s"
    lines["took"] = f"{seconds:.0f} s"
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())


_WIDTH = {"cpu": 1024, "cuda": 8192}
_TRIAD_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}  # bytes of each of three arrays: more than caches hold
_REPEATS = 5
_LONGEST = 1.0  # seconds after which something slow is not repeated again
_DISK_BLOCK = 16 << 20
_DISK_BLOCKS = 8
_SMALL, _LARGE = 1 << 8, 8 << 20  # bytes that collectives gather


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of a product of square matrices."""
    width = _WIDTH[device.type]
    a, b = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    output = torch.empty(width, width, device=device, dtype=dtype)
    return 2 * width**3 / _best(lambda: torch.mm(a, b, out=output), device)


def memory_rate(device: torch.device) -> float:
    """Bytes a second of the triad a = b + s * c (McCalpin's STREAM), two arrays read and one written."""
    numel = _TRIAD_BYTES[device.type] // 4
    a, b, c = (torch.ones(numel, device=device) for _ in range(3))
    return 3 * a.nbytes / _best(lambda: torch.add(b, c, alpha=3.0, out=a), device)


def operator_overhead(device: torch.device) -> float:
    """Seconds that an operator takes in addition to its work, with Python, views and autograd around it: those of a
    tiny network's forward and backward, divided by its operators."""
    model = GPT(64, 8, num_layers=4, num_heads=2, width=16).to(device)
    tokens = torch.zeros(1, 8, dtype=torch.long, device=device)

    def step() -> None:
        next_token_loss(model(tokens), tokens)[0].backward()

    step()  # makes the gradients, to which later steps add
    with OperationLedger() as ledger:
        ledger.begin_step(lambda: FORWARD)
        step()
        ledger.end_step()
    return _best(step, device) / ledger.kernel_count


def disk_rate() -> float:
    """Bytes a second that the folder for scratch files writes and reads, past the page cache.

    Raises:
        ValueError: the folder takes no scratch files.
    """
    file = ScratchFile(Offload().folder)
    start = file.reserve(_DISK_BLOCK * _DISK_BLOCKS)
    block = memoryview(mmap.mmap(-1, _DISK_BLOCK))
    begin = time.perf_counter()
    for transfer in (file.write, file.read):
        for index in range(_DISK_BLOCKS):
            transfer(block, start + index * _DISK_BLOCK)
    return 2 * _DISK_BLOCK * _DISK_BLOCKS / (time.perf_counter() - begin)


def host_rate(device: torch.device) -> float:
    """Bytes a second from the host's memory to a GPU."""
    source = torch.empty(_TRIAD_BYTES["cpu"], dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device)
    return source.nbytes / _best(lambda: target.copy_(source, non_blocking=True), device)


def link_rates(group: dist.ProcessGroup, device: torch.device) -> Link:
    """Latency and bandwidth of all-gathers over `group`, from a small one and a large one. A collective of `group`."""
    seconds = {}
    for nbytes in (_SMALL, _LARGE):
        output = torch.zeros(nbytes // 4, device=device)
        mine = output.chunk(group.size())[group.rank()].clone()
        elapsed = torch.tensor(_best(lambda o=output, m=mine: all_gather_into(o, m, group), device, wall=True))  # type: ignore[misc]
        elapsed = elapsed.to(device)
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX, group=group)
        seconds[nbytes] = elapsed.item()
    others = group.size() - 1
    sent = (_LARGE - _SMALL) * others / group.size()
    return Link(sent / max(seconds[_LARGE] - seconds[_SMALL], 1e-9), seconds[_SMALL] / others, (0.6, 1.0))


def _best(run: Callable[[], object], device: torch.device, *, wall: bool = False) -> float:
    """Seconds of the fastest of some runs. On a CPU, unless `wall`, only this process's computing time counts."""
    threads = torch.get_num_threads()
    on_cpu = device.type == "cpu" and not wall
    best, first = math.inf, time.perf_counter()
    run()
    for _ in range(_REPEATS):
        if best < math.inf and time.perf_counter() - first > _LONGEST and not wall:  # a collective takes all ranks
            break
        _synchronize(device)
        begin = time.process_time() if on_cpu else time.perf_counter()
        run()
        _synchronize(device)
        end = time.process_time() if on_cpu else time.perf_counter()
        best = min(best, (end - begin) / (threads if on_cpu else 1))
    return max(best, 1e-9)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
