"""The batches of a stream for one data rank, each with the place in the stream that comes after it."""

from collections.abc import Callable, Iterator
from itertools import accumulate, islice, pairwise
from typing import Any

from torch.utils.data import IterableDataset

from tensorshard.data.sampler import shares
from tensorshard.data.streams import StreamReader
from tensorshard.torch_private.data_workers import become_only_reader


class DealtStream(IterableDataset[tuple[Any, tuple[int, ...], Any]]):
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
        deal: which of a batch's samples each data rank gets, from the samples; None for contiguous shares.
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
        deal: Callable[[list[Any]], list[list[int]]] | None = None,
    ) -> None:
        self._stream = stream
        self._batch_size = batch_size
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._drop_last = drop_last
        self._collate = collate
        self._epoch, self._state, self._skip = epoch, state, skip
        self._deal = deal or self._in_a_row

    def __iter__(self) -> Iterator[tuple[Any, tuple[int, ...], Any]]:
        worker, workers = become_only_reader()
        begin = {"read": self._skip, "is_over": False, "place": self._state}
        samples = StreamReader(self._stream, self._epoch, begin)
        size, number = self._batch_size, 0
        while size == self._batch_size:
            read = list(islice(samples, self._batch_size))
            size = len(read)
            if not size or (size < self._batch_size and self._drop_last):
                return
            if number % workers == worker:
                dealt = self._deal(read)
                # Any one if this rank gets none, from which tensors of the right form are made.
                own = [read[place] for place in dealt[self._dp_rank]] or read[-1:]
                yield self._collate(own), tuple(map(len, dealt)), samples.state()["place"]
            number += 1

    def _in_a_row(self, samples: list[Any]) -> list[list[int]]:
        ends = list(accumulate(shares(len(samples), self._dp_size), initial=0))
        return [list(range(first, end)) for first, end in pairwise(ends)]
