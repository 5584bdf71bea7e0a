"""Where a rank keeps its states: the port, and its default, which is the device's memory. ``offload/`` has another one.

Code that lays out, trains, saves or predicts asks a :class:`Storage`, and need not know whether a plan offloads.
"""

from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.comm.sharding import scale_gradients
from tensorshard.torch_private.dtensor import shards_of
from tensorshard.torch_private.optimizers import may_skip, skipping


class TakeGradient(Protocol):
    """Called with a master whose gradient has been reduced."""

    def __call__(self, master: nn.Parameter, shard: torch.Tensor | None = None) -> None:
        """`shard`: this rank's part of the gradient, if it is in other memory, so that the master cannot hold it."""


class UpdateProgress(Protocol):
    """How far an update is that goes on after its step has returned."""

    def wait(self, masters: Sequence[nn.Parameter]) -> None:
        """Returns when `masters` are updated, or the update has failed."""

    def is_done(self, masters: Iterable[nn.Parameter]) -> bool:
        """Whether all of `masters` are updated."""

    def finish(self) -> Exception | None:
        """Returns when all of the update is over, and what it moves has arrived; an error if it has failed."""


class MasterPlace:
    """Where this rank's shard of a master weight is: in the device's memory, unless a subclass says otherwise."""

    @property
    def holds_gradients(self) -> bool:
        """Whether the master can hold the gradient that a reduction gives. Else it goes to :class:`TakeGradient`."""
        return True


class StoredModel(Protocol):
    """What a storage asks of the model whose states it keeps."""

    def master_places(self) -> Mapping[str, MasterPlace]: ...

    def watch_gradients(self, take: TakeGradient, finish: Callable[[], None]) -> None: ...

    def watch_updates(self, update: UpdateProgress) -> None: ...


class Update:
    """The update of one optimizer, whose states are where its storage keeps them."""

    @property
    def copied(self) -> Container[torch.Tensor]:
        """The masters for which the update itself writes the copies that forwards compute with."""
        return ()

    @property
    def moves_gradients(self) -> bool:
        """Whether gradients leave the device when they are reduced. A parameter's next one then takes the memory of
        the last one."""
        return False

    @property
    def reserves_states(self) -> bool:
        """Whether there is room only for the states of parameters that were trained from the start."""
        return False

    @property
    def may_skip(self) -> bool:
        """Whether :meth:`step_unless` can be called now."""
        return False

    def step_unless(
        self, masters: Iterable[nn.Parameter], scale: torch.Tensor | float | None, skip: torch.Tensor
    ) -> None:
        """As :meth:`step`, but nothing is changed where the scalar `skip` is 1, and `scale` is then 1, too."""
        raise NotImplementedError

    def step(self, masters: Iterable[nn.Parameter], scale: torch.Tensor | float | None) -> None:
        """One update by the Engine. It may go on in the background, if the plan says so.

        Args:
            masters: the trained master weights.
            scale: gradients are multiplied by it; None for 1.
        """

    @property
    def is_pending(self) -> bool:
        """Whether the last step returned before its update was over, and the ranks do not know yet how that ended."""
        return False

    def wait(self) -> None:
        """Waits until the last update is over, on this rank.

        Raises:
            Exception: it failed; other ranks learn of it in :meth:`finish`.
        """

    def finish(self) -> None:
        """Waits until the last update is over on all ranks. A collective if :attr:`is_pending`.

        Raises:
            Exception: it failed on some rank.
        """

    def gradient_norm(self, master: nn.Parameter) -> torch.Tensor | None:
        """L2 norm of this rank's part of the gradient, if it was measured when the gradient was moved."""
        return None


class DeviceUpdate(Update):
    """The update that an optimizer makes by itself, in the device's memory."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def step(self, masters: Iterable[nn.Parameter], scale: torch.Tensor | float | None) -> None:
        if scale is not None:
            scale_gradients(masters, scale)
        self._optimizer.step()

    @property
    def may_skip(self) -> bool:
        return may_skip(self._optimizer)

    def step_unless(
        self, masters: Iterable[nn.Parameter], scale: torch.Tensor | float | None, skip: torch.Tensor
    ) -> None:
        with skipping(self._optimizer, skip):
            self.step(masters, scale)


class ParameterUnits:
    """Keeps this rank's shards of a model's parameters that are whole only while they are used, a unit at a time. By
    default they stay in the device's memory."""

    def keep(self, shard: torch.Tensor) -> tuple[torch.Tensor, MasterPlace]:
        """Copies the shard of one parameter to its place; returns the tensor that shows it there."""
        return shard.clone(), MasterPlace()

    def unit(
        self, masters: Sequence[nn.Parameter], places: Sequence[MasterPlace], dtypes: Sequence[torch.dtype]
    ) -> Any:
        """Notes that `masters` are read together. Returns what :meth:`read` takes.

        Args:
            dtypes: the types in which forwards compute with them.
        """
        return masters

    def read(self, unit: Any, phase: Hashable) -> AbstractContextManager[Sequence[torch.Tensor]]:
        """The shards of `unit`, until the context ends.

        Args:
            phase: forward or backward, for example. Each phase has its own order of units.
        """
        return nullcontext(shards_of(unit))

    def check_room(self, group: dist.ProcessGroup) -> None:
        """Called after the last :meth:`keep`. A collective of `group`, if shards are kept elsewhere.

        Raises:
            ValueError, OSError: a rank has no room for its shards.
        """

    def watch_forwards(self, model: nn.Module) -> None:
        """Makes forwards of `model` see what was written to the shards."""

    def watch_updates(self, update: UpdateProgress) -> None:
        """Shards are read ahead only when `update` has changed them."""

    def forget(self) -> None:
        """Called after the shards were changed: drops what was read ahead."""


class TemporaryCopy:
    """Memory for a second copy of tensors, such as those that are being read from a checkpoint."""

    def like(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor of the shape and layout of `tensor`, of any values.

        Raises:
            ValueError: there is no space for them.
        """
        return torch.empty_like(tensor, dtype=dtype or tensor.dtype)


class Storage:
    """Where one rank keeps master weights, states, gradients, parameters and activations."""

    @property
    def masters_on_host(self) -> bool:
        """Whether masters are in the host's memory, which updates them, and the device computes in its own."""
        return False

    # -- layout --

    def move_activations(self, blocks: Iterable[nn.Module]) -> None:
        """Moves what each of `blocks` keeps for backward, if the plan says so."""

    def keep_master(self, values: torch.Tensor, copy: torch.Tensor) -> tuple[torch.Tensor, MasterPlace]:
        """Copies this rank's shard of a master weight to its place; returns the tensor that shows it there.

        Args:
            copy: the shard of the weights that forwards compute with, flat.

        Raises:
            ValueError: there is no space for it.
        """
        return values.clone(), MasterPlace()

    def parameter_units(self) -> ParameterUnits:
        """Keeps the shards of one more model, or stage, whose parameters are whole only while they are used."""
        return ParameterUnits()

    # -- training --

    def keep_states(
        self,
        optimizer: torch.optim.Optimizer,
        model: StoredModel,
        masters: Mapping[str, nn.Parameter],
        build: Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer],
    ) -> Update:
        """Takes the states of `optimizer`, and the gradients if the plan says so. A collective.

        Args:
            masters: the trained master weights, by name, in the order in which forward needs them.
            build: makes an optimizer like this one of other parameters.

        Raises:
            ValueError: the optimizer does not update each parameter by itself; there is no space for its states.
        """
        return DeviceUpdate(optimizer)

    def check_transfers(self, *, of_update: bool = False) -> None:
        """Called by all ranks after forwards and backwards: raises on all ranks what failed on one.

        A collective, unless nothing can have failed.

        Args:
            of_update: whether an update in the background is waited for.

        Raises:
            OSError, ValueError: the disk failed, or is full. The gradients are not valid. Weights are as before the
                step, unless the update failed.
        """

    def temporary_copy(self) -> TemporaryCopy:
        """Memory for a second copy of tensors, where there is room for them."""
        return TemporaryCopy()

    # -- what is kept elsewhere, for people and for predictions --

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """The tensors that are not in the device's memory."""
        return ()

    @property
    def held_by_kind(self) -> Mapping[tuple[str, str], int]:
        """Bytes of each kind in "host memory" or on "disk" of this rank; of activations, the most at a time."""
        return {}

    def held(self, where: str) -> int:
        """Bytes that this rank keeps in "host memory", including buffers, or on "disk"."""
        return 0

    def moved(self, where: str) -> int:
        """Bytes that steps have read from and written to "host memory" or "disk"."""
        return 0

    def forget_moved(self) -> None:
        """Makes :meth:`moved` count from zero again."""

    def describe(self) -> str | None:
        """A table of what is kept where on this rank; None if all is in the device's memory."""
        return None


class DeviceStorage(Storage):
    """All is in the device's memory: what the methods of :class:`Storage` do by themselves."""
