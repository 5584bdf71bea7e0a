"""Following, through the operations of a run, what each tensor is computed from."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from tensorshard.modules.tensors import storage_key
from tensorshard.pipeline.trace.call_graph import Leaf, Reads
from tensorshard.torch_private.dispatch import TorchDispatchMode
from tensorshard.torch_private.fake_tensors import FakeTensor, FakeTensorMode
from tensorshard.torch_private.operators import schema
from tensorshard.torch_private.pytree import tree_leaves

Source = tuple[str, Any]
"""Where a value comes from: ("leaf", (call, tensor)), ("parameter", name), ("draw", number) or ("call", call)."""

# What these return depends on the shape of what they are given alone.
_SHAPE_ONLY = frozenset({"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"}) | frozenset(
    {"new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"}
)
# Their schemas do not say that they change the running statistics.
_NORMS = frozenset({"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"})


class Provenance(TorchDispatchMode):
    """Carries labels from the tensors that operations read to those that they make.

    Operations on fake tensors are fake; those on real ones (the inputs, masks made of them) are real, so that code that
    looks at their values works.

    Args:
        fake: the mode of the fake tensors.
        parameters, buffers: names by storage.
        inputs: storages of the model's.
    """

    def __init__(
        self, fake: FakeTensorMode, parameters: dict[int, str], buffers: dict[int, str], inputs: set[int]
    ) -> None:
        super().__init__()
        self._fake = fake
        self._parameters = parameters
        self._buffers = buffers
        self._inputs = inputs
        self._outputs: dict[int, Leaf] = {}  # of units, by storage
        self._labels: dict[int, frozenset[Source]] = {}
        self._kept: list[torch.Tensor] = []  # so that storages are not used again
        self._draws = 0
        self.call: int | None = None  # the unit call that is running
        self.read: set[Source] = set()  # what it has read
        self.flops = 0  # since they were last taken, as are the bytes
        self.written_bytes = 0
        self.overwritten: set[Leaf] = set()  # outputs of units that functional code changed in place
        self.changed: set[Leaf] = set()  # and that later units did
        self.overwrites_inputs = False
        self.written_buffers: dict[str, bool] = {}  # outside of units; whether what was written came from units
        self.impure = False  # whether functional code drew random numbers, or changed a buffer, since last asked

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(isinstance(tensor, FakeTensor) for tensor in inputs):
            with self._fake:
                output = func(*args, **kwargs)
        else:
            output = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        self._count(func, args, kwargs, output, outputs)
        self._carry(func, inputs, outputs, _written(func, args, kwargs), _draws(func, args, kwargs))
        return output

    def of(self, tensors: Iterable[torch.Tensor]) -> frozenset[Source]:
        """What `tensors` are computed from."""
        found: frozenset[Source] = frozenset()
        for tensor in tensors:
            key = storage_key(tensor)
            found |= self._labels.get(key, frozenset())
            if key in self._parameters:
                found |= {("parameter", self._parameters[key])}
        return found

    def set(self, tensor: torch.Tensor, sources: frozenset[Source]) -> None:
        """Says what `tensor` is computed from."""
        self._kept.append(tensor)
        self._labels[storage_key(tensor)] = sources

    def set_output(self, tensor: torch.Tensor, leaf: Leaf) -> None:
        """Says that `tensor` is what a unit returned."""
        self._outputs[storage_key(tensor)] = leaf
        self.set(tensor, frozenset([("leaf", leaf)]))

    def _carry(
        self,
        func: Any,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        written: list[torch.Tensor],
        draws: bool,
    ) -> None:
        name = schema(func).name.partition("::")[2]
        sources = frozenset() if name in _SHAPE_ONLY else self.of(inputs)
        self.overwrites_inputs |= any(storage_key(tensor) in self._inputs for tensor in written)
        if self.call is not None:
            own: Source = ("call", self.call)
            self.read |= sources - {own}
            before = {storage_key(tensor) for tensor in inputs}
            for tensor in outputs:
                if storage_key(tensor) not in before:
                    self.set(tensor, frozenset([own]))
            for tensor in written:
                leaf = self._outputs.get(storage_key(tensor))
                if leaf is None:
                    self.set(tensor, self.of([tensor]) | {own})
                else:  # a unit's output stays that, and is sent as it is at the stage's end
                    self.changed.add(leaf)
            return
        if draws:
            sources |= {("draw", self._draws)}
            self._draws += 1
            self.impure = True
        for tensor in written:
            self.overwritten |= {leaf for kind, leaf in self.of([tensor]) if kind == "leaf"}
            buffer = self._buffers.get(storage_key(tensor))
            if buffer is not None:
                self.impure = True
                from_units = any(kind in ("leaf", "call") for kind, _ in sources)
                self.written_buffers[buffer] = self.written_buffers.get(buffer, False) or from_units
        if sources:
            for tensor in (*outputs, *written):
                self.set(tensor, sources | self._labels.get(storage_key(tensor), frozenset()))

    def _count(self, func: Any, args: Any, kwargs: Any, output: Any, outputs: list[torch.Tensor]) -> None:
        self.written_bytes += sum(tensor.numel() * tensor.element_size() for tensor in outputs)
        if func.overloadpacket.__name__.startswith("_scaled_dot_product"):
            self.flops += _attention_flops(*args[:3])
            return
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self.flops += int(count(*args, **kwargs, out_val=output))


def reads_of(sources: Iterable[Source]) -> Reads:
    """`sources`, by kind."""
    kinds: dict[str, set[Any]] = {"leaf": set(), "parameter": set(), "draw": set(), "call": set()}
    for kind, what in sources:
        kinds[kind].add(what)
    return Reads(*(frozenset(kinds[kind]) for kind in ("leaf", "parameter", "draw", "call")))


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that `func` changes in place."""
    if schema(func).name.partition("::")[2] in _NORMS:
        return [tensor for tensor in args[3:5] if isinstance(tensor, torch.Tensor) and args[5]]
    written = []
    for index, argument in enumerate(schema(func).arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        written += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return written


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether `func` makes random numbers."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for index, argument in enumerate(schema(func).arguments):
        if argument.name == "dropout_p":  # attention that may drop, but does not
            return bool(args[index] if index < len(args) else kwargs.get("dropout_p", 0.0))
    return True


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """Of both products; torch's table has not the CPU's kernel, nor fewer heads of keys than of queries everywhere."""
    rows = query.numel() // query.shape[-1]
    return 2 * rows * key.shape[-2] * (query.shape[-1] + value.shape[-1])
