"""Several datasets as one, in given shares."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset, IterableDataset

from tensorshard.data.sampler import permute
from tensorshard.data.streams import StreamReader

_BLOCK = 1024  # choices that are drawn at once


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
