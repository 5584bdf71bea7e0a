"""Several datasets as one, in given shares.

Also here: streams that say where they stand, and those that must be read again.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from tensorshard.data.sampler import permute

_BLOCK = 1024  # choices that are drawn at once


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


def mix(datasets: Sequence[Any], weights: Sequence[float], *, seed: int = 0) -> "MixedDataset | MixedStream":
    """One dataset of several, whose samples come in the shares of `weights`.

    An epoch lasts until each dataset was read once. Those that are over before begin again. Datasets with a length make
    one with a length, which the loader shuffles; those of it that are read more than once differ by one reading at
    most. If one of them is a stream, the mixture is one: each sample's dataset is drawn, and a checkpoint holds the
    place in each.

    Args:
        datasets: with a length, or streams. Their samples must have one form.
        weights: of each dataset; only their ratios matter.
        seed: of the draws, and of the samples that are read once more.

    Raises:
        ValueError: no datasets, another number of weights, a weight that is not positive, an empty dataset.

    Examples:
        >>> mixed = ts.data.mix([["a", "b", "c", "d"], ["x"]], weights=[2, 1])
        >>> list(mixed)
        ['a', 'b', 'c', 'd', 'x', 'x']
    """
    if not datasets or len(datasets) != len(weights):
        raise ValueError(
            f"mix was given {len(datasets)} datasets and {len(weights)} weights; it needs at least one dataset, and a "
            f"weight for each"
        )
    wrong = next((weight for weight in weights if not 0 < weight < math.inf), None)
    if wrong is not None:
        raise ValueError(f"a weight is {wrong!r}; weights are finite, and above 0: leave out what is not to be read")
    shares = np.asarray(weights, dtype=np.float64) / sum(weights)
    if all(hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") for dataset in datasets):
        return MixedDataset(datasets, shares, seed)
    return MixedStream(datasets, shares, seed)


class MixedDataset(Dataset[Any]):
    """Samples of several datasets, one dataset after the other. Made by :func:`mix`."""

    def __init__(self, datasets: Sequence[Any], shares: np.ndarray, seed: int) -> None:
        self.datasets = list(datasets)
        self._seed = seed
        lengths = np.array([len(dataset) for dataset in datasets])
        if not lengths.all():
            raise ValueError(f"dataset {lengths.tolist().index(0)} has no samples; leave it out")
        total = float((lengths / shares).max())
        counts = np.maximum(lengths, np.rint(total * shares).astype(np.int64))
        self._ends = np.cumsum(counts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a dataset of {len(self)}")
        number = int(np.searchsorted(self._ends, index, side="right"))
        dataset = self.datasets[number]
        place = index - (int(self._ends[number - 1]) if number else 0)
        passes, place = divmod(place, len(dataset))
        # The last pass may be incomplete: a random part of the samples, not the first ones.
        return dataset[
            int(permute(np.array([place]), len(dataset), seed=self._seed, epoch=passes)[0]) if passes else place
        ]


class MixedStream(IterableDataset[Any]):
    """Samples of several datasets, each from a dataset that is drawn. Made by :func:`mix`."""

    def __init__(self, datasets: Sequence[Any], shares: np.ndarray, seed: int) -> None:
        self.datasets = list(datasets)
        self._bounds = np.cumsum(shares)[:-1]
        self._seed = seed
        self._epoch = 0
        self._state: dict[str, Any] | None = None
        self._readers: list[StreamReader] = []

    def set_epoch(self, epoch: int) -> None:
        """Chooses the draws of an epoch, and passes it on to streams that take one."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        state, self._state = self._state, None
        number = len(self.datasets)
        self._count = 0 if state is None else int(state["count"])
        self._passes: list[int] = [0] * number if state is None else list(state["passes"])
        places: list[Any] = [None] * number if state is None else state["places"]
        self._readers = [self._reader(index, places[index]) for index in range(number)]
        block = -1
        while True:
            if self._count // _BLOCK != block:
                block = self._count // _BLOCK
                drawn = np.random.default_rng((self._seed, self._epoch, block)).random(_BLOCK)
                choices = np.searchsorted(self._bounds, drawn, side="right")
            chosen = int(choices[self._count % _BLOCK])
            try:
                sample = next(self._readers[chosen])
            except StopIteration:
                self._passes[chosen] += 1
                if all(self._passes):
                    return
                self._readers[chosen] = self._reader(chosen, None)
                try:
                    sample = next(self._readers[chosen])
                except StopIteration:
                    raise ValueError(f"dataset {chosen} of the mixture has no samples; leave it out") from None
            self._count += 1
            yield sample

    def _reader(self, index: int, place: Any) -> StreamReader:
        return StreamReader(self.datasets[index], self._epoch + self._passes[index], place)

    def state_dict(self) -> dict[str, Any]:
        """How many samples were drawn, and the pass and the place of each dataset."""
        if self._state is not None or not self._readers:
            return self._state or {}
        places = [reader.state() for reader in self._readers]
        return {"count": self._count, "passes": list(self._passes), "places": places}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Lets the next pass go on where :meth:`state_dict` was called."""
        self._state = state or None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_readers": []}  # a copy begins anew
