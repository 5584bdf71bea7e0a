"""Streams that say where they stand, and those that must be read again."""

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch


class StreamReader:
    """Reads one pass of a stream, and knows its place.

    Args:
        stream: an iterable. It may have ``state_dict`` and ``load_state_dict``, and ``set_epoch``.
        epoch: for ``set_epoch``.
        state: where to begin, as :meth:`state` returned it; None for the stream's beginning.
    """

    def __init__(self, stream: Any, epoch: int, state: dict[str, Any] | None = None) -> None:
        self._stream = stream
        self._read = 0 if state is None else int(state["read"])
        self._is_over = state is not None and state["is_over"]
        place = None if state is None or not is_stateful(stream) else state["place"]
        if hasattr(stream, "set_epoch"):
            _keep_its_own_epoch(stream)
            stream.set_epoch(epoch)
        if place is not None and not self._is_over:
            stream.load_state_dict(place)
        self._samples = iter(()) if self._is_over else iter(stream)
        for _ in islice(self._samples, 0 if place is not None else self._read):
            pass

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            sample = next(self._samples)
        except StopIteration:
            self._is_over = True  # the stream's own state may be that of its beginning
            raise
        self._read += 1
        return sample

    def state(self) -> dict[str, Any]:
        """The samples read, whether these are all, and the stream's own state."""
        place = copy.deepcopy(self._stream.state_dict()) if self._read and is_stateful(self._stream) else None
        return {"read": self._read, "is_over": self._is_over, "place": place}


def is_stateful(stream: Any) -> bool:
    """Whether `stream` says where it stands, and comes back to exactly there.

    The state of a Hugging Face stream does not hold the samples in its shuffle buffer: they would be lost. Such a
    stream is read again instead.
    """
    return hasattr(stream, "state_dict") and hasattr(stream, "load_state_dict") and not _forgets_a_buffer(stream)


def _keep_its_own_epoch(stream: Any) -> None:
    """All worker processes share a Hugging Face stream's epoch, and ``set_epoch`` adds to it: two that call it at once
    may add twice."""
    epoch = getattr(stream, "_epoch", None)
    if isinstance(epoch, torch.Tensor) and epoch.is_shared():
        stream._epoch = epoch.clone()


def _forgets_a_buffer(stream: Any) -> bool:
    parts = [stream]
    for part in parts:
        if type(part).__name__ == "BufferShuffledExamplesIterable":
            return True
        held = vars(part) if hasattr(part, "__dict__") else {}
        parts += [held[name] for name in ("dataset", "_ex_iterable", "ex_iterable") if name in held]
        parts += held.get("ex_iterables") or []
    return False
