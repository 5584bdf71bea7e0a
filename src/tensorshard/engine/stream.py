"""The batches of a stream for one data rank, each with the place in the stream that comes after it."""

import copy
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from tensorshard.torch_private.data_workers import become_only_reader


class DealtStream(IterableDataset[tuple[Any, int, Any]]):
    """One pass over a stream. Every rank reads all of it, and takes its share of each batch.

    So the samples and their order are the same on any number of ranks and workers: worker `w` of `n` makes the batches
    `w`, `w + n`, and so on. With each batch comes what ``stream.state_dict()`` was after it. A loader reads ahead, so
    that the stream itself is further than the training.

    Args:
        stream: an iterable of samples. It may have ``state_dict`` and ``load_state_dict``, and ``set_epoch``.
        batch_size: samples in a batch, over all data ranks.
        dp_size: how many data ranks there are.
        drop_last: whether an incomplete batch at the end is left out.
        collate: makes a batch of a list of samples.
        epoch: for ``set_epoch``.
        state: where the pass begins, as ``state_dict`` gave it; None for the stream's beginning.
        skip: samples to read and leave out, of a stream without ``state_dict``.
    """

    def __init__(
        self,
        stream: Any,
        batch_size: int,
        *,
        dp_rank: int,
        dp_size: int,
        drop_last: bool,
        collate: Callable[[list[Any]], Any],
        epoch: int,
        state: Any,
        skip: int,
    ) -> None:
        self._stream = stream
        self._batch_size = batch_size
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._drop_last = drop_last
        self._collate = collate
        self._epoch, self._state, self._skip = epoch, state, skip

    def __iter__(self) -> Iterator[tuple[Any, int, Any]]:
        worker, workers = become_only_reader()
        stream = self._stream
        if hasattr(stream, "set_epoch"):
            stream.set_epoch(self._epoch)
        if self._state is not None:
            stream.load_state_dict(self._state)
        samples = iter(stream)
        for _ in islice(samples, self._skip):
            pass
        size, number = self._batch_size, 0
        while size == self._batch_size:
            read = list(islice(samples, self._batch_size))
            size = len(read)
            if not size or (size < self._batch_size and self._drop_last):
                return
            if number % workers == worker:
                yield self._collate(self._own(read)), size, self._place()
            number += 1

    def _own(self, samples: list[Any]) -> list[Any]:
        """This rank's samples of a batch; any one if it gets none, from which tensors of the right form are made."""
        first = sum(share(len(samples), rank, self._dp_size) for rank in range(self._dp_rank))
        return samples[first : first + share(len(samples), self._dp_rank, self._dp_size)] or samples[-1:]

    def _place(self) -> Any:
        return copy.deepcopy(self._stream.state_dict()) if is_stateful(self._stream) else None


def share(size: int, dp_rank: int, dp_size: int) -> int:
    """How many of a batch's `size` samples a data rank gets."""
    return size // dp_size + (dp_rank < size % dp_size)


def is_stateful(stream: Any) -> bool:
    """Whether `stream` says where it stands, and comes back to exactly there.

    The state of a Hugging Face stream does not hold the samples in its shuffle buffer: they would be lost. Such a
    stream is read again instead.
    """
    return hasattr(stream, "state_dict") and hasattr(stream, "load_state_dict") and not _forgets_a_buffer(stream)


def _forgets_a_buffer(stream: Any) -> bool:
    parts = [stream]
    for part in parts:
        if type(part).__name__ == "BufferShuffledExamplesIterable":
            return True
        held = vars(part) if hasattr(part, "__dict__") else {}
        parts += [held[name] for name in ("dataset", "_ex_iterable", "ex_iterable") if name in held]
        parts += held.get("ex_iterables") or []
    return False
