"""What an Engine keeps from one save to the next: the save in the background, and the states that a user registers.

It brings none of torch's distributed checkpoints, which take long to import: training may never save.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from tensorshard.comm.collectives import all_reduce_
from tensorshard.common.words import kind_of
from tensorshard.offload.device_copies import PinnedMemory
from tensorshard.torch_private.process_groups import group_device

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import WriteItem

    from tensorshard.checkpoint.background import BackgroundSave

_PAUSE = 0.02  # seconds between two looks


class StagingMemory:
    """The memory of copies, which is kept from one save to the next: the first touch of new memory takes several times
    as long as a copy. It is as large as the largest of them, and given back to the system when a larger one comes."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._is_pinned = False

    @property
    def size(self) -> int:
        """Bytes that are kept."""
        return self._memory.nbytes

    def take(self, size: int, device: torch.device | None) -> torch.Tensor:
        """`size` bytes, which the next call may give away again.

        Args:
            device: the GPU that copies to them; None if none does.

        Raises:
            RuntimeError: the driver refuses to pin so much.
        """
        if size > self._memory.nbytes or (device is not None and not self._is_pinned):
            self._memory = torch.empty(0, dtype=torch.uint8)  # first, so that there are never two
            self._is_pinned = device is not None
            self._memory = (
                torch.empty(size, dtype=torch.uint8)
                if device is None or not size
                # Torch's own pinned memory has a power of two of bytes, and is never given back.
                else torch.frombuffer(PinnedMemory(size, device, "save without background=True"), dtype=torch.uint8)
            )
        return self._memory[:size]


class LastPlan:
    """Which pieces this rank wrote in the last save, and what it held then. A save of the same needs no new plan, which
    takes longer than to copy the values."""

    def __init__(self) -> None:
        self.layouts: dict[str, Any] | None = None
        self.items: Sequence[WriteItem] = ()


class BackgroundSaves:
    """The save of an Engine that goes on in the background, if there is one.

    Args:
        group: of all ranks. They tell each other on the CPU, where the group can: a read from the GPU would wait for
            all of its work, in each step.

    Attributes:
        memory: of the copies, for the next save.
        last_plan: which pieces the ranks have written.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._device = group_device(group, torch.device("cpu"))
        self._current: BackgroundSave | None = None
        self.memory = StagingMemory()
        self.last_plan = LastPlan()

    @property
    def target(self) -> str | None:
        """The checkpoint that is being written; the same on all ranks."""
        return None if self._current is None else self._current.target

    def begin(self, save: "BackgroundSave") -> None:
        """Keeps a `save` that has begun on all ranks."""
        assert self._current is None
        self._current = save

    def check(self) -> None:
        """Notices whether the save is done. A collective while there is one; nothing else.

        Raises:
            RuntimeError: it has failed, on whichever rank; on every rank.
        """
        if self._current is None:
            return
        running = not self._current.is_done  # first, as an error may come meanwhile
        state = torch.tensor([self._current.error is not None, running], dtype=torch.int64, device=self._device)
        if self._group.size() > 1:
            all_reduce_(state, self._group, dist.ReduceOp.SUM, what="engine.save in the background")
        failed, still_running = state.tolist()
        if failed:
            self._fail(self._current)
        elif not still_running:
            self._current = None

    def wait(self) -> None:
        """Returns when the save is done. A collective while there is one.

        Raises:
            RuntimeError: as :meth:`check`.
        """
        while self._current is not None:
            self.check()
            if self._current is not None:
                time.sleep(_PAUSE)

    def _fail(self, save: "BackgroundSave") -> None:
        self._current = None
        save.cancel()
        own = None if save.error is None else f"{type(save.error).__name__}: {save.error}"
        messages: list[Any] = [own]
        if self._group.size() > 1:
            messages = [None] * self._group.size()
            dist.all_gather_object(messages, own, group=self._group)
        ranks = range(len(messages) - 1, -1, -1)  # rank 0 may only repeat what another one says
        rank, message = next((rank, messages[rank]) for rank in ranks if messages[rank] is not None)
        raise RuntimeError(
            f"the save to {save.target} in the background has failed, and there is no checkpoint of that name from "
            f"it; one that was there before is as it was. On rank {rank}: {message}. Training can go on: the state of "
            f"this process is not touched"
        ) from save.error


class Stateful(Protocol):
    """What keeps a state that JSON can hold."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...


class RegisteredStates:
    """The states that were registered with an Engine."""

    def __init__(self) -> None:
        self.shared: dict[str, Stateful] = {}
        self.of_ranks: dict[str, Stateful] = {}

    def add(self, name: Any, part: Any, *, per_rank: bool) -> None:
        """Registers `part`.

        Raises:
            TypeError: it has no state.
            ValueError: the name is taken, or is no name.
        """
        if not isinstance(name, str) or not name or "." in name:
            raise ValueError(f"register_state was given the name {name!r}; it must be a word without dots")
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(part, method, None)):
                raise TypeError(f"register_state was given {name!r}, {kind_of(part)} without a method {method}")
        if name in self.shared or name in self.of_ranks:
            raise ValueError(f"the state {name!r} is registered already; give this one another name")
        (self.of_ranks if per_rank else self.shared)[name] = part
