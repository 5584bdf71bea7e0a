"""Runs a block's forward and backward alone, to learn what they do to memory and what they compute."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.distributed.tensor import DTensor

from tensorshard.comm.marks import get_layout
from tensorshard.model.parameters import like
from tensorshard.predict.block_record import (
    Backward,
    Birth,
    Given,
    Owner,
    Pattern,
    Place,
    Record,
    Step,
    on_storage,
)
from tensorshard.predict.block_structure import SIMPLE, noted_reads, values_of
from tensorshard.predict.module_attributes import note_attributes, restore_attributes
from tensorshard.predict.operation_ledger import Counts, OperationLedger
from tensorshard.predict.storage_ledger import Apart, StorageLedger
from tensorshard.torch_private.dispatch import without_dispatch_modes
from tensorshard.torch_private.fake_tensors import FakeTensor
from tensorshard.torch_private.modules import own_parameters, set_parameter
from tensorshard.torch_private.pytree import tree_flatten, tree_unflatten
from tensorshard.torch_private.tensors import tensor_version


class CannotComposeError(Exception):
    """A block's calls cannot be replayed and have to be run; the message says why."""


class Trial:
    """One run of a block that is not part of the model's own run.

    Nobody else holds its inputs and the gradients that its backward starts from. So the ledger shows when the block
    lets go of them. The block's parameters are replaced by others like them, whose gradients are dropped.

    Args:
        forward: of the block.
        leaves, spec: the call's arguments, with a :class:`Given` in place of each tensor.
        autocast: the type to compute in; None for that of the inputs.
    """

    def __init__(
        self,
        storages: StorageLedger,
        operations: OperationLedger,
        block: nn.Module,
        forward: Callable[..., Any],
        leaves: Sequence[Any],
        spec: Any,
        autocast: torch.dtype | None,
    ) -> None:
        self._storages, self._operations = storages, operations
        self._block, self._forward = block, forward
        self._leaves, self._spec = list(leaves), spec
        self._autocast = autocast
        self._tensors = [leaf for leaf in leaves if isinstance(leaf, Given)]
        self._owners: dict[int, tuple[Owner, int]] = {}  # of storages given to the call, by the ledger's numbers
        self._births: list[Birth] = []
        self._ignored: set[int] = set()  # storages that autograd makes when it accumulates a parameter's gradient
        self._apart = Apart(0)
        self._counts = Counts()
        self._pattern: Pattern = ()
        self._gradients: list[Place | None] = []
        self._length = 0

    def run(self, key: Any, phase: str, pattern: Pattern | None = None) -> Record:
        """Runs the block once, and returns the record.

        Args:
            key: of the record.
            phase: the phase of the call.
            pattern: the gradients that backward starts from; None for dense ones of all outputs.

        Raises:
            CannotComposeError: the block does something that a record cannot hold.
        """
        before = note_attributes(self._block)
        with (
            self._storages.apart() as self._apart,
            self._operations.apart(phase) as self._counts,
            noted_reads(self._block) as reads,
            torch.autocast("cpu", self._autocast, enabled=self._autocast is not None),
        ):
            try:
                record = self._run(key, pattern)
            finally:
                changed = restore_attributes(before)
            first = self._apart.first
            if self._storages.is_live(first):
                gc.collect()
            if self._storages.is_live(first):
                raise CannotComposeError("it leaves tensors behind")
        if changed:
            raise CannotComposeError(f"it changes its attribute {changed!r}")
        record.allocations = self._storages.allocations[first:]
        for backward in record.backwards.values():
            backward.allocations, backward.handed_on = record.allocations, record.handed_on
        record.reads = values_of(self._block, reads)
        _check(record)
        return record

    def _run(self, key: Any, pattern: Pattern | None) -> Record:
        with self._own_parameters() as leaves:
            output = self._called()
            flat, spec = tree_flatten(output)
            del output
            places = {id(leaf): self._output(leaf) for leaf in flat}
            outputs = [places[id(leaf)] for leaf in flat]
            roots = _unique([leaf for leaf in flat if isinstance(leaf, torch.Tensor) and leaf.requires_grad])
            usual = tuple((tuple(r.shape), _dense(r), r.dtype) for r in roots)
            _check_graph(roots, leaves)
            length = len(self._apart.events)
            sink = _Outputs.apply(self, *roots) if roots else None
            del flat, roots
            forward, counts = len(self._apart.events), self._counts.copy()
            record = Record(key, {}, [], [], length, outputs, spec, counts, {}, usual=usual)
            self._pattern = usual if pattern is None else pattern
            if sink is not None:
                with torch.autocast("cpu", enabled=False), torch.no_grad():
                    with without_dispatch_modes():
                        start = torch.zeros(0)
                    torch.autograd.backward(sink, start)
                del sink

        def before(at: int) -> int:
            """How many steps of backward come before an event."""
            return len(self._steps([place for place in kept if place < at]))

        # Storages that autograd made to accumulate parameters' gradients are not the block's own.
        kept = [
            at for at in range(forward, len(self._apart.events)) if self._apart.events[at].number not in self._ignored
        ]
        backward = Backward(
            self._steps(kept),
            before(self._length),
            [replace(birth, at=before(birth.at)) for birth in self._births],
            self._gradients,
            self._counts.minus(counts),
        )
        record.forward_steps = self._steps(range(forward))
        record.length = len(self._steps(range(length)))
        if record.usual:
            record.backwards[self._pattern] = backward
        record.handed_on = self._handed_on(record, backward)
        return record

    # -- forward --

    def _called(self) -> Any:
        watched = [meta for meta in self._tensors if meta.requires_grad]
        made = self._make_inputs()
        tensors = dict(zip([id(meta) for meta in self._tensors], made, strict=True))
        if watched and torch.is_grad_enabled():
            with without_dispatch_modes():
                token = torch.zeros(0, requires_grad=True)
            traced = _Inputs.apply(self, token, *[tensors[id(meta)] for meta in watched])
            tensors |= {id(meta): tensor for meta, tensor in zip(watched, traced, strict=True)}
            del traced
        args, kwargs = tree_unflatten(
            [tensors[id(leaf)] if isinstance(leaf, Given) else leaf for leaf in self._leaves], self._spec
        )
        versions = [(tensor, tensor_version(tensor)) for tensor in tensors.values()]
        del made
        output = self._forward(*args, **kwargs)
        if any(tensor_version(tensor) != version for tensor, version in versions):
            raise CannotComposeError("it changes its inputs in place")
        return output

    def _make_inputs(self) -> list[torch.Tensor]:
        bases: dict[int, torch.Tensor] = {}
        made = []
        for meta in self._tensors:
            if meta.storage in bases:
                tensor = bases[meta.storage].as_strided(meta.size, meta.stride, meta.offset)
            else:
                tensor = on_storage(meta.size, meta.stride, meta.offset, meta.dtype, meta.nbytes)
                bases[meta.storage] = tensor
            self._note_owner(tensor, Owner.INPUT, meta.storage)
            made.append(tensor)
        return made

    @contextmanager
    def _own_parameters(self) -> Iterator[list[nn.Parameter]]:
        """Inside, the block has other parameters like its own. Yields them, in order."""
        places: list[tuple[nn.Module, str, nn.Parameter]] = []
        leaves: dict[int, nn.Parameter] = {}
        for parameter in (held := block_parameters(self._block)):
            if isinstance(parameter, DTensor):
                raise CannotComposeError("its parameters are sharded")
            leaf = leaves[id(parameter)] = like(parameter, parameter.detach())
            if leaf.requires_grad:
                number = len(leaves) - 1
                leaf.register_hook(partial(self._born, number))
                leaf.register_post_accumulate_grad_hook(self._kept)
        try:
            for module in self._block.modules():
                for name, parameter in own_parameters(module).items():
                    places.append((module, name, parameter))
                    set_parameter(module, name, leaves[id(parameter)])
            yield list(leaves.values())
        finally:
            for module, name, parameter in places:
                set_parameter(module, name, parameter)
            del held

    def _output(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            if not isinstance(leaf, SIMPLE):
                raise CannotComposeError(f"it returns a {type(leaf).__name__}")
            return leaf
        if not is_plain(leaf):
            raise CannotComposeError(f"it returns a {type(leaf).__name__} with more than values")
        return self._place(leaf)

    # -- backward --

    def make_gradients(self) -> tuple[torch.Tensor | None, ...]:
        """New gradients that backward starts from. Nobody else holds them."""
        made: list[torch.Tensor | None] = []
        for number, pattern in enumerate(self._pattern):
            if pattern is None:
                made.append(None)
                continue
            size, stride, dtype = pattern
            made.append(torch.empty_strided(size, stride, dtype=dtype))
            self._note_owner(made[-1], Owner.GRADIENT, number)
        return tuple(made)

    def take_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Notes the inputs' gradients, which backward has computed."""
        self._length = len(self._apart.events)
        self._gradients = [None if gradient is None else self._place(gradient) for gradient in gradients]

    def _born(self, number: int, gradient: torch.Tensor) -> None:
        self._births.append(Birth(number, len(self._apart.events), self._place(gradient)))
        self._before = self._counts.copy()

    def _kept(self, leaf: torch.Tensor) -> None:
        """Called when autograd has accumulated a gradient. What it allocated and computed for that is not counted here,
        since autograd does it in every replayed call, too."""
        at = self._births[-1].at
        events = self._apart.events
        self._ignored |= {event.number for event in events[at:] if event.nbytes > 0}
        self._counts.kernels, self._counts.transfers = self._before.kernels, self._before.transfers
        leaf.grad = None

    # -- what is found --

    def _note_owner(self, tensor: Any, owner: Owner, number: int) -> None:
        storage = self._storages.number_of(tensor)
        assert storage is not None
        self._owners[storage] = (owner, number)

    def _place(self, tensor: torch.Tensor) -> Place:
        number = self._storages.number_of(tensor)
        if number is None or number < self._apart.first:
            raise CannotComposeError("it hands on a tensor that it keeps")
        owner, index = self._owners.get(number, (Owner.CALL, number - self._apart.first))
        offset = int(tensor.storage_offset())
        return Place(owner, index, tuple(tensor.shape), tensor.stride(), offset, tensor.dtype, tensor.requires_grad)

    def _steps(self, places: Sequence[int]) -> list[Step]:
        steps = []
        for at in places:
            event = self._apart.events[at]
            owner, number = self._owners.get(event.number, (Owner.CALL, event.number - self._apart.first))
            if owner is Owner.CALL:
                steps.append(Step(owner, number, event.nbytes, event.phase))
            elif event.nbytes < 0:
                steps.append(Step(owner, number, 0, event.phase))
        return steps

    def _handed_on(self, record: Record, backward: Backward) -> dict[int, tuple[Place, int]]:
        places = [place for place in record.outputs if isinstance(place, Place)]
        places += [birth.gradient for birth in backward.births] + [p for p in backward.gradients if p is not None]
        sizes: dict[int, int] = {}
        for step in (*record.forward_steps, *backward.steps):
            if step.owner is Owner.CALL and step.nbytes > 0:
                if step.number in sizes:
                    sizes[step.number] = -1  # grows later
                else:
                    sizes[step.number] = step.nbytes
        found: dict[int, tuple[Place, int]] = {}
        for place in places:
            if place.owner is Owner.CALL:
                nbytes = sizes.get(place.number, 0)
                if nbytes < 0:
                    raise CannotComposeError("it hands on a tensor whose storage it resizes")
                found.setdefault(place.number, (place, nbytes))
        return found


class _Inputs(Function):
    """Forward passes the call's inputs on; backward takes their gradients, the last that are computed."""

    @staticmethod
    def forward(ctx: Any, trial: Trial, token: torch.Tensor, *tensors: torch.Tensor) -> Any:
        ctx.trial = trial
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.trial.take_gradients(gradients)
        return None, None, *[None] * len(gradients)


class _Outputs(Function):
    """Stands for what comes after the call: backward makes the gradients that the call's backward starts from."""

    @staticmethod
    def forward(ctx: Any, trial: Trial, *tensors: torch.Tensor) -> Any:
        ctx.trial = trial
        with without_dispatch_modes():
            return torch.zeros(0)

    @staticmethod
    def backward(ctx: Any, _: Any) -> Any:
        return None, *ctx.trial.make_gradients()


def block_parameters(block: nn.Module) -> list[nn.Parameter]:
    """The parameters of `block`, each once."""
    return _unique([parameter for module in block.modules() for parameter in own_parameters(module).values()])


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a plain fake tensor: strided, and without a layout or a subclass of its own."""
    return type(tensor) is FakeTensor and tensor.layout is torch.strided and get_layout(tensor) is None


def _unique(items: list[Any]) -> list[Any]:
    return list({id(item): item for item in items}.values())


def _dense(tensor: torch.Tensor) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(tensor.shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def _check_graph(roots: list[torch.Tensor], leaves: list[nn.Parameter]) -> None:
    """Refuses a graph that leads to tensors which the block was not given."""
    known = {id(leaf) for leaf in leaves}
    waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in known and variable.numel():
            raise CannotComposeError("it computes with a tensor that is neither its argument nor its parameter")
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def _check(record: Record) -> None:
    for place in record.outputs:
        if isinstance(place, Place) and place.owner is Owner.GRADIENT:
            raise CannotComposeError("it returns a gradient")
