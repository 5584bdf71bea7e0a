"""An optimizer whose states are on another tier, and come to the host's cache a tile at a time."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from tensorshard.comm.sharding import to_local
from tensorshard.offload.offloaded_gradients import OffloadedGradients
from tensorshard.offload.slots import TILE_ALIGNMENT, OffloadedMaster, Slot, Slots, SlotSpec, laid_out_like
from tensorshard.offload.transfers import Move, Transfers, Work
from tensorshard.offload.updates import (
    begins_with_gradient,
    counts_steps,
    initial_step,
    state_keys,
    tile_update,
)
from tensorshard.torch_private.optimizers import step_without_hooks

_WORKS = 8  # buffers that are filled, computed with and emptied by turns
_CACHE_ELEMENTS = 1 << 16  # of each tensor, for each thread: gradient, weights and two states in 1 MiB


@dataclass
class Offloaded:
    """One parameter whose states are offloaded.

    Args:
        master: what the optimizer updates.
        weights: this rank's shard of it, flat; where it is in memory.
        states: the slots of its states, by their keys.
        place: of the shard, where it is offloaded itself.
    """

    name: str
    master: nn.Parameter
    weights: torch.Tensor
    states: dict[str, Slot]
    place: OffloadedMaster | None = None
    options: dict[str, Any] = field(default_factory=dict)  # of its group, at this step
    step: torch.Tensor = field(default_factory=lambda: torch.zeros(()))  # its count before this step
    fresh: frozenset[str] = frozenset()  # states that begin with this step
    gradient: Slot | None = None  # of this step, where it is offloaded

    def shown(self, slot: Slot) -> torch.Tensor:
        """A state as the optimizer has it without offload: laid out as the master."""
        return laid_out_like(self.master, slot.tensor)


class OffloadedOptimizer:
    """Takes the place of an optimizer's ``step()``: the same update to the last bit, of states on another tier.

    The optimizer keeps its class, groups and options. ``optimizer.state`` shows tensors that are the offloaded states:
    reading or writing them between steps works, at the disk's speed.

    Args:
        masters: the trained ones, by name, in the order in which forward needs them.
        dtypes: of the states of each of them, by their keys, for optimizers without a tile update.
        slots: where they go.
        offloaded: the masters that are offloaded themselves, by name.
        agree: called at the end of each step that uses a disk, with what went wrong on this rank; raises if anything
            did on any rank.

    Attributes:
        factor: what the next step multiplies gradients by on the way; None for nothing.
        gradients: those that are offloaded; None if they stay on the device.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        masters: Mapping[str, nn.Parameter],
        dtypes: Mapping[str, Mapping[str, torch.dtype]],
        slots: Slots,
        *,
        offloaded: Mapping[str, OffloadedMaster],
        agree: Callable[[Exception | None], None],
    ) -> None:
        self.factor: torch.Tensor | float | None = None
        self._optimizer = optimizer
        self._slots = slots
        self._agree = agree
        self._update = tile_update(optimizer)
        self._scratch = torch.empty(0)
        self._groups = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        tensors = {n: m for n, m in masters.items() if m.dim() and m in self._groups}
        self._others = [m for m in masters.values() if m in self._groups and not m.dim()]  # numbers stay where they are
        kinds = {name: self._state_dtypes(name, master, dtypes) for name, master in tensors.items()}
        wanted = [(n, key, dtype) for n, keys in kinds.items() for key, dtype in keys.items()]
        specs = [SlotSpec("optimizer states", to_local(tensors[n]).numel(), dtype) for n, _, dtype in wanted]
        made = slots.add(slots.offload.optimizer or "cpu", specs)
        places: dict[str, dict[str, Slot]] = {name: {} for name in tensors}
        for (name, key, _), slot in zip(wanted, made, strict=True):
            places[name][key] = slot
        self._offloaded = {
            master: Offloaded(name, master, to_local(master.detach()).view(-1), places[name], offloaded.get(name))
            for name, master in tensors.items()
        }
        self._transfers = self._make_transfers()
        self.gradients: OffloadedGradients | None = None
        if slots.offload.gradients is not None:
            every = [SlotSpec("gradients", to_local(m).numel(), m.dtype) for m in tensors.values()]
            gradient_slots = slots.add(slots.offload.gradients, every)
            self.gradients = OffloadedGradients(
                dict(zip(tensors.values(), gradient_slots, strict=True)), slots, self._transfers
            )
        self._adopt()
        optimizer.register_load_state_dict_post_hook(lambda _: self._adopt())
        this = self

        def step(_: torch.optim.Optimizer, closure: Any = None) -> Any:
            return this.step(closure)

        # With the hooks that torch calls around every step.
        optimizer.step = MethodType(torch.optim.Optimizer.profile_hook_step(step), optimizer)  # type: ignore[method-assign]

    @property
    def written(self) -> set[torch.Tensor]:
        """The masters whose 16-bit copies the step writes itself."""
        return {m for m, o in self._offloaded.items() if o.place is not None and self._update is not None}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of all parameters that have a gradient.

        Raises:
            OSError: the disk failed; names the folder.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        factor, self.factor = self.factor, None
        failure = self._slots.take_failure()
        if self.gradients is not None:
            failure = self.gradients.begin_update() or failure
        changed = [o for o in self._offloaded.values() if o.master.grad is not None]
        try:
            if failure is not None:
                raise failure
            self._slots.settle()
            self._update_offloaded(changed, factor)
        except OSError as error:
            failure = error
        if self._slots.offload.uses_disk:
            self._agree(failure)
        self._scale(self._others, factor)
        self._step_of(self._others)
        return loss

    def _update_offloaded(self, changed: Sequence[Offloaded], factor: torch.Tensor | float | None) -> None:
        if self._update is None:
            self._scale((o.master for o in changed), factor)
            self._transfers.run(self._works_of_others(changed))
            return
        for o in changed:
            self._begin(o)
        self._transfers.run(self._works(changed, factor))
        if counts_steps(self._optimizer):
            for o in changed:
                o.step += 1

    # -- optimizers whose kernels are known: tiles --

    def _begin(self, o: Offloaded) -> None:
        """Notes the parameter's options, and gives it the states that the optimizer would."""
        o.options = self._optimizer.param_groups[self._groups[o.master]]
        needed = set(state_keys(self._optimizer, o.options))
        if needed != set(o.states):
            raise ValueError(
                f"the options of {type(self._optimizer).__name__} now ask for the states {sorted(needed)} of "
                f"{o.name!r}, and space was reserved for {sorted(o.states)}; give these options when the optimizer is "
                f"made"
            )
        o.weights = to_local(o.master.detach()).view(-1)
        o.gradient = None if self.gradients is None else self.gradients.slot(o.master)
        if counts_steps(self._optimizer):
            state = self._optimizer.state[o.master]
            if "step" not in state:
                state["step"] = initial_step(self._optimizer, o.options)
            o.step = state["step"]
        if o.states:
            state = self._optimizer.state[o.master]
            o.fresh = frozenset(key for key in o.states if key not in state)
            state.update({key: o.shown(slot) for key, slot in o.states.items() if key in o.fresh})

    def _works(self, changed: Iterable[Offloaded], factor: torch.Tensor | float | None) -> Iterator[Work]:
        """Tiles of all parameters in their order, as many at once as a buffer holds."""
        together: list[tuple[Offloaded, int, list[Move]]] = []
        held = 0
        for o in changed:
            for start, numel in _tiles(o.weights.numel(), self._elements_of(o)):
                moves = [
                    Move(slot, start, numel, slot.tensor.dtype, read=key not in o.fresh)
                    for key, slot in o.states.items()
                ]
                if o.place is not None:
                    moves.append(Move(o.place.slot, start, numel, o.weights.dtype))
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

    def _work(self, tiles: Sequence[tuple[Offloaded, int, list[Move]]], factor: torch.Tensor | float | None) -> Work:
        return Work([move for _, _, moves in tiles for move in moves], partial(self._compute, tiles, factor))

    def _compute(
        self,
        tiles: Sequence[tuple[Offloaded, int, list[Move]]],
        factor: torch.Tensor | float | None,
        tensors: list[torch.Tensor],
    ) -> None:
        position = 0
        for o, start, moves in tiles:
            moved = tensors[position : position + len(moves)]
            position += len(moves)
            numel = moves[0].numel if moves else min(self._elements_of(o), o.weights.numel() - start)
            tile = slice(start, start + numel)
            mine = {key: moved.pop(0) for key in o.states}
            weights, copy = o.weights[tile], None
            if o.place is not None:
                weights, copy = moved.pop(0), None if o.place.copy is None else o.place.copy[tile]
            assert o.master.grad is not None
            gradient = moved.pop(0) if o.gradient is not None else to_local(o.master.grad).reshape(-1)[tile]
            # Here, once: a tile takes so little time that the smallest operation shows.
            scale = factor.to(weights.dtype) if isinstance(factor, torch.Tensor) else factor
            for a, count in _tiles(numel, _CACHE_ELEMENTS * torch.get_num_threads()):
                within = slice(a, a + count)
                self._update_tile(
                    o,
                    weights[within],
                    gradient[within],
                    {key: tensor[within] for key, tensor in mine.items()},
                    scale,
                )
                if copy is not None:
                    copy[within].copy_(weights[within])

    def _update_tile(
        self,
        o: Offloaded,
        weights: torch.Tensor,
        gradient: torch.Tensor,
        states: dict[str, torch.Tensor],
        factor: torch.Tensor | float | None,
    ) -> None:
        assert self._update is not None
        if factor is not None or gradient.dtype != weights.dtype:
            if self._scratch.numel() < gradient.numel() or self._scratch.dtype != weights.dtype:
                self._scratch = torch.empty(gradient.numel(), dtype=weights.dtype)
            scaled = self._scratch[: gradient.numel()]
            if factor is not None and gradient.dtype == weights.dtype:
                torch.mul(gradient, factor, out=scaled)
            else:
                scaled.copy_(gradient)
                if factor is not None:
                    scaled.mul_(factor)
            gradient = scaled
        given: dict[str, torch.Tensor | None] = {
            key: None if key in o.fresh and begins_with_gradient(key) else value for key, value in states.items()
        }
        self._update(o.options, weights, gradient, given, o.step)
        for key, value in given.items():
            if value is not None and value is not states[key]:
                states[key].copy_(value)

    # -- other optimizers: a parameter at a time --

    def _works_of_others(self, changed: Iterable[Offloaded]) -> Iterator[Work]:
        for o in changed:
            known = self._optimizer.state.get(o.master, {})
            moves = [
                Move(slot, 0, slot.tensor.numel(), slot.tensor.dtype, read=key in known)
                for key, slot in o.states.items()
            ]
            yield Work(moves, partial(self._compute_other, o))

    def _compute_other(self, o: Offloaded, tensors: list[torch.Tensor]) -> None:
        state = self._optimizer.state[o.master]
        buffers = dict(zip(o.states, tensors, strict=True))
        for key in o.states:
            if key in state:
                state[key] = laid_out_like(o.master, buffers[key])
        self._step_of([o.master])
        for key, value in state.items():
            if key in o.states:
                local = to_local(value).reshape(-1)
                if local.data_ptr() != buffers[key].data_ptr():
                    buffers[key].copy_(local)
                state[key] = o.shown(o.states[key])
            elif isinstance(value, torch.Tensor) and value.shape == o.master.shape:
                raise RuntimeError(
                    f"{type(self._optimizer).__name__} keeps a state {key!r} of {o.name!r} that it did not keep for a "
                    f"small parameter, so no space was reserved for it; use offload=None with this optimizer"
                )

    def _step_of(self, masters: Sequence[nn.Parameter]) -> None:
        """The optimizer's own step, of some parameters alone."""
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
        if self._update is None:
            return dict(dtypes.get(name, {}))
        group = self._optimizer.param_groups[self._groups[master]]
        return dict.fromkeys(state_keys(self._optimizer, group), master.dtype)

    @torch.no_grad()
    def _adopt(self) -> None:
        """Moves states that the optimizer has in memory (made by its constructor, or loaded) to their slots."""
        for o in self._offloaded.values():
            state = self._optimizer.state.get(o.master, {})
            for key, slot in o.states.items():
                if isinstance(state.get(key), torch.Tensor):
                    slot.tensor.copy_(to_local(state[key]).reshape(-1))
                    state[key] = o.shown(slot)

    def _make_transfers(self) -> Transfers:
        budget = self._slots.offload.buffer_bytes - self._slots.offload.activation_buffer_bytes
        self._work_bytes = budget // _WORKS
        if self._update is None:
            largest = max((sum(s.nbytes for s in _specs(o)) for o in self._offloaded.values()), default=1)
            if largest > budget:
                raise ValueError(
                    f"offload moves all states of one parameter at a time with {type(self._optimizer).__name__}, whose "
                    f"largest are {largest:,} bytes, and offload.buffer_memory={self._slots.offload.buffer_memory!r}; "
                    f"set it to {largest} or more (Adam, AdamW, SGD and Adagrad need less)"
                )
            return Transfers(budget, largest)
        return Transfers(budget, self._work_bytes)

    def _elements_of(self, o: Offloaded) -> int:
        """How many elements of a parameter fit a buffer, with all that is moved of them."""
        each = sum(slot.tensor.dtype.itemsize for slot in o.states.values())
        if o.place is not None:
            each += o.weights.dtype.itemsize
        if self.gradients is not None:
            each += o.weights.dtype.itemsize
        most = self._work_bytes // max(each, 1)
        return max(TILE_ALIGNMENT, most // TILE_ALIGNMENT * TILE_ALIGNMENT)


def _tiles(numel: int, most: int) -> Iterator[tuple[int, int]]:
    for start in range(0, numel, most):
        yield start, min(most, numel - start)


def _specs(o: Offloaded) -> list[SlotSpec]:
    return [SlotSpec("", slot.tensor.numel(), slot.tensor.dtype) for slot in o.states.values()]


@contextmanager
def _only(optimizer: torch.optim.Optimizer, masters: set[nn.Parameter]) -> Iterator[None]:
    """Within this the optimizer has no other parameters."""
    before = [group["params"] for group in optimizer.param_groups]
    for group, members in zip(optimizer.param_groups, before, strict=True):
        group["params"] = [member for member in members if member in masters]
    try:
        yield
    finally:
        for group, members in zip(optimizer.param_groups, before, strict=True):
            group["params"] = members
