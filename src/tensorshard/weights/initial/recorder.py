"""The modes that a constructor runs in: every operation goes to a log, and none allocates memory."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tensorshard.comm.world import world
from tensorshard.common.words import kind_of
from tensorshard.torch_private.dispatch import TorchDispatchMode
from tensorshard.torch_private.fake_tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from tensorshard.torch_private.modules import truncated_normal_replaced
from tensorshard.torch_private.operators import OpOverload, schema
from tensorshard.torch_private.pytree import tree_flatten, tree_leaves, tree_map_only, tree_tensors
from tensorshard.torch_private.tensors import mark_as_parameter, storage_address
from tensorshard.weights.initial.operation_log import Arguments, Log, LoggedOperation, TensorRef

aten = torch.ops.aten

# The operations by which tensors from Python values and numpy arrays enter: they take a real tensor and return a fake.
LIFTS = (aten.lift_fresh.default, aten.lift_fresh_copy.default)

# In-place operations that set every element of their first argument without looking at it.
OVERWRITES = frozenset(
    {
        aten.bernoulli_,
        aten.cauchy_,
        aten.copy_,
        aten.exponential_,
        aten.fill_,
        aten.geometric_,
        aten.log_normal_,
        aten.normal_,
        aten.random_,
        aten.uniform_,
        aten.zero_,
    }
)

MEMORY_READS = frozenset({torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.data_ptr})


class UnrecordableError(RuntimeError):
    """A constructor does something that cannot be recorded. The message says what, with the constructor as subject."""


class OperationRecorder(TorchDispatchMode):
    """Logs each operation; to be entered inside `fake_mode`.

    A tensor is identified by its storage, since tensor objects do not survive `nn.Parameter`; and by its layout at the
    time of the call, since in-place operations may change that. Views are not logged: a storage and a layout describe
    them.

    Attributes:
        log: What was recorded.
        failure: Why the log must not be used, or None. It is also kept here because the constructor may catch the
            exception that says so.
    """

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        """To be made after torch was seeded: a constructor that seeds it anew must get the numbers that follow."""
        super().__init__()
        self._seed = torch.initial_seed()
        self._is_simulated = world().is_simulated  # then no value is ever asked for
        self.log = Log()
        self.failure: str | None = None
        self._fake_mode = fake_mode
        self._indices: dict[int, int] = {}  # address of a storage -> its index in the log
        self._placeholders: dict[int, torch.Tensor] = {}  # address of a real storage -> fake bytes in its place
        self._alive: list[torch.UntypedStorage] = []  # so that no address is used twice
        self._draws = count()

    def ref(self, tensor: torch.Tensor) -> TensorRef:
        """How the log refers to a fake tensor.

        Raises:
            UnrecordableError: No recorded operation made its memory, or a storage and a layout do not describe it.
        """
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            raise UnrecordableError("uses a sparse, quantized, conjugated or negated tensor")
        storage = tensor.untyped_storage()
        index = self._indices.get(storage_address(storage))
        if index is None:
            raise UnrecordableError("uses a tensor that no tensor operation made, such as one loaded from a file")
        self.log.sizes[index] = max(self.log.sizes[index], storage.nbytes())
        return TensorRef(index, tensor.dtype, tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()))

    def origin(self, tensor: torch.Tensor) -> TensorRef | torch.Tensor:
        """The value of a tensor of the finished model: its reference in the log, or a tensor that no operation met."""
        if isinstance(tensor, FakeTensor):
            return self.ref(tensor)
        return (
            self.ref(self._fake(tensor)) if storage_address(tensor.untyped_storage()) in self._placeholders else tensor
        )

    def log_fill(self, func: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Log a Python function that fills its first argument with random numbers, as one operation."""
        self._check_seed()
        tensor = self._fake(tensor)
        written = frozenset({self.ref(tensor).storage})
        filled = written if _fills_storage(tensor) else frozenset()
        arguments = self._freeze((tensor, *args), kwargs)
        self._log(func, arguments, [], reads=written - filled, written=written, filled=filled, random=True)

    def _check_seed(self) -> None:
        if torch.initial_seed() != self._seed and not self._is_simulated:
            raise UnrecordableError("seeds torch's random numbers itself (torch.manual_seed)")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            return self._call(func, args, kwargs or {})
        except UnrecordableError as error:
            self.failure = str(error)
            raise
        except DataDependentOutputException:
            self.failure = f"reads a tensor's value ({func})"
            raise
        except (DynamicOutputShapeException, UnsupportedFakeTensorException, UnsupportedOperatorException):
            self.failure = f"calls {func}, whose result has no shape before it has values"
            raise

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(func, OpOverload):
            raise UnrecordableError(f"calls {func}, which is no plain operator")
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._check_seed()
        if func in LIFTS and not isinstance(args[0], FakeTensor):
            out = func(*args, **kwargs)
            self._log_constant(args[0], out)
            return out
        args, kwargs = tree_map_only(torch.Tensor, self._fake, (args, kwargs))
        arguments = self._freeze(args, kwargs)
        inputs = [leaf.storage for leaf in arguments.leaves if isinstance(leaf, TensorRef)]
        written = frozenset(self.ref(tensor).storage for tensor in _written(func, args, kwargs))
        filled = written if func.overloadpacket in OVERWRITES and _fills_storage(args[0]) else frozenset()
        out = func(*args, **kwargs)
        # The mode keeps weak references to its tensors; `Module.to(dtype)` cannot swap a tensor that has one.
        self._fake_mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
        if torch.Tag.inplace_view in func.tags:
            return out
        made = list(self._made(out))
        if made or written:
            self._log(
                func,
                arguments,
                made,
                reads=inputs[1:] if filled else inputs,
                written=written,
                filled=filled,
                random=torch.Tag.nondeterministic_seeded in func.tags,
            )
        return out

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor as it is. For a real one from outside, a fake one with its present value."""
        if isinstance(tensor, FakeTensor):
            return tensor
        if tensor.layout != torch.strided or not (type(tensor) is torch.Tensor or isinstance(tensor, nn.Parameter)):
            raise UnrecordableError(f"uses {kind_of(tensor)} that was made outside of it")
        storage = tensor.untyped_storage()
        if storage_address(storage) not in self._placeholders:
            with unset_fake_temporarily():
                value = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            with self._fake_mode:
                placeholder = torch.empty(storage.nbytes(), dtype=torch.uint8, device=tensor.device)
            self._log_constant(value, placeholder)
            self._placeholders[storage_address(storage)] = placeholder
            self._alive.append(storage)
        memory = self._placeholders[storage_address(storage)]
        elements = memory[: memory.numel() // tensor.itemsize * tensor.itemsize].view(tensor.dtype)
        return elements.as_strided(tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _freeze(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        leaves, spec = tree_flatten((args, kwargs))
        return Arguments([self._freeze_leaf(leaf) for leaf in leaves], spec)

    def _freeze_leaf(self, leaf: Any) -> Any:
        """An argument in the form for later use, on the CPU."""
        if isinstance(leaf, torch.Tensor):
            return self.ref(leaf)
        if isinstance(leaf, torch.device):
            return torch.device("cpu")
        if isinstance(leaf, torch.Generator):
            if leaf is not torch.default_generator:
                raise UnrecordableError("draws from a torch.Generator of its own")
            return None
        return leaf

    def _made(self, out: Any) -> Iterator[tuple[int, TensorRef]]:
        """The outputs whose storages are new, each with its position."""
        for position, leaf in enumerate(tree_leaves(out)):
            if isinstance(leaf, torch.Tensor) and storage_address(leaf.untyped_storage()) not in self._indices:
                _check_device(leaf.device)
                storage = leaf.untyped_storage()
                self._indices[storage_address(storage)] = len(self.log.sizes)
                self._alive.append(storage)
                self.log.sizes.append(storage.nbytes())
                yield position, self.ref(leaf)

    def _log_constant(self, real: torch.Tensor, placeholder: torch.Tensor) -> None:
        """Log that `placeholder` has the value that `real` has now."""
        made = list(self._made(placeholder))
        if made:
            with unset_fake_temporarily():
                value = real.detach().clone().cpu()
            self._log(torch.clone, Arguments(*tree_flatten(((value,), {}))), made)

    def _log(
        self,
        func: Callable[..., Any],
        arguments: Arguments,
        made: list[tuple[int, TensorRef]],
        *,
        reads: Iterable[int] = (),
        written: frozenset[int] = frozenset(),
        filled: frozenset[int] = frozenset(),
        random: bool = False,
    ) -> None:
        new = frozenset(ref.storage for _, ref in made)
        self.log.append(
            LoggedOperation(
                func=func,
                arguments=arguments,
                outputs=made,
                reads=frozenset(reads),
                writes=written | new,
                defines=filled | new,
                draw=next(self._draws) if random else None,
                default_dtype=torch.get_default_dtype(),
            )
        )


def _written(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments that an operation writes to, as its schema says."""
    values = [
        args[position] if position < len(args) else kwargs.get(argument.name)
        for position, argument in enumerate(schema(func).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return tree_tensors(values)


def _fills_storage(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes()


def _check_device(device: torch.device) -> None:
    """Refuses devices that this machine lacks: their fake tensors work at first, and may abort the process later."""
    if device.type in ("cpu", "meta"):
        return
    here = torch.accelerator.current_accelerator(check_available=True)
    if here is None or here.type != device.type:
        raise UnrecordableError(f"makes tensors on {device.type!r}, a device that this machine does not have")


class TensorMethodRecorder(TorchFunctionMode):
    """Makes copies of tensors from recorded operations, and refuses reads of memory. Entered inside the recorder.

    `Tensor.__deepcopy__` (`nn.TransformerEncoder` copies its layer) would copy the mode that a fake tensor
    belongs to, and so free some of that mode's memory twice.
    """

    def __init__(self, recorder: OperationRecorder, internal: frozenset[str]) -> None:
        """
        Args:
            recorder: gets the reads, as failures.
            internal: The names in a fake tensor's `__dict__` that are not the user's.
        """
        super().__init__()
        self._recorder = recorder
        self._internal = internal

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__ and args[0].is_leaf:
            return self._deepcopy(*args, **(kwargs or {}))
        if func in MEMORY_READS and isinstance(args[0], FakeTensor):
            self._recorder.failure = f"reads a tensor's memory (torch.Tensor.{func.__name__})"
            raise UnrecordableError(self._recorder.failure)
        return func(*args, **(kwargs or {}))

    def _deepcopy(self, tensor: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
        """A copy of `tensor`. As in torch, copies share memory where their originals do."""
        if id(tensor) in memo:
            return memo[id(tensor)]
        storage = tensor.untyped_storage()
        address = ("storage", storage_address(storage))
        with torch.no_grad():
            if address not in memo:
                elements = storage.nbytes() // tensor.itemsize
                memo[address] = tensor.as_strided((elements,), (1,), 0).clone()
            copied = memo[address].view(tensor.dtype)
            copied = copied.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        copied.requires_grad_(tensor.requires_grad)
        if isinstance(tensor, nn.Parameter):
            mark_as_parameter(copied)
        for name, value in vars(tensor).items():
            if name not in self._internal:
                setattr(copied, name, copy.deepcopy(value, memo))
        memo[id(tensor)] = copied
        return copied


def truncated_normal_recorded(recorder: OperationRecorder) -> AbstractContextManager[None]:
    """Makes `nn.init.trunc_normal_` one operation. It reads the numbers that it has drawn."""

    def recorded(sample: Callable[..., Any]) -> Callable[..., torch.Tensor]:
        def fill(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            recorder.log_fill(sample, tensor, *args, **kwargs)
            return tensor

        return fill

    return truncated_normal_replaced(recorded)
