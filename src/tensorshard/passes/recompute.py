"""Recomputation (activation checkpointing) of a model's blocks (Chen et al. 2016).

Also here: what selective recomputation caches: results of the operations with the most arithmetic for each byte of
result.

torch's own ``create_selective_checkpoint_contexts`` refuses a block that changes such a result in place. It does not
notice a change through ``unsafe_chunk``, which recurrent layers use, and then gradients are wrong. Here a result that
was changed is computed again.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tensorshard.model.forwards import Forward, Role, roles_of, wrap_forward
from tensorshard.model.kept_results import KeepsResults
from tensorshard.model.parameters import BufferValues, Exchanged, keeps_statistics
from tensorshard.model.state_before_call import ChangedArgumentError, StateBeforeCall, StateBeforeCalls
from tensorshard.model.tensors import TensorSpec, map_tensors_once, storage_key, tensor_leaves
from tensorshard.torch_private.autograd import compare_saved_tensors, is_function_transformed, stops_early
from tensorshard.torch_private.compilation import is_making_graph
from tensorshard.torch_private.fake_tensors import FakeTensor
from tensorshard.torch_private.modules import buffer_names, has_functional_weights, registrations
from tensorshard.torch_private.operators import ATTENTION_KERNELS, OpOverload, schema
from tensorshard.torch_private.tensors import detached_alike, tensor_version

logger = logging.getLogger("tensorshard")

_RECOMPUTED = "_tensorshard_recomputed"  # the key in a block's __dict__
_COMPARED_ROUNDS = 2
_PLAIN = (torch.Tensor, int, float, str, type(None))
_aten = torch.ops.aten

_RESULT = "result"  # in keys, in the place of an operation
COSTLY = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.convolution.default,
    }
    | ATTENTION_KERNELS
)


def _keep_costly(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in COSTLY else CheckpointPolicy.PREFER_RECOMPUTE


def _keep_nothing(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


def apply_recompute(blocks: Iterable[nn.Module], mode: str, names: Mapping[nn.Module, str] | None = None) -> None:
    """Makes each block compute its activations again in backward.

    The repetition starts from the state from which the first forward started, and leaves the later state as it is.

    Args:
        blocks: modules whose forward is replaced on the instance; names, parameters and hooks stay as they are.
        mode: "none", "selective" or "full", as in :class:`tensorshard.Plan`.
        names: what errors call the blocks.
    """
    if mode == "none":
        return
    for block in blocks:
        name = (names or {}).get(block)
        title = f"{name!r} ({type(block).__name__})" if name else type(block).__name__
        recomputed = RecomputedBlock(block, title, selective=mode == "selective")
        _ = recomputed.state, recomputed.contexts, recomputed.check  # not in the first step
        # A wrapping module would put its name into every parameter's name; checkpoints would then depend on the plan.
        wrap_forward(block, Role.RECOMPUTATION, partial(_recomputed, recomputed))
        vars(block)[_RECOMPUTED] = recomputed
        for module in block.modules():
            if isinstance(module, nn.RReLU) and Role.REPEATED_NOISE not in roles_of(module):
                wrap_forward(module, Role.REPEATED_NOISE, partial(_rrelu, module))


def _rrelu(module: nn.RReLU, forward: Forward, /, input: torch.Tensor) -> torch.Tensor:
    """torch's operator gives its noise to autograd before it is drawn."""
    if not module.training:
        return forward(input)  # type: ignore[no-any-return]
    return input * torch.empty_like(input).uniform_(module.lower, module.upper).where(input <= 0, 1.0)


def always_compare(model: nn.Module) -> None:
    """Makes every recomputed forward of `model`'s blocks compare its values with the first forward's, in each step."""
    for module in model.modules():
        if _RECOMPUTED in vars(module):
            vars(module)[_RECOMPUTED].always_compared = True


@dataclass
class Comparison:
    """How a block's saved tensors are compared.

    Args:
        block: names the block, for the error.
        least_dim: tensors of fewer dimensions are compared by their layouts only; None for all.
        seen: how many were described so far; during a forward, that many more than before it has saved.
    """

    block: str
    least_dim: int | None = None
    seen: int = 0

    def __call__(self, tensor: torch.Tensor) -> "SavedTensor":
        self.seen += 1
        return SavedTensor(self.block, self.least_dim, tensor)


class RecomputedBlock:
    """What is known of one block.

    Args:
        title: its name and class, for errors.
        selective: whether results of costly operations are cached.
    """

    def __init__(self, block: nn.Module, title: str, selective: bool) -> None:
        self._block = block
        self.title = title
        self._selective = selective
        self.always_compared = False
        self._comparison = Comparison(title)
        self._rounds = 0
        self._repeated = False  # since the last first forward
        self._warned = False

    def __reduce__(self) -> tuple[Any, ...]:
        """For a copy of the block, which may not be complete yet: its modules are looked through at its first call."""
        return RecomputedBlock, (self._block, self.title, self._selective)

    @cached_property
    def state(self) -> StateBeforeCalls:
        """Keeps the block's state."""
        return StateBeforeCalls(self._block.modules())

    @cached_property
    def contexts(self) -> Callable[..., tuple[Any, Any]]:
        """Makes the contexts of a forward and of its repetition."""
        return _make_contexts(self, self._holders, self._comparison if self._selective else None)

    @cached_property
    def check(self) -> str:
        """The name of the check of what the forward saves."""
        return compare_saved_tensors(self, self._comparison)

    @cached_property
    def _holders(self) -> list[nn.Module]:
        return [module for module in self._block.modules() if buffer_names(module)]

    def begin(self) -> bool:
        """Begins a first forward. Returns whether its values are compared with those of its repetition.

        They are until the block's gradients were computed twice, as for two micro-batches.
        """
        if self._repeated:
            self._repeated = False
            self._rounds += 1
        compared = self.always_compared or self._rounds < _COMPARED_ROUNDS
        self._comparison.least_dim = self._least_dim if compared else None
        return compared

    def repeats(self) -> None:
        """The forward is about to be repeated."""
        self._repeated = True

    @cached_property
    def _least_dim(self) -> int:
        """2 if a norm keeps running statistics: torch's kernel writes to these vectors after it has saved them."""
        return 2 if any(keeps_statistics(module) for module in self._block.modules()) else 0

    @cached_property
    def parameter_tables(self) -> list[dict[str, Any]]:
        """The dicts of the parameters."""
        return [table for table in registrations(self._block.modules())[::2] if table]

    def warn_not_repeatable(self, kind: str) -> None:
        """Logs once that the block is not recomputed."""
        if not self._warned:
            self._warned = True
            logger.warning(
                "block %s is not recomputed: its state has a %s, which can be read only once. It keeps its "
                "activations; a list, or an attribute with the next value, would let it be recomputed",
                self.title,
                kind,
            )


def _recomputed(block: RecomputedBlock, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled() or is_function_transformed():
        return forward(*args, **kwargs)
    if torch.compiler.is_compiling():
        # What arguments refer to is not restored. If it changed, the comparison says so.
        contexts = block.contexts
    else:
        if has_functional_weights(block.parameter_tables):
            return forward(*args, **kwargs)
        others = [value for value in (*args, *kwargs.values()) if not isinstance(value, _PLAIN)]
        state = block.state.keep(others, watched=block.begin())
        if state.once is not None:
            block.warn_not_repeatable(state.once)
            return forward(*args, **kwargs)
        contexts = partial(block.contexts, state)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, determinism_check=block.check, **kwargs)


def _make_contexts(
    block: RecomputedBlock, holders: list[nn.Module], selective: Comparison | None
) -> Callable[..., tuple[Any, Any]]:
    """Makes the function that returns two contexts: one for the first forward, one for its repetition in backward.

    It is a plain function, since torch.compile accepts no other.

    Args:
        selective: counts what the block saves; None to keep no results.
    """

    def contexts(state: StateBeforeCall | None = None) -> tuple[Any, Any]:
        # Inside a compiled graph nothing is changed in place, so a policy is enough. If a compiled block's code is cut
        # into several graphs, it is recomputed outside of them.
        if is_making_graph():
            return create_selective_checkpoint_contexts(_keep_nothing if selective is None else _keep_costly)
        first: AbstractContextManager[Any] = nullcontext()
        again: AbstractContextManager[Any] = nullcontext()
        if selective is not None:
            results = CachedResults()
            first, again = CachesCostly(results, selective), TakesCached(results)
        call = _FirstForward(block, holders, first, state)
        return call, _Repetition(call, again)

    return contexts


class _FirstForward:
    """Surrounds the first forward of a call, and keeps the old values of the buffers and the state that it changes.

    The repetition sees these old values, and leaves the block's own buffers alone. So what a forward changes (running
    statistics, counters, averages, a codebook), in place or by assigning another tensor, is changed once.

    Args:
        holders: the block's modules that have buffers.
        inner: another context to enter around the forward.
        state: all other state before the call; None to look for it now, without what the arguments refer to.
    """

    def __init__(
        self,
        block: RecomputedBlock,
        holders: list[nn.Module],
        inner: AbstractContextManager[Any],
        state: StateBeforeCall | None,
    ) -> None:
        self.block = block
        self._holders = holders
        self._inner = inner
        self.state = state
        self.before: BufferValues | None = None

    def __enter__(self) -> None:
        if self.state is None:
            self.state = self.block.state.keep((), watched=self.block.begin())
        self.before = BufferValues(self._holders)
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        assert self.before is not None and self.state is not None
        self.before.forget_unchanged()
        self.state.ended()
        return self._inner.__exit__(*error)


class _Repetition:
    """Surrounds the forward when it is computed again in backward."""

    def __init__(self, call: _FirstForward, inner: AbstractContextManager[Any]) -> None:
        self._call = call
        self._inner = inner
        self._exchanged: Exchanged | None = None
        self._undo: Callable[[], None] | None = None

    def __enter__(self) -> None:
        assert self._call.before is not None and self._call.state is not None
        self._call.block.repeats()
        try:
            self._undo = self._call.state.put_back()
        except ChangedArgumentError as error:
            raise DifferentValuesError(different(self._call.block.title, str(error))) from None
        self._exchanged = self._call.before.exchange()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        assert self._exchanged is not None and self._undo is not None
        try:
            handled = self._inner.__exit__(*error)
        finally:
            self._exchanged.undo()
            self._undo()
        if error[0] is None and stops_early():  # it saved fewer tensors than the first forward did
            raise DifferentValuesError(different(self._call.block.title))
        return handled


_ROUNDING = 1e-6  # of a forward that normalizes its weight in place, which does so twice
_TOLERANCE = 1e-3  # on devices whose kernels may add in another order each time


class DifferentValuesError(RuntimeError):
    """A block's recomputed forward does not compute what its first forward did."""


class SavedTensor:
    """The shape of a tensor that a block's forward saved, and some numbers that depend on all of its values.

    Args:
        block: names the block, for the error.
        least_dim: tensors of fewer dimensions are compared by their layouts only; None for all.
    """

    __slots__ = ("_block", "_exact", "_layout", "_numbers")

    def __init__(self, block: str, least_dim: int | None, tensor: torch.Tensor) -> None:
        self._block = block
        self._layout = tensor.shape, tensor.dtype, tensor.device
        self._numbers = None
        if least_dim is not None and tensor.dim() >= least_dim and not _has_no_values(tensor):
            self._exact = tensor.device.type == "cpu"
            self._numbers = _summary(tensor.detach())

    def __ne__(self, other: object) -> bool:
        """False.

        Raises:
            DifferentValuesError: the layouts or the values differ.
        """
        assert isinstance(other, SavedTensor)
        if self._layout != other._layout:
            raise DifferentValuesError(different(self._block))
        if self._numbers is not None and other._numbers is not None and not self._agrees(other):
            raise DifferentValuesError(different(self._block))
        return False

    def _agrees(self, other: "SavedTensor") -> bool:
        assert self._numbers is not None and other._numbers is not None
        tolerance = _ROUNDING if self._exact else _TOLERANCE
        mine, others = self._numbers.tolist(), other._numbers.tolist()
        scale = max(abs(mine[0]), abs(others[0])) if math.isfinite(mine[0]) and math.isfinite(others[0]) else 0.0
        return all(
            one == two or (math.isnan(one) and math.isnan(two)) or abs(one - two) <= tolerance * scale
            for one, two in zip(mine, others, strict=True)
        )


def different(block: str, because: str | None = None) -> str:
    """The sentence about a block whose recomputed forward differs from the first one."""
    because = because or (
        "its forward depends on something that changes meanwhile and cannot be restored, such as a file, the time, an "
        "object of a compiled library, or a tensor that other code writes to in place"
    )
    return (
        f"block {block} computes other values when its forward runs again in backward (Plan.recompute), so its "
        f"gradients would be wrong: {because}. Keep such a state in an attribute, a list, a dict or a buffer of the "
        f"block, or use recompute='none'"
    )


def _has_no_values(tensor: torch.Tensor) -> bool:
    is_workspace = tensor.dtype == torch.uint8 and tensor.dim() == 1  # of a library's LSTM, of which it writes a part
    return (
        is_workspace
        or isinstance(tensor, FakeTensor)
        or tensor.is_meta
        or tensor.layout != torch.strided
        or tensor.is_quantized
        or not tensor.numel()
    )


@torch.no_grad()
def _summary(tensor: torch.Tensor) -> torch.Tensor:
    """Sums of sizes, of all, of every other row and of every other column, without a copy of what has 32 bits."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    with torch.autocast(tensor.device.type, enabled=False):
        wide = torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else torch.float64
        parts = [tensor, tensor[::2], tensor[..., ::2]] if tensor.dim() else [tensor]
        sums = [part.sum(dtype=wide) for part in parts]
        if tensor.is_floating_point():
            sums.insert(0, torch.linalg.vector_norm(tensor, 1, dtype=wide))
        return torch.stack(sums)


_Key = tuple[Any, int]


class CachedResults:
    """Results of costly operations of one forward. The key is the operation, and how often it had run before."""

    def __init__(self) -> None:
        self._cached: dict[_Key, tuple[Any, list[int]]] = {}  # with the versions of its tensors
        self._unread: dict[_Key, Callable[[], torch.Tensor]] = {}
        self._by_storage: dict[int, _Key] = {}

    def put(self, key: _Key, result: Any) -> None:
        """Caches `result` under `key`."""
        detached = map_tensors_once(detached_alike, result)
        leaves = tensor_leaves(detached)
        self._cached[key] = detached, [tensor_version(leaf) for leaf in leaves]
        self._by_storage.update((storage_key(leaf), key) for leaf in leaves)

    def forget_changed(self, tensors: list[torch.Tensor]) -> None:
        """Forgets results in the memory of `tensors`, which were written to."""
        for tensor in tensors:
            self._cached.pop(self._by_storage.get(storage_key(tensor), (None, 0)), None)

    def forget(self, key: _Key) -> None:
        """Forgets what was cached under `key`."""
        self._cached.pop(key, None)

    def forget_values(self, key: _Key) -> None:
        """Forgets what was cached under `key` but for its shape: nothing reads its values."""
        result, _ = self._cached.pop(key, (None, []))
        if result is not None:
            self._unread[key] = partial(TensorSpec.of(result).empty, result.device)

    def without_values(self, key: _Key) -> torch.Tensor | None:
        """A tensor like that of which the values were forgotten; None if they were not."""
        make = self._unread.pop(key, None)
        return None if make is None else make()

    def take(self, key: _Key) -> Any | None:
        """Returns what was cached under `key`, and forgets it; None if nothing was, or if it has changed since."""
        result, versions = self._cached.pop(key, (None, []))
        changed = [tensor_version(leaf) for leaf in tensor_leaves(result)] != versions
        return None if changed else result


class _CountingMode(KeepsResults):
    """Counts how often each operation has run in it."""

    def __init__(self, results: CachedResults) -> None:
        super().__init__()
        self._results = results
        self._counts: dict[Any, int] = {}
        self._within = False  # what a result is made of

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> Any:
        self._counts.clear()  # backward may run twice
        return super().__enter__()

    def _next(self, operation: Any) -> _Key:
        count = self._counts.get(operation, 0)
        self._counts[operation] = count + 1
        return operation, count

    def _computed(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        self._within = True
        try:
            return compute()
        finally:
            self._within = False


class CachesCostly(_CountingMode):
    """Surrounds the first forward.

    A repetition ends once it has saved what the first forward did. What this computed afterwards is not kept: of most
    blocks the last product, whose result is only added to the block's input.

    Args:
        comparison: counts what the forward saves.
    """

    def __init__(self, results: CachedResults, comparison: Comparison) -> None:
        super().__init__(results)
        self._comparison = comparison
        self._saved: dict[_Key, int] = {}  # how many tensors were saved when a result's own were
        self._latest: _Key | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._within:
            return result
        if func in COSTLY and not _draws_random_numbers(func, args, kwargs):
            key = self._next(func)
            self._results.put(key, result)
            self._saved[key] = self._comparison.seen
        elif isinstance(func, OpOverload) and schema(func).is_mutable:
            self._results.forget_changed(_written(func, args, kwargs))
        return result

    def __exit__(self, *error: Any) -> Any:
        handled = super().__exit__(*error)
        if stops_early():
            for key, saved in self._saved.items():
                if saved == self._comparison.seen:
                    (self._results.forget_values if key[0] is _RESULT else self._results.forget)(key)
        self._saved.clear()
        return handled

    def result_of(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """As for :func:`tensorshard.model.kept_results.kept_result`."""
        result = self._computed(compute)
        self._latest = self._next(_RESULT)
        self._results.put(self._latest, result)
        return result

    def has_saved(self) -> None:
        """As for :func:`tensorshard.model.kept_results.function_has_saved`."""
        if self._latest is not None:
            self._saved[self._latest] = self._comparison.seen
            self._latest = None


class TakesCached(_CountingMode):
    """Surrounds the forward when it is computed again in backward."""

    def result_of(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """As for :func:`tensorshard.model.kept_results.kept_result`."""
        key = self._next(_RESULT)
        cached: torch.Tensor | None = self._results.take(key)
        if cached is None and stops_early():
            cached = self._results.without_values(key)
        return self._computed(compute) if cached is None else cached

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._within and func in COSTLY and not _draws_random_numbers(func, args, kwargs):
            cached = self._results.take(self._next(func))
            if cached is not None:
                return cached
        return func(*args, **kwargs)


def _draws_random_numbers(operation: OpOverload, args: Any, kwargs: Any) -> bool:
    """Whether an attention kernel has dropout. It must run again, or later operations would get its random numbers."""
    argument = _dropout_of(operation)
    if argument is None:
        return False
    place, default = argument
    return bool(kwargs.get("dropout_p", args[place] if place < len(args) else default))


@cache
def _dropout_of(operation: OpOverload) -> tuple[int, float] | None:
    """The place of the argument ``dropout_p``, and its default; None if there is no such argument."""
    for place, argument in enumerate(schema(operation).arguments):
        if argument.name == "dropout_p":
            return place, argument.default_value
    return None


def _written(operation: OpOverload, args: Any, kwargs: Any) -> list[torch.Tensor]:
    arguments = schema(operation).arguments
    given = [*zip(arguments, args, strict=False), *((a, kwargs[a.name]) for a in arguments if a.name in kwargs)]
    written = [value for argument, value in given if argument.alias_info and argument.alias_info.is_write]
    return tensor_leaves(written)
