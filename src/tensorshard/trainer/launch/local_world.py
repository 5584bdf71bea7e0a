"""The workers of one machine meet in a file, and their connections stay on the loopback interface.

torchrun's rendezvous serves a store to all networks of the machine, without a password, and unpickles what it finds
there. A single machine needs no rendezvous with others. So the agent keeps its store in its own memory, and the workers
have theirs in a file that only this user can open.
"""

import contextlib
import random
import socket
import sys
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from tensorshard.comm.world import STORE_FILE

BACKEND = "tensorshard-local"
_LOOPBACK = "127.0.0.1"


class LocalRendezvous(RendezvousHandler):
    """A rendezvous with a single agent."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._closed = False

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        store = dist.HashStore()
        # Nothing listens at this port. Code that reads MASTER_PORT finds a port that was free.
        meeting_place = RendezvousStoreInfo(_LOOPBACK, free_port())
        return RendezvousInfo(store, 0, 1, meeting_place)

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._closed = True
        return True


def register() -> str:
    """Makes the rendezvous known to torch's launcher; returns its name there."""
    rendezvous_handler_registry.register(BACKEND, _create)
    return BACKEND


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return LocalRendezvous(parameters.run_id)


def local_environment(scratch: Path) -> dict[str, str]:
    """Environment variables for the workers of a single machine: where they meet, and the network interface."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return {
        STORE_FILE: str(scratch / "store"),
        "MASTER_ADDR": _LOOPBACK,
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
    }


def free_port() -> int:
    """A port where nothing listens. It lies below those that systems hand out by themselves, which could take it.

    Raises:
        OSError: none of 100 such ports can be used.
    """
    chance = random.SystemRandom()  # not the module's: a user's seed would make all runs of a machine ask for the same
    for port in chance.sample(range(20_000, 32_768), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((_LOOPBACK, port))
            return port
    raise OSError(f"none of 100 ports between 20000 and 32767 can be used at {_LOOPBACK}")
