"""Joining the world: the default process group, whichever way this process was started."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist


def default_device() -> torch.device:
    """This process's device: the CUDA device of its local rank where there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def join_world(device: torch.device, *, timeout: timedelta | None = None) -> None:
    """Makes sure that a default process group exists.

    An existing group is kept; under torchrun (``RANK`` and ``WORLD_SIZE`` are set) that world is joined; under plain
    ``python`` this process becomes a world of one.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if _under_torchrun():
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def world_size() -> int:
    """Number of processes of the world that :func:`join_world` joins, or has joined."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if _under_torchrun() else 1


def _under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ
