"""What selective recomputation caches: results of the operations with the most arithmetic for each byte of result.

torch's own ``create_selective_checkpoint_contexts`` refuses a block that changes such a result in place. It does not
notice a change through ``unsafe_chunk``, which recurrent layers use, and then gradients are wrong. Here a result that
was changed is computed again.
"""

from functools import cache
from typing import Any

import torch

from tensorshard.model.tensors import map_tensors_once, storage_key, tensor_leaves
from tensorshard.torch_private.dispatch import TorchDispatchMode
from tensorshard.torch_private.operators import ATTENTION_KERNELS, OpOverload, schema
from tensorshard.torch_private.tensors import detached_alike, tensor_version

_aten = torch.ops.aten

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


class CachedResults:
    """Results of costly operations of one forward. The key is the operation, and how often it had run before."""

    def __init__(self) -> None:
        self._cached: dict[tuple[Any, int], tuple[Any, list[int]]] = {}  # with the versions of its tensors
        self._by_storage: dict[int, tuple[Any, int]] = {}

    def put(self, key: tuple[Any, int], result: Any) -> None:
        """Caches `result` under `key`."""
        detached = map_tensors_once(detached_alike, result)
        leaves = tensor_leaves(detached)
        self._cached[key] = detached, [tensor_version(leaf) for leaf in leaves]
        self._by_storage.update((storage_key(leaf), key) for leaf in leaves)

    def forget_changed(self, tensors: list[torch.Tensor]) -> None:
        """Forgets results in the memory of `tensors`, which were written to."""
        for tensor in tensors:
            self._cached.pop(self._by_storage.get(storage_key(tensor), (None, 0)), None)

    def take(self, key: tuple[Any, int]) -> Any | None:
        """Returns what was cached under `key`, and forgets it; None if nothing was, or if it has changed since."""
        result, versions = self._cached.pop(key, (None, []))
        changed = [tensor_version(leaf) for leaf in tensor_leaves(result)] != versions
        return None if changed else result


class _CountingMode(TorchDispatchMode):
    """Counts how often each operation has run in it."""

    def __init__(self, results: CachedResults) -> None:
        super().__init__()
        self._results = results
        self._counts: dict[Any, int] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> "TorchDispatchMode":
        self._counts.clear()  # backward may run twice
        return super().__enter__()

    def _next(self, operation: Any) -> tuple[Any, int]:
        count = self._counts.get(operation, 0)
        self._counts[operation] = count + 1
        return operation, count


class CachesCostly(_CountingMode):
    """Surrounds the first forward."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in COSTLY and not _draws_random_numbers(func, args, kwargs):
            self._results.put(self._next(func), result)
        elif isinstance(func, OpOverload) and schema(func).is_mutable:
            self._results.forget_changed(_written(func, args, kwargs))
        return result


class TakesCached(_CountingMode):
    """Surrounds the forward when it is computed again in backward."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in COSTLY and not _draws_random_numbers(func, args, kwargs):
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
