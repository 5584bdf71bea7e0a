"""What training with a limit on memory needs of the machine. It is printed and checked before the training starts."""

from pathlib import Path

from benchmarks.harness import memory
from benchmarks.harness.memory_group import can_limit
from benchmarks.offloads import OffloadWork
from tensorshard.offload.scratch_file import free_bytes

# Bytes for each parameter.
_IN_MEMORY = 18  # bf16 weights, fp32 masters, two states and gradients
_ON_DISK = 16  # all of these except the weights
_MOVED = 32  # bytes on disk, read and written once in a step
_MARGIN = 1 << 28  # files grow in steps, and tensors take whole blocks


def disk_needed(work: OffloadWork, world_size: int) -> int:
    """The most bytes that a contender has on disk at any time, on all ranks together."""
    inputs_of_blocks = 2 * work.layers * work.tokens * work.width * world_size  # bf16, one sequence a rank
    return max(_ON_DISK * work.parameters + inputs_of_blocks, 2 * work.raw_bytes) + _MARGIN


def memory_needed(work: OffloadWork, world_size: int) -> int:
    """Bytes that a contender without offload needs on all ranks: each has the full weights and their gradients."""
    return (_IN_MEMORY + 4 * (world_size - 1)) * work.parameters


def describe_needs(work: OffloadWork, world_size: int, folder: str) -> str:
    """Says in sentences what `work` needs, and what the machine has.

    Raises:
        ValueError: there is too little memory, or too little space in `folder`.
    """
    needed, free = disk_needed(work, world_size), free_bytes(Path(folder))
    available = memory.available_bytes()
    if needed > free:
        raise ValueError(
            f"{work.name} needs {_gb(needed)} of disk in {folder!r}, which has {_gb(free)} left; give --folder on a "
            f"larger disk, or --model with a smaller one"
        )
    if work.memory_bytes > available:
        raise ValueError(
            f"{work.name} may take {_gb(work.memory_bytes)} of memory, and {_gb(available)} are available; end other "
            f"programs, or give --memory or a smaller --model"
        )
    limited = "held by a memory cgroup" if can_limit() else "which is not enforced, as no memory cgroup can be made"
    return (
        f"{work.name}, {work.parameters / 1e6:,.1f} million parameters, {world_size} rank(s). "
        f"Memory: {_gb(work.memory_bytes)}, {limited}; {_gb(available)} are available, and all in memory would take "
        f"{_gb(memory_needed(work, world_size))}. Disk: up to {_gb(needed)} in {folder}, which has {_gb(free)} left; a "
        f"step reads and writes up to {_gb(_MOVED * work.parameters)}."
    )


def reason_to_leave_out(work: OffloadWork, world_size: int, *, offloads: bool) -> str | None:
    """Why a contender would need more memory than the machine has, without a limit to end it; None if it would not."""
    needed, available = memory_needed(work, world_size), memory.available_bytes()
    if offloads or can_limit() or needed <= available:
        return None
    return f"not run: needs {_gb(needed)} of memory, {_gb(available)} are available, and nothing would end it in time"


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.1f} GB"
