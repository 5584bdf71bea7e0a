"""A device whose memory is not the host's, without one: ranks on CPUs whose copies are made as late as they may be."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import Any
from unittest import mock

import torch

from tensorshard.offload import tiered_storage
from tensorshard.offload.device_copies import DeviceCopies


class LateCopies(DeviceCopies):
    """Makes each copy when it is waited for: what is used before, or has changed until then, shows."""

    def _begin(self, stream: Any, into: torch.Tensor, values: torch.Tensor, after: Any) -> Any:
        assert after is not None, "a copy that follows nothing"
        return Late(into, values)


class Late:
    """A copy that is made when it is waited for."""

    def __init__(self, into: torch.Tensor, values: torch.Tensor) -> None:
        self._copy: tuple[torch.Tensor, torch.Tensor] | None = (into, values)
        self._lock = Lock()

    def synchronize(self) -> None:
        with self._lock, torch.no_grad():
            if self._copy is not None:
                into, values = self._copy
                into.copy_(values)
                self._copy = None


@contextmanager
def off_device(copies: type[DeviceCopies] = LateCopies) -> Iterator[None]:
    """Within this, Engines are made as on a device whose memory is not the host's."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(tiered_storage, "is_host_memory", lambda _: False))
        stack.enter_context(mock.patch.object(tiered_storage, "DeviceCopies", copies))
        yield
