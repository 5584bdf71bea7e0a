"""Deferred initialisation: a constructor runs once on fake tensors, and is replayed one tensor at a time."""

import gc
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

from tensorshard.common.words import kind_of
from tensorshard.model.copies import copy_module
from tensorshard.model.state_places import host_random_restored
from tensorshard.torch_private.fake_results import QuickFakeTensorMode
from tensorshard.torch_private.fake_tensors import FakeTensor, FakeTensorMode, unset_fake_temporarily
from tensorshard.torch_private.modules import (
    TABLES,
    own_buffers,
    own_parameters,
    reset_method,
    set_buffer,
    set_parameter,
)
from tensorshard.torch_private.pytree import tree_leaves
from tensorshard.torch_private.tensors import PARAMETER_FLAG
from tensorshard.weights.initial.operation_log import Log, RandomStates, TensorRef, replay
from tensorshard.weights.initial.recorder import (
    OperationRecorder,
    TensorMethodRecorder,
    UnrecordableError,
    truncated_normal_recorded,
)
from tensorshard.weights.initial.source import TensorSource, from_module, move_to_meta, named_tensors

logger = logging.getLogger("tensorshard")

_NOBODYS_SEED = 0x7E5502D  # while a constructor runs, so that one that seeds torch itself is noticed

REMEDY = "pass the callable that builds the model, instead of a module on the meta device"


class Recording(TensorSource):
    """A recorded constructor. Each value is computed when it is asked for, and not kept.

    Computing a value takes the memory of that tensor and of what its own initialisation needs.
    """

    def __init__(
        self, module: nn.Module, log: Log, origins: dict[str, TensorRef | torch.Tensor], states: RandomStates
    ) -> None:
        """
        Args:
            module: The model on the meta device.
            log: The recorded operations.
            origins: For each name, its reference in the log; or the tensor, if the constructor used a real one.
            states: Of the random generator, for the operations of `log`.
        """
        super().__init__(module)
        self._log = log
        self._origins = origins
        self._states = states

    def _value(self, name: str) -> torch.Tensor:
        origin = self._origins[name]
        if isinstance(origin, TensorRef):
            return replay(self._log, origin, self._states)
        return origin.detach().cpu()

    def again(self) -> "Recording | None":
        """The same recording with a copy of the module, for another rank's layout; None if a copy might differ.

        It might if code refers to modules (hooks, functions that were made around them), or if a module keeps a fake
        tensor, which belongs to one run.
        """
        if not all(_can_be_copied(module) for module in self.module.modules()):
            return None
        memo: dict[int, Any] = {}
        with unset_fake_temporarily():
            for _, tensor in named_tensors(self.module):
                if id(tensor) not in memo:
                    memo[id(tensor)] = _same_layout(tensor)
            try:
                module = copy_module(self.module, memo)
            except Exception:  # some attributes refuse to be copied
                return None
        return Recording(module, self._log, self._origins, self._states)

    def is_written(self, name: str) -> bool:
        """Whether the constructor set values in this tensor, after it allocated it."""
        origin = self._origins[name]
        return not isinstance(origin, TensorRef) or self._log.is_written(origin.storage)


def _can_be_copied(module: nn.Module) -> bool:
    """Whether a copy of `module`, without the modules inside of it, refers to nothing of the original."""
    attributes = {key: value for key, value in vars(module).items() if key not in TABLES}
    hooked = any(value for key, value in attributes.items() if key.endswith("_hooks"))
    leaves = tree_leaves([value for key, value in attributes.items() if not key.endswith("_hooks")])
    return not hooked and not any(isinstance(leaf, FakeTensor | FunctionType | MethodType) for leaf in leaves)


def _same_layout(tensor: torch.Tensor) -> torch.Tensor:
    """A new tensor on the meta device like `tensor`, with the attributes that its owner set on it."""
    same: torch.Tensor = tensor.detach()
    if isinstance(tensor, nn.Parameter):
        same = nn.Parameter(same, requires_grad=tensor.requires_grad)
    same.__dict__.update(vars(tensor))
    return same


def record(build: Callable[[], nn.Module], *, seed: int, in_order: bool = True) -> TensorSource:
    """Run a constructor without allocating its tensors, and keep how each of them is initialised.

    The idea is torchdistx's deferred initialisation: a dispatch mode over fake tensors logs every operation;
    the value of one parameter is the replay of the few operations it depends on. So initialisation code of
    whatever kind is honoured (`self.apply(init)`, `nn.init`, in-place arithmetic, parametrizations), and no
    process holds the whole model. The values are those that the constructor would set after
    `torch.manual_seed(seed)`, whatever the order in which they are asked for (:class:`RandomStates`).
    Memory that is left as `torch.empty` made it is zero.

    A constructor that cannot be recorded (it reads values by `.item()` or `.numpy()`, seeds torch or draws from its
    own generator, loads a file, ...) is built whole, from the same seed in every process, with a warning that
    says why. In that case it runs twice.

    Tensors held as plain attributes of modules are computed at once. Real tensors from outside are copied
    when an operation of the constructor meets them, and not changed by it. The global random state (torch's,
    numpy's, Python's) is as it was on return.

    Args:
        build: Builds the model; a class, a `functools.partial` or a lambda, for instance.
        seed: Determines all random values.
        in_order: whether they are those of ``torch.manual_seed(seed)``; if not, they take less time.

    Returns:
        The source of the model's initial values: a `Recording`, or `HeldTensors` if the model was built
        whole.

    Raises:
        TypeError: `build` does not return an `nn.Module`.
        ValueError: The model has a parameter on the meta device, or one without a shape (a lazy module).
        Exception: Whatever `build` itself raises.
    """
    try:
        return _record(build, seed, in_order)
    except UnrecordableError as error:
        reason = str(error)
    logger.warning(
        "The model's constructor %s, so it cannot be recorded: every process builds the whole model in its own memory.",
        reason,
    )
    with seeded(seed):
        module = build()
    _check_module(module)
    return from_module(module)


def _record(build: Callable[[], nn.Module], seed: int, in_order: bool) -> Recording:
    fake_mode = QuickFakeTensorMode()
    recording = _run(build, fake_mode, seed, in_order)
    left = _left_over(fake_mode)
    if left:
        gc.collect()
        left = _left_over(fake_mode)
    if left:
        shape = tuple(left[0].shape)
        _forget(left)
        raise UnrecordableError(f"keeps a tensor of shape {shape} in a cache, outside of the model")
    return recording


def _forget(left: list[Any], depth: int = 3) -> None:
    """Takes objects out of the caches that hold them, so that the constructor makes them again when it runs for real.

    Args:
        depth: of tuples and the like around the objects.
    """
    ids = {id(each) for each in left}
    around: list[Any] = []
    for holder in gc.get_referrers(*left):
        if holder is left or isinstance(holder, FrameType):
            continue
        if isinstance(holder, dict):
            for key in [key for key, value in holder.items() if id(value) in ids]:
                del holder[key]
        elif isinstance(holder, list):
            holder[:] = [value for value in holder if id(value) not in ids]
        elif hasattr(holder, "cache_clear"):  # of functools
            holder.cache_clear()
        elif isinstance(holder, tuple):
            around.append(holder)
    if around and depth:
        _forget(around, depth - 1)


def _run(build: Callable[[], nn.Module], fake_mode: FakeTensorMode, seed: int, in_order: bool) -> Recording:
    with seeded(seed):
        torch.manual_seed(_NOBODYS_SEED)  # nothing is drawn: values are replayed
        return _run_seeded(build, fake_mode, seed, in_order)


def _run_seeded(build: Callable[[], nn.Module], fake_mode: FakeTensorMode, seed: int, in_order: bool) -> Recording:
    with fake_mode:
        internal = frozenset({PARAMETER_FLAG, *vars(torch.empty(0))})
    recorder = OperationRecorder(fake_mode)
    try:
        with (
            fake_mode,
            recorder,
            TensorMethodRecorder(recorder, internal),
            truncated_normal_recorded(recorder),
        ):
            module = build()
    except Exception as error:
        # Run for real, the constructor shows whether it or the recording is at fault.
        first_line = next(iter(str(error).splitlines()), "")
        reason = recorder.failure or f"fails on fake tensors ({type(error).__name__}: {first_line})"
        raise UnrecordableError(reason) from error
    if recorder.failure is not None:
        raise UnrecordableError(recorder.failure)
    _check_module(module)
    for name, tensor in named_tensors(module):
        if tensor.is_meta:
            raise ValueError(
                f"the callable leaves {name!r} on the meta device, where it has no initial values; build the "
                "model on the CPU, without torch.device('meta'): recording it allocates nothing"
            )
    origins = {name: recorder.origin(tensor) for name, tensor in named_tensors(module)}
    states = RandomStates(recorder.log, seed, in_order=in_order)
    # By the id of a fake tensor. That tensor is kept as the first of the two, so that no other gets its id.
    computed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attribute(tensor: torch.Tensor) -> torch.Tensor:
        origin = recorder.origin(tensor)
        if not isinstance(origin, TensorRef):
            return tensor
        if id(tensor) not in computed:
            with unset_fake_temporarily() as outer:
                value = replay(recorder.log, origin, states)
            if isinstance(outer, FakeTensorMode):
                value = outer.from_tensor(value)
            computed[id(tensor)] = tensor, value
        return computed[id(tensor)][1]

    move_to_meta(module, hidden=internal, attribute=attribute)
    return Recording(module, recorder.log, origins, states)


def _check_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"the callable returned {kind_of(module)}, where an nn.Module was expected")


def _left_over(fake_mode: FakeTensorMode) -> list[FakeTensor]:
    """Fake tensors still in use, on which the model would fail when it runs."""
    return [each for each in gc.get_objects() if type(each) is FakeTensor and each.fake_mode is fake_mode]


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds torch's, numpy's and Python's global generators, and restores them afterwards."""
    # An accelerator that nobody has used yet has no state to keep; asking for it would take memory there.
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices), host_random_restored():
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        yield


def from_meta(module: nn.Module, *, seed: int) -> TensorSource:
    """The values that a meta module's parts set themselves, by `reset_parameters` of those that hold tensors.

    That is PyTorch's convention for deferred initialisation. Children are reset before their parents, the
    order in which constructors finish. Tensors of the model that are not on the meta device keep their
    values.

    Known limit: whatever else the model's constructor did (`self.apply(init)`, scaling the weights of some
    layers, copying one weight to another) is not known here, and is lost. Where that matters, pass the
    callable.

    Args:
        module: A model with tensors on the meta device. It is changed in place and becomes the source's
            `module`.
        seed: Determines all random values.

    Raises:
        ValueError: A module holds tensors on the meta device but has no `reset_parameters`, or has one that
            leaves some of them unset.
    """
    blanks: list[tuple[nn.Module, str, torch.Tensor]] = []
    resets: list[Callable[[], object]] = []
    for path, owner in module.named_modules():
        unset = [
            (owner, name, tensor)
            for name, tensor in (*own_parameters(owner).items(), *own_buffers(owner).items())
            if tensor.is_meta
        ]
        if unset:
            blanks.extend(unset)
            resets.append(_reset_method(owner, path, unset[0][1]))
    names = [name for name, tensor in named_tensors(module) if tensor.is_meta]

    def build() -> nn.Module:
        made: dict[int, torch.Tensor] = {}  # a tied tensor is made once
        for owner, name, blank in blanks:
            if id(blank) not in made:
                made[id(blank)] = _with_memory(blank)
            put = set_parameter if name in own_parameters(owner) else set_buffer
            put(owner, name, made[id(blank)])
        for reset in reversed(resets):
            reset()
        return module

    source = record(build, seed=seed)
    if isinstance(source, Recording):
        for name in names:
            if not source.is_written(name):
                raise ValueError(f"no reset_parameters() of the model sets {name!r}; {REMEDY}")
    return source


def _reset_method(owner: nn.Module, path: str, tensor_name: str) -> Callable[[], object]:
    reset = reset_method(owner)
    if reset is None:
        raise ValueError(
            f"module {path!r} ({type(owner).__name__}) holds {tensor_name!r} on the meta device and has no "
            f"reset_parameters() that would initialise it; {REMEDY}"
        )
    return reset


def _with_memory(blank: torch.Tensor) -> torch.Tensor:
    tensor = torch.empty_strided(blank.size(), blank.stride(), dtype=blank.dtype, device="cpu")
    if isinstance(blank, nn.Parameter):
        tensor = nn.Parameter(tensor, requires_grad=blank.requires_grad)
    for name, value in vars(blank).items():
        setattr(tensor, name, value)
    return tensor
