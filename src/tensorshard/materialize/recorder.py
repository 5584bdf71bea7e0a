"""The modes under which a constructor runs: every operation goes to a log, none allocates."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from tensorshard.materialize.log import Log, Operation, TensorRef

aten = torch.ops.aten

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

# Ways to a tensor's memory that are no operations, so that only a function mode sees them.
MEMORY_READS = frozenset({torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.data_ptr})


class UnrecordableError(RuntimeError):
    """A constructor does what cannot be recorded; the message says what, as the rest of a sentence on "it"."""


class OperationRecorder(TorchDispatchMode):
    """Logs each operation; to be entered inside `fake_mode`.

    Tensors are known by their storages, since tensor objects do not survive `nn.Parameter`, and by what they look
    like when an operation takes them, since later ones may change that. Views are not logged: a view is a storage
    and a layout.

    Attributes:
        log: What was recorded.
        failure: Why the recording is worthless, or None. It is kept here because the constructor under recording may
            catch the exception that says so.
    """

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        super().__init__()
        self.log = Log()
        self.failure: str | None = None
        self._fake_mode = fake_mode
        self._indices: dict[int, int] = {}  # address of a storage -> its index in the log
        self._lifted: dict[int, torch.Tensor] = {}  # address of a real storage -> the fake memory in its place
        self._alive: list[torch.UntypedStorage] = []  # so that no address is used twice
        self._draws = 0

    def ref(self, tensor: torch.Tensor) -> TensorRef:
        """How the log calls a tensor.

        Raises:
            UnrecordableError: Its memory was not made by a recorded operation.
        """
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            raise UnrecordableError("uses a sparse, quantized, conjugate or negated tensor")
        storage = tensor.untyped_storage()
        index = self._indices.get(storage._cdata)
        if index is None:
            raise UnrecordableError("uses a tensor that no tensor operation made, such as one loaded from a file")
        self.log.sizes[index] = max(self.log.sizes[index], storage.nbytes())
        return TensorRef(
            index, tensor.dtype, tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset())
        )

    def lift(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake tensor that stands for a real one from outside, whose present value goes into the log."""
        if type(tensor) is not torch.Tensor and not isinstance(tensor, nn.Parameter):
            raise UnrecordableError(f"uses a {type(tensor).__name__} that was made outside of it")
        storage = tensor.untyped_storage()
        if storage._cdata not in self._lifted:
            with unset_fake_temporarily():
                memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                value = memory.cpu().clone()
            self._lifted[storage._cdata] = torch.empty(storage.nbytes(), dtype=torch.uint8, device=tensor.device)
            self._alive.append(storage)
            self._log_constant(value, self._lifted[storage._cdata])
        memory = self._lifted[storage._cdata]
        whole = memory[: memory.numel() // tensor.itemsize * tensor.itemsize].view(tensor.dtype)
        return whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def origin(self, tensor: torch.Tensor) -> TensorRef | torch.Tensor:
        """Where a tensor of the finished model gets its value: from the log, or from itself if it is a real one."""
        if isinstance(tensor, FakeTensor):
            return self.ref(tensor)
        return self.ref(self.lift(tensor)) if tensor.untyped_storage()._cdata in self._lifted else tensor

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
        except (
            DynamicOutputShapeException,
            UnsupportedFakeTensorException,
            UnsupportedOperatorException,
        ):
            self.failure = f"calls {func}, which has no shape without values"
            raise

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(func, torch._ops.OpOverload):
            raise UnrecordableError(f"calls {func}, which is no plain operator")
        if func in LIFTS and not isinstance(args[0], FakeTensor):
            out = func(*args, **kwargs)
            with unset_fake_temporarily():
                value = args[0].detach().cpu().clone()
            self._log_constant(value, out)
            return out

        args, kwargs = tree_map_only(torch.Tensor, self._fake, (args, kwargs))
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        frozen = [self._freeze(leaf) for leaf in leaves]
        written = frozenset(self.ref(tensor).storage for tensor in _written(func, args, kwargs))
        overwritten = (
            written if func.overloadpacket in OVERWRITES and _fills_storage(tensors[0]) else frozenset()
        )
        reads = frozenset(self.ref(tensor).storage for tensor in (tensors[1:] if overwritten else tensors))

        out = func(*args, **kwargs)
        # The mode remembers its tensors by weak references, and `Module.to(dtype)` cannot swap a tensor that has one.
        self._fake_mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
        if torch.Tag.inplace_view in func.tags:
            return out
        made = list(self._made(out))
        if made or written:
            defines = frozenset(ref.storage for _, ref in made)
            draw = None
            if torch.Tag.nondeterministic_seeded in func.tags:
                draw = self._draws
                self._draws += 1
            self.log.append(
                Operation(
                    func=func,
                    leaves=frozen,
                    spec=spec,
                    outputs=made,
                    reads=reads,
                    writes=written | defines,
                    defines=overwritten | defines,
                    draw=draw,
                    default_dtype=torch.get_default_dtype(),
                )
            )
        return out

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self.lift(tensor)

    def _freeze(self, leaf: Any) -> Any:
        """An argument as the log keeps it: to be used later, on the CPU."""
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
        """The outputs that lie in storages not seen before, each with its position."""
        for position, leaf in enumerate(tree_leaves(out)):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in self._indices:
                self._check_device(leaf.device)
                storage = leaf.untyped_storage()
                self._indices[storage._cdata] = len(self.log.sizes)
                self._alive.append(storage)
                self.log.sizes.append(storage.nbytes())
                yield position, self.ref(leaf)

    def _log_constant(self, value: torch.Tensor, stand_in: torch.Tensor) -> None:
        leaves, spec = tree_flatten(((value,), {}))
        for position, ref in self._made(stand_in):
            self.log.append(
                Operation(
                    func=torch.clone,
                    leaves=leaves,
                    spec=spec,
                    outputs=[(position, ref)],
                    reads=frozenset(),
                    writes=frozenset({ref.storage}),
                    defines=frozenset({ref.storage}),
                    draw=None,
                    default_dtype=torch.get_default_dtype(),
                )
            )

    def _check_device(self, device: torch.device) -> None:
        """Fake tensors of a device that this machine lacks work at first and abort the process later."""
        if device.type in ("cpu", "meta"):
            return
        here = torch.accelerator.current_accelerator(check_available=True)
        if here is None or here.type != device.type:
            raise UnrecordableError(f"makes tensors on {device.type!r}, a device that this machine does not have")


class TensorMethodRecorder(TorchFunctionMode):
    """What a dispatch mode cannot see or do right; to be entered inside an `OperationRecorder`.

    Copies of fake tensors (`nn.TransformerEncoder` copies its layer): `Tensor.__deepcopy__` would copy the fake mode
    that the tensor belongs to, and corrupt memory by it. Reads of a tensor's memory: there is none.
    """

    def __init__(self, recorder: OperationRecorder, internal: frozenset[str]) -> None:
        super().__init__()
        self._recorder = recorder
        self._internal = internal  # the names in a fake tensor's `__dict__` that are not the user's

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__ and args[0].is_leaf:
            return self._deepcopy(*args, **(kwargs or {}))
        if func in MEMORY_READS and isinstance(args[0], FakeTensor):
            self._recorder.failure = f"reads a tensor's memory (Tensor.{func.__name__})"
            raise UnrecordableError(self._recorder.failure)
        return func(*args, **(kwargs or {}))

    def _deepcopy(self, tensor: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
        """A copy made of operations. As in torch, copies share memory where the originals do."""
        if id(tensor) in memo:
            return memo[id(tensor)]
        storage = tensor.untyped_storage()
        with torch.no_grad():
            if storage not in memo:
                elements = storage.nbytes() // tensor.itemsize
                memo[storage] = tensor.as_strided((elements,), (1,), 0).clone()
            copied = memo[storage].view(tensor.dtype)
            copied = copied.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        copied.requires_grad_(tensor.requires_grad)
        if isinstance(tensor, nn.Parameter):
            copied._is_param = True
        for name, value in vars(tensor).items():
            if name not in self._internal:
                setattr(copied, name, copy.deepcopy(value, memo))
        memo[id(tensor)] = copied
        return copied


def _written(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments that an operation writes to, as its schema says."""
    values = [
        args[position] if position < len(args) else kwargs.get(argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _fills_storage(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes()
