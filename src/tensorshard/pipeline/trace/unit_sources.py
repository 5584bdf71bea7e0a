"""Which unit outputs, parameters and random operations each tensor of a model's run comes from.

Also here: models whose own code computes derivatives through their units, which stages cannot: each has a part of the
graph.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from tensorshard.common.sampled_loops import SampledLoop
from tensorshard.model.call_stack import users_line
from tensorshard.model.provenance import Operation, Provenance
from tensorshard.model.tensors import storage_key, tensor_leaves
from tensorshard.pipeline.trace.call_graph import Leaf, Reads
from tensorshard.random.kernels import pass_over_draw
from tensorshard.torch_private.autograd import is_function_transformed
from tensorshard.torch_private.fake_tensors import FakeTensor, FakeTensorMode
from tensorshard.torch_private.operators import flop_formula
from tensorshard.torch_private.process_groups import group_of_argument

_COLLECTIVES = ("c10d", "_c10d_functional")  # the namespaces of torch.distributed's operators

Source = tuple[str, Any]
"""Where a value comes from: ("output", leaf) of a unit, ("parameter", name), ("buffer", name), ("rng_op", number) of
functional code, or ("side_output", call) for a tensor that a unit call computed but did not return."""
_DERIVATIVES = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)

_REMEDY = (
    "the graph lies on several stages, of which none has all of it: set pp=1, or move this code into a module that "
    "holds all that it differentiates, and name that as one unit (pp_units)"
)


class UnitSources(Provenance[Source]):
    """Follows a model's run from unit call to unit call; what happens inside of one is a single step.

    Args:
        fake: the mode of the fake tensors.
        model: on these.
        inputs: the model's.
    """

    def __init__(self, fake: FakeTensorMode, model: nn.Module, inputs: Any) -> None:
        super().__init__(fake)
        for name, parameter in model.named_parameters():
            self.set(parameter, [("parameter", name)])
        for name, buffer in model.named_buffers():
            self.set(buffer, [("buffer", name)])
        self._parameters = {storage_key(parameter): name for name, parameter in model.named_parameters()}
        self._trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.written_parameters: set[str] = set()  # outside of units
        self._buffers = {storage_key(buffer): name for name, buffer in model.named_buffers()}
        self._inputs = {storage_key(tensor) for tensor in tensor_leaves(inputs)}
        self._outputs: dict[int, Leaf] = {}  # the outputs of units, by storage
        self.call: int | None = None  # the unit call that is running
        self.read: set[Source] = set()  # what it has read
        self.loop = SampledLoop()
        self.flops = 0  # since the last count was taken; so are the bytes
        self.written_bytes = 0
        self.overwritten: set[Leaf] = set()  # outputs of units that functional code changed in place
        self.changed: set[Leaf] = set()  # outputs of units that later units changed in place
        self.overwrites_inputs = False
        self.written_buffers: dict[str, bool] = {}  # written outside of units; whether the value came from units
        self.trained_writes: dict[int, str] = {}  # unit calls that write parameters they train: which, and where
        self.buffer_writers: dict[str, set[int]] = {}  # the unit calls that wrote a buffer
        self.draws = False  # whether functional code made random numbers that have values
        self.impure = False  # whether functional code made random numbers, or changed a buffer, since last asked

    def begin_call(self, call: int, passed: Iterable[torch.Tensor]) -> None:
        """Called when the unit call `call` begins. It gets `passed`, and may read it in ways that are not seen here."""
        self.call = call
        self.read = {source for source in self.of(passed) if source[0] != "side_output"}

    def set_output(self, tensor: torch.Tensor, leaf: Leaf) -> None:
        """Notes that `tensor` is the output `leaf` of a unit."""
        self._outputs[storage_key(tensor)] = leaf
        self.set(tensor, [("output", leaf)])

    def follow(self, operation: Operation) -> None:
        if operation.func.namespace in _COLLECTIVES and dist.group.WORLD in map(group_of_argument, operation.args):
            raise UncuttableError(
                f"the model calls torch.distributed itself ({operation.func.overloadpacket.__name__}, {users_line()}), "
                f"for all ranks, of which one stage alone would make the call; use a plan without pp"
            )
        self._count(operation)
        self.overwrites_inputs |= any(storage_key(tensor) in self._inputs for tensor in operation.written)
        if self.call is None:
            self._follow_functional_code(operation)
        else:
            self._follow_unit(operation, ("side_output", self.call))

    def _follow_unit(self, operation: Operation, own: Source) -> None:
        self.read |= self.read_by(operation) - {own}
        before = {storage_key(tensor) for tensor in operation.inputs}
        for tensor in operation.outputs:
            if storage_key(tensor) not in before:
                self.set(tensor, [own])
        for tensor in operation.written:
            leaf = self._outputs.get(storage_key(tensor))
            assert self.call is not None
            buffer = self._buffers.get(storage_key(tensor))
            if buffer is not None:
                self.buffer_writers.setdefault(buffer, set()).add(self.call)
            parameter = self._parameters.get(storage_key(tensor))
            if parameter in self._trained:
                self.trained_writes.setdefault(self.call, f"{parameter} ({users_line()})")
            if leaf is None:
                self.add([tensor], frozenset([own]))
            else:  # a unit's output stays one, and is sent with its content at the stage's end
                self.changed.add(leaf)

    def _follow_functional_code(self, operation: Operation) -> None:
        sources = self.read_by(operation)
        if operation.is_random:
            sources |= {("rng_op", self.rng_ops)}
            self.impure = True
            if any(isinstance(tensor, FakeTensor) for tensor in operation.outputs):
                pass_over_draw()
            else:
                self.draws = True
        for tensor in operation.written:
            self.overwritten |= {leaf for kind, leaf in self.of([tensor]) if kind == "output"}
            if storage_key(tensor) in self._parameters:
                self.written_parameters.add(self._parameters[storage_key(tensor)])
            buffer = self._buffers.get(storage_key(tensor))
            if buffer is not None:
                self.impure = True
                from_units = any(kind in ("output", "side_output") for kind, _ in sources)
                self.written_buffers[buffer] = self.written_buffers.get(buffer, False) or from_units
        self.add((*operation.outputs, *operation.written), sources)

    def _count(self, operation: Operation) -> None:
        times = self.loop.times
        self.written_bytes += times * sum(tensor.numel() * tensor.element_size() for tensor in operation.outputs)
        packet = operation.func.overloadpacket
        if packet.__name__.startswith("_scaled_dot_product"):
            self.flops += times * _attention_flops(*operation.args[:3])
            return
        count = flop_formula(packet)
        if count is not None:
            self.flops += times * int(count(*operation.args, **operation.kwargs, out_val=operation.output))


def reads_of(sources: Iterable[Source]) -> Reads:
    """`sources`, by kind."""
    kinds: dict[str, set[Any]] = {kind: set() for kind in ("output", "parameter", "buffer", "rng_op", "side_output")}
    for kind, what in sources:
        kinds[kind].add(what)
    return Reads(
        leaves=frozenset(kinds["output"]),
        parameters=frozenset(kinds["parameter"]),
        buffers=frozenset(kinds["buffer"]),
        rng_ops=frozenset(kinds["rng_op"]),
        side_outputs=frozenset(kinds["side_output"]),
    )


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """Operations of both products. torch's own table lacks the CPU's kernel, and often grouped heads of keys."""
    rows = query.numel() // query.shape[-1]
    return 2 * rows * key.shape[-2] * (query.shape[-1] + value.shape[-1])


class UncuttableError(ValueError):
    """A model cannot be cut into stages for any inputs. The message says why.

    Args:
        cause: what the model does.
        rest: what stands in the way then, and what would work.
        whole: the module that has to be one unit, if that would do; "" if it is the model, or none would.
    """

    def __init__(self, cause: str, rest: str = "", whole: str = "") -> None:
        super().__init__(cause + rest)
        self.cause, self.whole = cause, whole


class WithoutDerivatives(TorchFunctionMode):
    """Refuses derivatives that the model's forward computes outside of units.

    Args:
        module: the name of the module whose code runs; None inside of a unit, which has the whole graph.
    """

    def __init__(self, module: Callable[[], str | None]) -> None:
        super().__init__()
        self._module = module

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _DERIVATIVES:
            return func(*args, **(kwargs or {}))
        where = self._module()
        if where is None:
            return _within_a_unit(func, args, kwargs or {})
        raise UncuttableError(
            f"{f'module {where!r}' if where else 'the forward of the model'} computes a derivative "
            f"(torch.autograd.{func.__name__}), as for forces or a gradient penalty, through modules that a pipeline "
            f"may cut; {_REMEDY}"
        )


def _within_a_unit(func: Any, args: Any, kwargs: Any) -> Any:
    """The derivative, if all that it goes through is in the unit."""
    sentence = (
        f"a unit computes a derivative (torch.autograd.{func.__name__}) by a tensor from outside of it, which other "
        f"modules may have changed on the way; {_REMEDY}"
    )
    try:
        gradients = func(*args, **kwargs)
    except RuntimeError as error:
        if "not have been used in the graph" not in str(error):
            raise
        raise UncuttableError(sentence) from error
    if gradients is not None and any(each is None for each in gradients):
        raise UncuttableError(sentence)
    return gradients


def check_differentiable(unit: str, around: str) -> None:
    """Refuses a call of `unit` from code that computes its gradients itself.

    Args:
        around: the module whose code runs.

    Raises:
        UncuttableError: the caller runs inside of the forward of an autograd function, or of a torch.func transform.
    """
    if is_function_transformed():
        raise UncuttableError(
            f"the model calls {unit!r} inside of a function that torch.func transforms (grad, vjp, vmap)",
            f"; {_REMEDY}",
            around,
        )
    if torch.is_grad_enabled():  # the forward of an autograd function runs without gradients
        return
    forwards = dict(_forwards_of(torch.autograd.Function))
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code in forwards:
            raise UncuttableError(
                f"the model calls {unit!r} inside of {forwards[frame.f_code]}.forward, an autograd function that "
                f"computes the gradients of its modules itself (as reversible networks do)",
                f", so {_REMEDY}",
                around,
            )
        frame = frame.f_back  # type: ignore[assignment]


def _forwards_of(function: type) -> Iterator[tuple[CodeType, str]]:
    """The code of the forward of every class derived from `function`, with the class's name."""
    derived: list[Any] = function.__subclasses__()
    for cls in derived:
        code = getattr(inspect.unwrap(cls.forward), "__code__", None)
        if code is not None and "forward" in vars(cls):
            yield code, cls.__name__
        yield from _forwards_of(cls)


class DetachedAlias(torch.autograd.Function):
    """The identity. Its result, unlike a view, may be detached and be changed in place, whatever it was made from."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient
