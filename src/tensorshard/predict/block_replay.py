"""Replays a block's call from a record: no operation runs, and the ledgers note what they would have noted."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Function

from tensorshard.predict.block_record import Backward, Birth, Given, Owner, Pattern, Place, Record, Step, on_storage
from tensorshard.predict.operation_ledger import OperationLedger
from tensorshard.predict.storage_ledger import StorageLedger
from tensorshard.torch_private.dispatch import without_dispatch_modes
from tensorshard.torch_private.pytree import tree_unflatten


class Replay:
    """One call of a block.

    It makes only the tensors that the call returns, as outputs or gradients. Backward is a chain of autograd nodes. The
    first takes the outputs' gradients. Then one node for each parameter returns its gradient in turn, so that the
    parameter's hooks run at the right moment. The last returns the inputs' gradients.

    Args:
        tensors: those that the call was given; `metas` describes them.
        other_backward: says what a backward does that starts from other gradients than the usual ones.
    """

    def __init__(
        self,
        record: Record,
        storages: StorageLedger,
        operations: OperationLedger,
        tensors: Sequence[torch.Tensor],
        metas: Sequence[Given],
        other_backward: Callable[[Pattern], Backward | None],
    ) -> None:
        self._record = record
        self._storages, self._operations = storages, operations
        self._numbers: dict[int, int] = {}  # the ledger's numbers of storages without tensors
        self._sizes: dict[int, int] = {}
        self._held: dict[tuple[Owner, int], Any] = {}
        for tensor, meta in zip(tensors, metas, strict=True):
            self._held.setdefault((Owner.INPUT, meta.storage), []).append(tensor)
        self._other_backward = other_backward
        self._backward = record.backwards.get(record.usual)
        self._at = 0
        self._allocations, self._handed_on = record.allocations, record.handed_on
        self._order: list[int] = []  # parameters' numbers, in the order in which the chain asks for their gradients
        self._births: dict[int, Birth] = {}  # by their parameters' numbers

    def run(self, inputs: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> Any:
        """What the block returns.

        Args:
            inputs: the tensors among the call's arguments that require gradients.
            parameters: the block's.
        """
        record = self._record
        self._play(record.forward_steps[: record.length])
        self._operations.add(record.counts)
        places = list({id(place): place for place in record.outputs if isinstance(place, Place)}.values())
        if self._backward is None:
            made = [self._tensor(place, record.forward_steps[record.length :]) for place in places]
        else:
            token = _End.apply(self, _token(), *inputs)
            for number in reversed(range(len(self._backward.births))):
                token = _Birth.apply(self, number, token, parameters[self._backward.births[number].parameter])
            made = list(_Begin.apply(self, token, places))
        self._play(record.forward_steps[record.length :])
        tensors = {id(place): tensor for place, tensor in zip(places, made, strict=True)}
        return tree_unflatten([tensors.get(id(output), output) for output in record.outputs], record.spec)

    def outputs(self, places: list[Place]) -> list[torch.Tensor]:
        """The tensors at `places`."""
        return [self._tensor(place, self._record.forward_steps[self._record.length :]) for place in places]

    def begin_backward(self, gradients: list[torch.Tensor | None]) -> None:
        """Takes the gradients of the outputs that require any."""
        pattern: Pattern = tuple(None if g is None else (tuple(g.shape), g.stride(), g.dtype) for g in gradients)
        usual = self._backward
        assert usual is not None
        if pattern not in self._record.backwards:
            self._record.backwards[pattern] = self._other_backward(pattern) or usual
        found = self._record.backwards[pattern]
        self._order = [birth.parameter for birth in usual.births]
        self._births = {birth.parameter: birth for birth in found.births}
        self._backward = found
        self._allocations, self._handed_on = found.allocations, found.handed_on
        for number, gradient in enumerate(gradients):
            self._held[Owner.GRADIENT, number] = [gradient]
        self._operations.add(found.counts)

    def born(self, number: int) -> torch.Tensor | None:
        """Plays backward up to the gradient of the chain's parameter `number`, and returns it; None if it gets none."""
        assert self._backward is not None
        birth = self._births.get(self._order[number])
        if birth is None:
            return None
        self._play_backward(birth.at)
        following = self._backward.steps[birth.at : birth.at + 1]
        later = (self._births.get(parameter) for parameter in self._order[number + 1 :])
        if any(other is not None and self._shares_storage(other, birth) for other in later):
            following = []  # a later gradient still needs the storage
        return self._tensor(birth.gradient, following)

    def _shares_storage(self, one: Birth, other: Birth) -> bool:
        return one.gradient[:2] == other.gradient[:2]

    def end_backward(self) -> list[torch.Tensor | None]:
        """The inputs' gradients."""
        assert self._backward is not None
        self._play_backward(self._backward.length)
        rest = self._backward.steps[self._at :]
        made = [None if place is None else self._tensor(place, rest) for place in self._backward.gradients]
        self._play_backward(len(self._backward.steps))
        return made

    def _play_backward(self, end: int) -> None:
        assert self._backward is not None
        if end > self._at:
            self._play(self._backward.steps[self._at : end])
            self._at = end

    def _play(self, steps: Sequence[Step]) -> None:
        for owner, number, nbytes, phase in steps:
            if owner is not Owner.CALL:
                self._held.pop((owner, number), None)
            elif number in self._handed_on:
                if nbytes > 0:
                    place, size = self._handed_on[number]
                    with self._storages.making_like(self._allocations[number]), torch.no_grad():
                        self._held[owner, number] = on_storage(
                            place.size, place.stride, place.offset, place.dtype, size
                        )
                else:
                    self._held.pop((owner, number), None)
            elif number in self._numbers:
                self._storages.changed(self._numbers[number], nbytes, phase)
                self._sizes[number] += nbytes
                if not self._sizes[number]:
                    del self._sizes[number]
            else:
                self._numbers[number] = self._storages.made_like(self._allocations[number], nbytes, phase)
                self._sizes[number] = nbytes

    def _tensor(self, place: Place, following: Sequence[Step]) -> torch.Tensor:
        """The tensor at a place. If one of the `following` steps frees its storage, the replay itself lets go of it."""
        key = (place.owner, place.number)
        held = self._held[key]
        base = held[0] if isinstance(held, list) else held
        alike = tuple(base.shape) == place.size and base.stride() == place.stride and base.dtype == place.dtype
        if alike and place.owner is Owner.CALL and any(step[:2] == key for step in following):
            del self._held[key]
            return base
        with torch.no_grad():
            alias = base.data  # no view: torch warns of views that a sharded block returns
            return alias if alike else alias.as_strided(place.size, place.stride, place.offset)

    def __del__(self) -> None:
        for number, size in self._sizes.items():  # its backward was never run
            self._storages.changed(self._numbers[number], -size, self._storages.phase())


class _Begin(Function):
    """Forward returns the outputs; backward takes their gradients and begins."""

    @staticmethod
    def forward(ctx: Any, replay: Replay, token: torch.Tensor, places: list[Place]) -> Any:
        ctx.set_materialize_grads(False)
        made = replay.outputs(places)
        ctx.replay, ctx.differentiable = replay, [place.requires_grad for place in places]
        ctx.mark_non_differentiable(*[t for t, place in zip(made, places, strict=True) if not place.requires_grad])
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.replay.begin_backward([g for g, given in zip(gradients, ctx.differentiable, strict=True) if given])
        return None, _token(), None


class _Birth(Function):
    """Backward returns one parameter's gradient."""

    @staticmethod
    def forward(ctx: Any, replay: Replay, number: int, token: torch.Tensor, parameter: torch.Tensor) -> Any:
        ctx.replay, ctx.number = replay, number
        return _token()

    @staticmethod
    def backward(ctx: Any, _: Any) -> Any:
        return None, None, _token(), ctx.replay.born(ctx.number)


class _End(Function):
    """Backward returns the inputs' gradients and ends."""

    @staticmethod
    def forward(ctx: Any, replay: Replay, token: torch.Tensor, *inputs: torch.Tensor) -> Any:
        ctx.replay, ctx.inputs = replay, len(inputs)
        return _token()

    @staticmethod
    def backward(ctx: Any, _: Any) -> Any:
        gradients = ctx.replay.end_backward()
        return None, None, *(gradients or [None] * ctx.inputs)


def _token() -> torch.Tensor:
    """A tensor that links the nodes of a chain. It has no elements, and the ledgers do not see it."""
    with without_dispatch_modes():
        return torch.zeros(0)
