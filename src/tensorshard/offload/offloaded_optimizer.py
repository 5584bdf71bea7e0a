"""An optimizer whose states are in host memory or on disk, and are updated in the host's cache, a tile at a time.

Also here: gradients in host memory or on disk, from the end of their reduction to the update.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from tensorshard.comm.sharding import to_local
from tensorshard.comm.world import world
from tensorshard.offload.background_update import BackgroundUpdate
from tensorshard.offload.tiers import TILE_ALIGNMENT, DeviceSlot, OffloadedMaster, Slot, SlotSpec, Tiers, laid_out_like
from tensorshard.offload.transfers import Move, Transfers, Work
from tensorshard.offload.updates import OffloadedStates, Tile, TileUpdates, options_now, state_keys, tile_update, tiles
from tensorshard.plan.storage import Update
from tensorshard.torch_private.operators import foreach_norm
from tensorshard.torch_private.optimizers import step_without_hooks, with_step_hooks
from tensorshard.torch_private.tensors import share_storage, storage_address, tensor_version

_WORKS = 8  # buffers that are filled, used and emptied in turn


class OffloadedOptimizer(Update):
    """Replaces an optimizer's ``step()`` by one with offloaded states. The update is the same to the last bit.

    The optimizer keeps its class, groups and options. The tensors in ``optimizer.state`` are the offloaded states. They
    can be read and written between steps, at the disk's speed.

    Args:
        masters: the trained master weights, by name, in the order in which forward needs them.
        dtypes: of the states of each of them, by their keys, for optimizers without a tile update.
        tiers: where the states go.
        offloaded: the master weights that are offloaded themselves, by name.
        agree: called at the end of each step that uses a disk, with this rank's error, if any. It raises if there was
            an error on any rank.

    Attributes:
        background: the update that goes on after a step, which the next step waits for.
        gradients: those that are offloaded; None if they stay on the device.

    Raises:
        ValueError: updates should go on after steps return, and there is no tile update of this optimizer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        masters: Mapping[str, nn.Parameter],
        dtypes: Mapping[str, Mapping[str, torch.dtype]],
        tiers: Tiers,
        *,
        offloaded: Mapping[str, OffloadedMaster],
        agree: Callable[[Exception | None], None],
    ) -> None:
        self.background = BackgroundUpdate(*([] if tiers.copies is None else [tiers.copies.make_current]))
        self._pending = False  # the ranks do not know yet how the last update ended
        self._step_scale: torch.Tensor | float | None = None  # of the gradients of the step that the Engine takes
        self._returns_early = False  # that step does
        self._optimizer = optimizer
        self._tiers = tiers
        self._agree = agree
        update = tile_update(optimizer)
        self._updates = None if update is None else TileUpdates(optimizer, update)
        if tiers.offload.overlap and update is None:
            raise ValueError(
                f"offload.overlap=True was given with {type(optimizer).__name__}, whose own step updates one parameter "
                f"after the other; set offload.overlap=False, or use Adam, AdamW, SGD or Adagrad with common options"
            )
        self._groups = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        tensors = {n: m for n, m in masters.items() if m.dim() and m in self._groups}
        self._others = [m for m in masters.values() if m in self._groups and not m.dim()]  # scalars stay where they are
        kinds = {name: self._state_dtypes(name, master, dtypes) for name, master in tensors.items()}
        wanted = [(n, key, dtype) for n, keys in kinds.items() for key, dtype in keys.items()]
        specs = [SlotSpec("optimizer states", to_local(tensors[n]).numel(), dtype) for n, _, dtype in wanted]
        made = tiers.add(tiers.offload.optimizer or "cpu", specs)
        places: dict[str, dict[str, Slot]] = {name: {} for name in tensors}
        for (name, key, _), slot in zip(wanted, made, strict=True):
            places[name][key] = slot
        self._offloaded = {
            master: OffloadedStates(name, master, to_local(master.detach()).view(-1), places[name], offloaded.get(name))
            for name, master in tensors.items()
        }
        self._transfers = self._make_transfers()
        self.gradients: OffloadedGradients | None = None
        if tiers.offload.gradients is not None:
            every = [SlotSpec("gradients", to_local(m).numel(), m.dtype) for m in tensors.values()]
            gradient_slots = tiers.add(tiers.offload.gradients, every)
            self.gradients = OffloadedGradients(
                dict(zip(tensors.values(), gradient_slots, strict=True)), tiers, self._transfers, self.background
            )
        self._adopt()
        optimizer.register_load_state_dict_pre_hook(lambda *_: self.wait())
        optimizer.register_load_state_dict_post_hook(lambda _: self._adopt())
        optimizer.register_state_dict_pre_hook(lambda _: self.wait())
        this = self

        def step(_: torch.optim.Optimizer, closure: Any = None) -> Any:
            return this._torch_step(closure)

        # With torch's hooks before and after every step.
        optimizer.step = MethodType(with_step_hooks(step), optimizer)  # type: ignore[method-assign]

    @property
    def copied(self) -> set[torch.Tensor]:
        return {m for m, o in self._offloaded.items() if o.place is not None and self._updates is not None}

    @property
    def moves_gradients(self) -> bool:
        return self.gradients is not None

    @property
    def reserves_states(self) -> bool:
        return True

    @property
    def is_pending(self) -> bool:
        return self._pending

    def wait(self) -> None:
        failure = self.background.finish()
        if failure is not None:
            raise failure

    def finish(self) -> None:
        if self._pending:
            self._agree(self.take_failure())

    def take_failure(self) -> Exception | None:
        """Waits for the end of the last update, and returns its error, if any, for all ranks."""
        self._pending = False
        return self.background.take_failure()

    def gradient_norm(self, master: nn.Parameter) -> torch.Tensor | None:
        return None if self.gradients is None else self.gradients.norm(master)

    def step(self, masters: Iterable[nn.Parameter], scale: torch.Tensor | float | None) -> None:
        self._step_scale, self._returns_early = scale, self._tiers.offload.overlap
        try:
            self._optimizer.step()
        finally:
            self._step_scale, self._returns_early = None, False

    @torch.no_grad()
    def _torch_step(self, closure: Any = None) -> Any:
        """One update of all parameters that have a gradient.

        Raises:
            OSError: the disk failed; names the folder.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.finish()
        factor = self._step_scale
        on_host = factor.to("cpu") if isinstance(factor, torch.Tensor) else factor  # the host makes the updates
        failure = self._tiers.take_failure()
        if self.gradients is not None:
            failure = self.gradients.begin_update() or failure
        changed = [o for o in self._offloaded.values() if o.master.grad is not None]
        if self._returns_early and not world().is_simulated:
            self._start(changed, on_host, failure)
        else:
            self._update_now(changed, on_host, failure)
        self._scale(self._others, factor)
        self._step_of(self._others)
        return loss

    def _update_now(
        self, changed: Sequence[OffloadedStates], factor: torch.Tensor | float | None, failure: OSError | None
    ) -> None:
        try:
            if failure is not None:
                raise failure
            if self._updates is not None:
                self._begin(changed)
                self._update_tiles(changed, factor)
            else:
                self._scale((o.master for o in changed), factor)
                for o in changed:
                    o.adopt(self._optimizer.state.get(o.master, {}))
                self._tiers.sync_mapping()
                self._transfers.run(self._works_of_others(changed))
        except OSError as error:
            failure = error
        if self._tiers.offload.uses_disk:
            self._agree(failure)

    def _start(
        self, changed: Sequence[OffloadedStates], factor: torch.Tensor | float | None, failure: OSError | None
    ) -> None:
        self._begin(changed)
        masters = self.background.in_order(o.master for o in changed)
        ordered = [self._offloaded[master] for master in masters]
        self._pending = True
        self.background.start(partial(self._update_tiles, ordered, factor), masters, failure)

    # -- optimizers whose kernels are known: tiles --

    def _begin(self, changed: Sequence[OffloadedStates]) -> None:
        options = options_now(self._optimizer)
        # The device has been given all work with the old weights by now.
        given = None if self._tiers.copies is None else self._tiers.copies.given()
        for o in changed:
            if o.device_copy is not None:
                o.device_copy.after = given
            gradient = None if self.gradients is None else self.gradients.slot(o.master)
            o.begin(self._optimizer, options[self._groups[o.master]], gradient)
        for o in changed:
            o.count_step(self._optimizer)

    def _update_tiles(self, changed: Sequence[OffloadedStates], factor: torch.Tensor | float | None) -> None:
        self._tiers.sync_mapping()
        self._transfers.run(self._works(changed, factor))

    def _works(self, changed: Iterable[OffloadedStates], factor: torch.Tensor | float | None) -> Iterator[Work]:
        """Tiles of all parameters in their order, as many at once as a buffer holds."""
        together: list[tuple[OffloadedStates, int, list[Move]]] = []
        held = 0
        for o in changed:
            for start, numel in tiles(o.weights.numel(), self._elements_of(o)):
                moves = [
                    Move(slot, start, numel, slot.tensor.dtype, read=key not in o.fresh)
                    for key, slot in o.states.items()
                ]
                if o.place is not None:
                    moves.append(Move(o.place.slot, start, numel, o.weights.dtype))
                if o.device_copy is not None:
                    moves.append(Move(o.device_copy, start, numel, o.device_copy.tensor.dtype, read=False, zero=False))
                if o.gradient is not None:
                    moves.append(Move(o.gradient, start, numel, o.gradient.tensor.dtype, write=False))
                size = sum(move.buffer_bytes for move in moves)
                if together and held + size > self._work_bytes:
                    yield self._work(together, factor)
                    together, held = [], 0
                together.append((o, start, moves))
                held += size
        if together:
            yield self._work(together, factor)

    def _work(
        self, together: Sequence[tuple[OffloadedStates, int, list[Move]]], factor: torch.Tensor | float | None
    ) -> Work:
        ends = [o.master for o, start, _ in together if o.is_done_when_written and self._is_last(o, start)]
        written = partial(self.background.done, ends) if ends else None
        moved = [move for _, _, moves in together for move in moves]
        [(first, start, _), *others] = together
        # Tiles of one parameter have the same size but for the last, with which its update ends.
        kind = None if others or self._is_last(first, start) else first.name
        return Work(moved, partial(self._compute, together, factor), written, kind)

    def _compute(
        self,
        together: Sequence[tuple[OffloadedStates, int, list[Move]]],
        factor: torch.Tensor | float | None,
        tensors: list[torch.Tensor],
    ) -> None:
        assert self._updates is not None
        position = 0
        for o, start, moves in together:
            moved = tensors[position : position + len(moves)]
            position += len(moves)
            numel = moves[0].numel if moves else min(self._elements_of(o), o.weights.numel() - start)
            tile = slice(start, start + numel)
            mine = {key: moved.pop(0) for key in o.states}
            weights, copy = o.weights[tile], None
            if o.place is not None:
                weights, copy = moved.pop(0), None if o.place.copy is None else o.place.copy[tile]
            if o.device_copy is not None:
                copy = moved.pop(0)
            if o.gradient_in_memory is not None:
                gradient = o.gradient_in_memory[tile]
            else:
                gradient = moved.pop(0)
            # Done once, here: a tile takes so little time that even the smallest operation counts.
            scale = factor.to(weights.dtype) if isinstance(factor, torch.Tensor) else factor
            self._updates.run(Tile(o, weights, gradient, mine, scale, copy))
            del weights, copy, gradient  # before others hear of it: who holds memory of a parameter may write it
            if self._is_last(o, start):
                o.gradient_in_memory = None
                if not o.is_done_when_written:
                    self.background.done([o.master])

    # -- other optimizers: a parameter at a time --

    def _works_of_others(self, changed: Iterable[OffloadedStates]) -> Iterator[Work]:
        for o in changed:
            known = self._optimizer.state.get(o.master, {})
            moves = [
                Move(slot, 0, slot.tensor.numel(), slot.tensor.dtype, read=key in known)
                for key, slot in o.states.items()
            ]
            yield Work(moves, partial(self._compute_other, o))

    def _compute_other(self, o: OffloadedStates, tensors: list[torch.Tensor]) -> None:
        state = self._optimizer.state[o.master]
        buffers = dict(zip(o.states, tensors, strict=True))
        for key in o.states:
            if key in state:
                state[key] = laid_out_like(o.master, buffers[key])
        self._step_of([o.master])
        for key, value in state.items():
            if key in o.states:
                local = to_local(value).reshape(-1)
                if storage_address(local.untyped_storage()) != storage_address(buffers[key].untyped_storage()):
                    buffers[key].copy_(local)
                state[key] = o.shown(key)
            elif isinstance(value, torch.Tensor) and value.shape == o.master.shape:
                raise RuntimeError(
                    f"{type(self._optimizer).__name__} keeps a state {key!r} of {o.name!r} that it did not keep for a "
                    f"small parameter, so no space was reserved for it; use offload=None with this optimizer"
                )

    def _step_of(self, masters: Sequence[nn.Parameter]) -> None:
        """The optimizer's own step, for some parameters alone."""
        if any(master.grad is not None for master in masters):
            with _only(self._optimizer, set(masters)):
                step_without_hooks(self._optimizer)

    def _scale(self, masters: Iterable[nn.Parameter], factor: torch.Tensor | float | None) -> None:
        if factor is not None:
            for master in masters:
                if master.grad is not None:
                    gradient = to_local(master.grad)
                    gradient.mul_(factor.to(gradient.dtype) if isinstance(factor, torch.Tensor) else factor)

    # -- states --

    def _state_dtypes(
        self, name: str, master: nn.Parameter, dtypes: Mapping[str, Mapping[str, torch.dtype]]
    ) -> dict[str, torch.dtype]:
        if self._updates is None:
            return dict(dtypes.get(name, {}))
        group = self._optimizer.param_groups[self._groups[master]]
        return dict.fromkeys(state_keys(self._optimizer, group), master.dtype)

    @torch.no_grad()
    def _adopt(self) -> None:
        """Moves states that the optimizer has in memory (made by its constructor, or loaded) to their slots."""
        for o in self._offloaded.values():
            o.adopt(self._optimizer.state.get(o.master, {}))

    def _make_transfers(self) -> Transfers:
        budget = self._tiers.offload.buffer_bytes - self._tiers.offload.activation_buffer_bytes
        self._work_bytes = budget // _WORKS
        if self._updates is None:
            largest = max((sum(s.nbytes for s in o.specs()) for o in self._offloaded.values()), default=1)
            if largest > budget:
                raise ValueError(
                    f"offload moves all states of one parameter at a time with {type(self._optimizer).__name__}, whose "
                    f"largest are {largest:,} bytes, and offload.buffer_memory={self._tiers.offload.buffer_memory!r}; "
                    f"set it to {largest} or more (Adam, AdamW, SGD and Adagrad need less)"
                )
            return Transfers(budget, largest, copies=self._tiers.copies)
        return Transfers(budget, self._work_bytes, copies=self._tiers.copies)

    def _is_last(self, o: OffloadedStates, start: int) -> bool:
        return start + self._elements_of(o) >= o.weights.numel()

    def _elements_of(self, o: OffloadedStates) -> int:
        """How many elements of a parameter fit into a buffer, with everything that is moved for them."""
        each = sum(slot.tensor.dtype.itemsize for slot in o.states.values())
        if o.place is not None:
            each += o.weights.dtype.itemsize
        if o.device_copy is not None:
            each += o.device_copy.tensor.dtype.itemsize
        if self.gradients is not None:
            each += o.weights.dtype.itemsize
        most = self._work_bytes // max(each, 1)
        return max(TILE_ALIGNMENT, most // TILE_ALIGNMENT * TILE_ALIGNMENT)


@contextmanager
def _only(optimizer: torch.optim.Optimizer, masters: set[nn.Parameter]) -> Iterator[None]:
    """A context in which the optimizer has no other parameters than `masters`."""
    before = [group["params"] for group in optimizer.param_groups]
    for group, members in zip(optimizer.param_groups, before, strict=True):
        group["params"] = [member for member in members if member in masters]
    try:
        yield
    finally:
        for group, members in zip(optimizer.param_groups, before, strict=True):
            group["params"] = members


class OffloadedGradients:
    """Moves each master weight's gradient when it is reduced. ``master.grad`` then shows it in its new place.

    It is written in the background, without the page cache, while backward goes on. Further micro-batches and hooks add
    to it in place.

    If the device has memory of its own, ``master`` and ``master.grad`` are in the host's memory, or mapped to the disk.

    Args:
        places: where each master weight's gradient goes.
        tiers: of all slots.
        transfers: writes to them.
        background: the update that may still read the last step's gradients.
    """

    def __init__(
        self, places: Mapping[nn.Parameter, Slot], tiers: Tiers, transfers: Transfers, background: BackgroundUpdate
    ) -> None:
        self._places = places
        self._tiers = tiers
        self._transfers = transfers
        self._background = background
        self._norms: dict[nn.Parameter, tuple[torch.Tensor, int]] = {}  # the norm, with the gradient's version
        self._written: list[nn.Parameter] = []  # by transfers under way
        self._settled = False
        self._failure: OSError | None = None

    @torch.no_grad()
    def take(self, master: nn.Parameter, shard: torch.Tensor | None = None) -> None:
        """Moves the gradient of `master`, if it has one that is not moved yet.

        Args:
            shard: this rank's gradient, if it is on a device and `master` in the host's memory. It is added to the one
                of ``master.grad``. 16-bit gradients leave the device in 16 bits. None: the gradient is ``master.grad``.
        """
        slot = self._places.get(master)
        known = slot is not None and self.slot(master) is not None
        local = shard
        if shard is None and master.grad is not None and not known:
            local = to_local(master.grad)
        if slot is None and shard is not None:
            _keep(master, shard)
        if slot is None or local is None:
            return
        if self._failure is None:
            self._background.finish()  # all ranks learn of a failure after backward
            try:
                if known:
                    self._add(slot, local.reshape(-1))
                    self._norms.pop(master, None)
                else:
                    self._move(master, slot, local.reshape(-1))
            except OSError as error:
                self._failure = error  # all ranks learn of it at the update; an exception here would leave them waiting
        if shard is not None or self._failure is None:
            master.grad = laid_out_like(master, slot.tensor)

    def _move(self, master: nn.Parameter, slot: Slot, values: torch.Tensor) -> None:
        [norm] = foreach_norm([values.to(master.dtype)], 2.0, None)
        self._settle()
        self._transfers.write(slot, values, master.dtype)
        self._norms[master] = norm, -1
        self._written.append(master)

    def _add(self, slot: Slot, values: torch.Tensor) -> None:
        """Adds `values`, on the device, to what is in `slot`."""
        assert self._tiers.copies is not None
        self.finish()
        self._settle()
        slot_of_values = DeviceSlot(values, self._tiers.copies, self._tiers.copies.given())
        most = self._transfers.elements(values.dtype, slot.tensor.dtype)
        self._transfers.run(
            Work(
                [
                    Move(slot, start, count, slot.tensor.dtype),
                    Move(slot_of_values, start, count, values.dtype, write=False),
                ],
                _add_tile,
            )
            for start, count in tiles(values.numel(), most)
        )

    def _settle(self) -> None:
        if not self._settled:
            self._settled = True
            self._tiers.sync_mapping()

    def finish(self) -> None:
        """Waits until all gradients that were taken can be read."""
        if not self._written:
            return
        try:
            self._transfers.drain()
        except OSError as error:
            self._failure = error
        for master in self._written:
            self._norms[master] = self._norms[master][0], _version(master)
        self._written.clear()

    def begin_update(self) -> OSError | None:
        """Called before the update; returns the error in taking gradients, if any."""
        self.finish()
        self._settled = False
        failure, self._failure = self._failure, None
        return failure

    def slot(self, master: nn.Parameter) -> Slot | None:
        """The slot that the gradient of `master` is in; None if it is in the device's memory."""
        slot = self._places.get(master)
        if slot is None or master.grad is None or not share_storage(to_local(master.grad), slot.tensor):
            return None
        return slot

    def norm(self, master: nn.Parameter) -> torch.Tensor | None:
        """L2 norm of this rank's part of the gradient when it was taken; None if it has changed since."""
        self.finish()
        known = self._norms.get(master)
        return known[0] if known is not None and self.slot(master) and known[1] == _version(master) else None


def _keep(master: nn.Parameter, shard: torch.Tensor) -> None:
    """Keeps the gradient of a master weight without a place, such as one that no optimizer updates, beside the
    weight."""
    values = shard.to(master.device, master.dtype)
    if master.grad is None:
        master.grad = laid_out_like(master, values.reshape(-1))
    else:
        to_local(master.grad).add_(values.view(to_local(master.grad).shape))


def _add_tile(tensors: list[torch.Tensor]) -> None:
    total, values = tensors
    total.add_(values)


def _version(master: nn.Parameter) -> int:
    """A number that grows with each in-place change of the gradient of `master`."""
    return -2 if master.grad is None else tensor_version(to_local(master.grad))
