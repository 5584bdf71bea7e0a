"""Provenance: which values each tensor of a run is computed from, followed through the run's operations.

Also here: statistics and softmaxes that code takes, and the dimensions that it takes them over.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tensorshard.model.tensors import storage_key, tensor_leaves
from tensorshard.torch_private.dispatch import TorchDispatchMode
from tensorshard.torch_private.fake_tensors import FakeTensor, FakeTensorMode
from tensorshard.torch_private.operators import schema

Source = TypeVar("Source")

# Their results depend only on the shapes, types and devices of their inputs.
_SHAPE_ONLY = frozenset(
    {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"}
) | frozenset({"new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"})
# Their schemas do not say that they change the running statistics in training.
_NORMS_WITH_STATISTICS = frozenset({"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"})


@dataclass(frozen=True)
class Operation:
    """One operation of a run, once it is done.

    Args:
        func: the operator, as ``__torch_dispatch__`` is given it.
        args, kwargs: what it was called with.
        output: what it returned.
        inputs, outputs: the tensors among these.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]

    @property
    def name(self) -> str:
        """Its name without its namespace and its overload, as in ``add_``."""
        return schema(self.func).name.partition("::")[2]

    @property
    def reads_values(self) -> bool:
        """Whether its result depends on more than the shapes of its inputs."""
        return self.name not in _SHAPE_ONLY

    @cached_property
    def written(self) -> list[torch.Tensor]:
        """The arguments that it changes in place: by its schema, or running statistics that the schema leaves out."""
        if self.name in _NORMS_WITH_STATISTICS:
            training = self.args[5]
            return [tensor for tensor in self.args[3:5] if isinstance(tensor, torch.Tensor) and training]
        return [
            tensor
            for index, argument in enumerate(schema(self.func).arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tensor_leaves(self._argument(index, argument.name))
        ]

    @property
    def is_random(self) -> bool:
        """Whether it made random numbers."""
        if torch.Tag.nondeterministic_seeded not in self.func.tags:
            return False
        for index, argument in enumerate(schema(self.func).arguments):
            if argument.name == "dropout_p":  # an attention, which draws only if this is above 0
                return bool(self._argument(index, argument.name, 0.0))
        return True

    def _argument(self, index: int, name: str, default: Any = None) -> Any:
        return self.args[index] if index < len(self.args) else self.kwargs.get(name, default)


class Provenance(TorchDispatchMode, Generic[Source]):
    """Carries sources from the tensors that operations read to those that they make or change.

    Sources belong to storages: a view has those of its base, and a write through one view shows in all. An operation's
    results come from everything that its inputs come from, unless it only looks at their shapes. If it changes a tensor
    in place, the result also comes from what the tensor held before. Tensors are kept alive while the run is followed,
    so that no storage is used again.

    Operations on fake tensors are fake. Operations on real ones (the inputs, masks made of them) are real, unless the
    mode of the fake tensors is active around this one. So code that looks at their values works.

    Subclasses define the sources: they give tensors their first ones by :meth:`set`, and override :meth:`follow` where
    another rule holds, inside of some modules, say.

    Args:
        fake: the mode of the fake tensors.

    Attributes:
        rng_ops: how many operations have made random numbers so far.
    """

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self._fake = fake
        self._sources: dict[int, frozenset[Source]] = {}  # by storage
        self._kept: list[torch.Tensor] = []
        self.rng_ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # it only asks for a tensor's device
            return run_operation(func, args, kwargs)
        inputs = tensor_leaves((args, kwargs))
        if any(isinstance(tensor, FakeTensor) for tensor in inputs):
            with self._fake:
                output = run_operation(func, args, kwargs)
        else:
            output = run_operation(func, args, kwargs)
        operation = Operation(func, args, kwargs, output, inputs, tensor_leaves(output))
        self.rng_ops += operation.is_random
        self.follow(operation)
        return output

    def follow(self, operation: Operation) -> None:
        """Sets the sources of the results of `operation`."""
        self.add((*operation.outputs, *operation.written), self.read_by(operation))

    def read_by(self, operation: Operation) -> frozenset[Source]:
        """The sources of the results of `operation`, without those of what they held before."""
        return self.of(operation.inputs) if operation.reads_values else frozenset()

    def of(self, tensors: Iterable[torch.Tensor]) -> frozenset[Source]:
        """The sources of `tensors`."""
        return frozenset().union(*(self._sources.get(storage_key(tensor), frozenset()) for tensor in tensors))

    def set(self, tensor: torch.Tensor, sources: Iterable[Source]) -> None:
        """Sets the sources of `tensor`, and forgets earlier ones."""
        self._kept.append(tensor)
        self._sources[storage_key(tensor)] = frozenset(sources)

    def add(self, tensors: Iterable[torch.Tensor], sources: frozenset[Source]) -> None:
        """Adds `sources` to those of `tensors`."""
        if sources:
            for tensor in tensors:
                self.set(tensor, self.of([tensor]) | sources)


def run_operation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls `func`. A separate function, so that its frame in a traceback shows that the error is the run's."""
    return func(*args, **kwargs)


class OperationCounter(TorchFunctionMode):
    """Counts the calls of torch's functions within it.

    Attributes:
        operations: how many there were so far. One that failed counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))


def _functions(place: int, *names: str) -> dict[Callable[..., Any], int]:
    """torch's functions and methods of these names, each with the place of the dimensions among its arguments."""
    functions = (getattr(owner, name, None) for name in names for owner in (torch, torch.Tensor, torch.linalg))
    return {function: place for function in functions if function is not None}


STATISTICS = {
    **_functions(1, "max", "min", "amax", "amin", "aminmax", "mean", "std", "var"),
    **_functions(2, "norm", "vector_norm"),
}
"""What makes a few values of many, each of which depends on all of them."""

SOFTMAXES = _functions(1, "softmax", "log_softmax") | dict.fromkeys((F.softmax, F.log_softmax), 1)
"""What weighs elements along a dimension by comparing them."""


class NotedStatistics(TorchFunctionMode):
    """Calls :meth:`note` for each of some functions that the code inside of this context calls.

    Args:
        functions: such as :data:`STATISTICS`, each with the place of its dimensions among the arguments.
    """

    def __init__(self, functions: Mapping[Callable[..., Any], int] = STATISTICS) -> None:
        super().__init__()
        self._functions = functions

    def note(self, function: Callable[..., Any], tensor: torch.Tensor, dims: tuple[int, ...] | None) -> None:
        """Called before `function` reduces `tensor` over `dims`, each from 0 on; None: over all dimensions."""
        raise NotImplementedError

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        place = self._functions.get(func)
        if place is not None and args and isinstance(args[0], torch.Tensor):
            dims = _dims(args[0], place, args, kwargs)
            if dims is None or dims:
                self.note(func, args[0], dims)
        return run_operation(func, args, kwargs)


def _dims(tensor: torch.Tensor, place: int, args: Any, kwargs: Any) -> tuple[int, ...] | None:
    """The dimensions that a call names; none where it names something else, such as a tensor to compare with."""
    given = args[place] if len(args) > place else kwargs.get("dim", kwargs.get("axis"))
    if given is None or isinstance(given, bool):
        return None
    named = given if isinstance(given, tuple | list) else [given]
    if not all(isinstance(dim, int) for dim in named):
        return ()
    return tuple(dim % max(tensor.dim(), 1) for dim in named) or None
