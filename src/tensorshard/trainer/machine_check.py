"""``tensorshard check`` on each rank: a step that must be right, and how fast the machine is."""

import gc
import json
import os
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from tensorshard.comm.groups import world_group
from tensorshard.comm.world import default_device, join_world
from tensorshard.host.memory import held_memory
from tensorshard.predict.hardware import Hardware, Link, Rates
from tensorshard.predict.machine_rates import (
    disk_rate,
    host_rate,
    link_rates,
    matmul_rate,
    memory_rate,
    operator_overhead,
)
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
        found = {"memory": memory_of(device), "context": context, "rates": asdict(rates), "notes": notes}
        Path(results).write_text(json.dumps(found))
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
    held = held_memory()
    return 0 if held is None else held.now


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
