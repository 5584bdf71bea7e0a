"""The DataLoader of one rank. Its order does not depend on the plan, and it resumes where a checkpoint was saved."""

import copy
import difflib
import inspect
import math
from collections.abc import Callable, Iterator, MutableMapping
from itertools import accumulate, islice, pairwise
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate

from tensorshard.common.words import kind_of
from tensorshard.data import ShardedBatchSampler
from tensorshard.data.mixing import StreamReader, is_stateful
from tensorshard.data.sampler import Balance, TorchOrder, check_divides, shares
from tensorshard.model.batches import to_device
from tensorshard.model.whole_sequences import WholeSequences
from tensorshard.torch_private.process import become_only_reader
from tensorshard.torch_private.pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from tensorshard.torch_private.tensors import WeakIdKeyDictionary

# The batches of a stream for one data rank, each with the place in the stream that comes after it.


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


# Options that decide the order of the data. The Engine sets them, since it divides the data over the ranks.
_OURS = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")


class EngineLoader:
    """Batches of one data rank; a pass over it is one epoch. Made by ``engine.loader``.

    The first pass after a checkpoint was loaded is the rest of its epoch. If you break off a pass, the next one begins
    a new epoch, as with a DataLoader.

    Attributes:
        epoch: of the next batch, counted from 0.
        samples_consumed: how many samples of this epoch were handed out, over all data ranks.
        is_at_end: whether the batch that was handed out last is the epoch's last. False for a stream, of which that is
            not known.
        uneven: how many samples each data rank has of the batch that was handed out last, if these numbers differ, or
            it is an epoch's last, smaller one; None after its pass, and for other batches.

    Args:
        options: as for ``DataLoader``.
        sequences: cuts each sample's sequences over the ranks of context parallelism; None to leave them whole.
        balance: how samples are dealt by their `lengths`, if there are any.

    See :meth:`tensorshard.Engine.loader` for the others.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        dp_rank: int,
        dp_size: int,
        device: torch.device,
        shuffle: bool,
        drop_last: bool,
        seed: int,
        options: dict[str, Any],
        generator: torch.Generator | None = None,
        sequences: WholeSequences | None = None,
        lengths: Any = None,
        balance: Balance | None = None,
    ) -> None:
        _check(dataset, batch_size, options)
        check_divides(f"batch_size={batch_size}, of all data ranks together,", batch_size, dp_size)
        _check_lengths(lengths, dataset)
        if generator is not None:
            _check_generator(generator, shuffle)
        self.dataset = dataset
        self.batch_size = batch_size
        self._deal = None if lengths is None else _ByLength(lengths, balance or Balance(), dp_size)
        self.epoch = 0
        self.samples_consumed = 0
        self.uneven: tuple[int, ...] | None = None
        self.is_at_end = False
        # Of batches, by their tensors.
        self._shares: MutableMapping[torch.Tensor, tuple[int, ...]] = WeakIdKeyDictionary()
        self._is_stream = is_stream(dataset)
        self._place: Any = None  # of a stream, after the batch that was handed out last
        self._continues = False  # whether the next pass is the rest of an epoch
        self._device = device
        self._sequences = sequences
        self._cutter = None if sequences is None else sequences.cutter()
        if self._cutter is not None:
            options = {**options, "collate_fn": self._cutter}
        self._options = {"pin_memory": device.type == "cuda", **options}
        self._order: dict[str, Any] = {
            "dp_rank": dp_rank,
            "dp_size": dp_size,
            "seed": seed,
            "shuffle": shuffle,
            "drop_last": drop_last,
            "order": None if generator is None else TorchOrder(dataset, generator),
        }
        if self._is_stream:
            ShardedBatchSampler(batch_size, batch_size, dp_rank=dp_rank, dp_size=dp_size, seed=seed)  # checks them
            self._check_stream()
            return
        if not len(self._sampler()):  # it also checks all of these
            raise ValueError(
                f"engine.loader(drop_last=True) leaves out every batch: the {type(dataset).__name__} has "
                f"{len(dataset)} samples, fewer than batch_size={batch_size} (of all data ranks); "  # type: ignore[arg-type]
                f"give a batch_size of at most {len(dataset)}, or drop_last=False"  # type: ignore[arg-type]
            )
        self._batches()  # and this the options

    def __len__(self) -> int:
        """Batches in an epoch.

        Raises:
            TypeError: the dataset is a stream, whose length is not known.
        """
        if self._is_stream:
            raise TypeError("a loader of a stream has no length: how many samples come is known at the end")
        return len(self._sampler())

    def __iter__(self) -> Iterator[Any]:
        if self.samples_consumed and not self._continues:  # the last pass was broken off
            self._next_epoch()
        self._continues = False
        # A generator of its own: a DataLoader draws a number at each pass, and torch's global one is left to the user.
        generator = torch.Generator().manual_seed(self._order["seed"] + self.epoch)
        try:
            for loaded, shares, place in (self._stream_pass if self._is_stream else self._pass)(generator):
                batch, cuts = loaded if self._cutter is not None else (loaded, [])
                size = sum(shares)
                if 0 in shares:
                    batch = self._share_of_one_or_none(batch, shares)
                # Counted when it is handed out: a checkpoint that is saved during its step counts it as done.
                self.samples_consumed += size
                self._place = place
                self.is_at_end = not self._is_stream and self.samples_consumed >= self._samples_of_epoch()
                self.uneven = shares if size < self.batch_size or len(set(shares)) > 1 else None
                batch = to_device(batch, self._device)
                if cuts:
                    batch = self._looking_whole(batch, cuts)
                for tensor in _with_samples(batch):
                    self._shares[tensor] = shares
                yield batch
        finally:
            self.uneven, self.is_at_end = None, False
        self._next_epoch()

    def _samples_of_epoch(self) -> int:
        samples = len(self.dataset)  # type: ignore[arg-type]
        return samples - samples % self.batch_size if self._order["drop_last"] else samples

    def _looking_whole(self, batch: Any, cuts: list[Any]) -> Any:
        assert self._sequences is not None
        leaves, structure = tree_flatten(batch)
        joined = [
            leaf if place is None else self._sequences.joined(leaf, place, self._cutter)
            for leaf, place in zip(leaves, cuts, strict=True)
        ]
        return tree_unflatten(joined, structure)

    def _pass(self, generator: torch.Generator) -> Iterator[tuple[Any, tuple[int, ...], Any]]:
        """The batches to come of this epoch, how many samples of them each data rank has, and None."""
        sampler = self._sampler(self.samples_consumed)
        batches = self._batches(batch_sampler=_AtLeastOne(sampler), generator=generator)
        for batch, dealt in zip(batches, sampler.all_shares(), strict=False):
            yield batch, dealt, None

    def _stream_pass(self, generator: torch.Generator) -> Iterator[tuple[Any, tuple[int, ...], Any]]:
        """The batches to come of this epoch, how many samples of them each data rank has, and the stream's place after
        each."""
        options = dict(self._options)
        # With workers, each pass has a copy of the stream in any case.
        stream: Any = self.dataset if options.get("num_workers") else copy.deepcopy(self.dataset)
        dealt = DealtStream(
            stream,
            self.batch_size,
            dp_rank=self._order["dp_rank"],
            dp_size=self._order["dp_size"],
            drop_last=self._order["drop_last"],
            collate=options.pop("collate_fn", None) or default_collate,
            epoch=self.epoch,
            state=self._place,
            skip=0 if self._place is not None else self.samples_consumed,
            deal=self._deal,
        )
        yield from DataLoader(dealt, batch_size=None, collate_fn=_as_it_is, generator=generator, **options)

    def _check_stream(self) -> None:
        if self._order["shuffle"]:
            raise ValueError(
                f"the {type(self.dataset).__name__} is a stream, which engine.loader cannot shuffle: give "
                f"shuffle=False, and shuffle in the stream itself, the same on every rank (by set_epoch, if it has one)"
            )
        own_workers = getattr(self.dataset, "num_workers", 0) if isinstance(self.dataset, DataLoader) else 0
        if own_workers and self._options.get("num_workers"):
            raise ValueError(
                f"the {type(self.dataset).__name__} has {own_workers} worker processes, and engine.loader was given "
                f"num_workers={self._options['num_workers']}: a worker cannot have workers; give num_workers to one of "
                f"the two (in a config: train.num_workers=0)"
            )
        DataLoader(self.dataset, batch_size=None, **self._options)  # which checks the options
        if self._options.get("persistent_workers"):
            raise ValueError("persistent_workers=True keeps a stream's place between epochs; leave it out for a stream")
        if not self._options.get("num_workers"):
            try:
                copy.deepcopy(self.dataset)
            except Exception as error:
                raise TypeError(
                    f"each pass reads a copy of the {type(self.dataset).__name__}, which cannot be copied ({error}): "
                    f"open files and the like in __iter__, or give num_workers=1"
                ) from error

    def shares_of(self, batch: Any) -> tuple[int, ...] | None:
        """How many samples each data rank has of a `batch` that was handed out, at any time; None if it is not of this
        loader.

        It is known by its tensors: one of them is enough, the others may have been replaced.
        """
        tensors = list(_with_samples(batch))
        shares = next((self._shares[tensor] for tensor in tensors if tensor in self._shares), None)
        own = self._order["dp_rank"]
        return shares if shares is not None and all(len(tensor) == shares[own] for tensor in tensors) else None

    def _share_of_one_or_none(self, batch: Any, shares: tuple[int, ...]) -> Any:
        """A batch of one sample, or without its sample on the ranks that get none.

        Raises:
            TypeError: on every rank, since all have one sample: the samples are not the first dimension.
        """
        shapes = [tensor.shape for tensor in _with_samples(batch)]
        if not shapes or any(shape[0] != 1 for shape in shapes):
            held = " and ".join(str(list(shape)) for shape in shapes)
            held = f"tensors of shapes {held}" if shapes else f"{kind_of(batch)} without tensors"
            raise TypeError(
                f"the epoch's last batch has {sum(shares)} samples for {len(shares)} data ranks, so that some get "
                f"none, but collate_fn makes {held} of one sample, which cannot be cut to none: let the first "
                f"dimension of each tensor be the samples, or leave that batch out with engine.loader(drop_last=True)"
            )
        if shares[self._order["dp_rank"]]:
            return batch
        return tree_map(lambda leaf: leaf[:0] if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 else leaf, batch)

    def _next_epoch(self) -> None:
        self.epoch += 1
        self.samples_consumed = 0
        self._place = None

    def state_dict(self) -> dict[str, Any]:
        """The epoch and the samples consumed, which are the same on any number of ranks. Of a stream also its place."""
        place = {} if self._place is None else {"place": self._place}
        return {"epoch": self.epoch, "samples_consumed": self.samples_consumed, **place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Lets the next pass begin where :meth:`state_dict` was called."""
        self._place = state.get("place") if self._is_stream and is_stateful(self.dataset) else None
        self.epoch, self.samples_consumed = int(state["epoch"]), int(state["samples_consumed"])
        self._continues = True

    def _batches(self, **order: Any) -> DataLoader[Any]:
        return DataLoader(self.dataset, **order, **self._options)

    def _sampler(self, consumed: int = 0) -> ShardedBatchSampler:
        samples = len(self.dataset)  # type: ignore[arg-type]
        return ShardedBatchSampler(
            samples,
            self.batch_size,
            num_epochs=self.epoch + 1,
            samples_consumed=self.epoch * samples + consumed,
            empty_shares=True,
            deal=self._deal,
            **self._order,
        )


class EngineLoaders:
    """The loaders of an Engine by name, and the places that a checkpoint gave for those that are not made yet."""

    def __init__(self) -> None:
        self.by_name: dict[str, EngineLoader] = {}
        self._waiting: dict[str, dict[str, Any]] = {}

    def add(self, name: str, loader: EngineLoader) -> None:
        """Adds a loader, which goes on where the checkpoint that was loaded before says."""
        self.by_name[name] = loader
        if name in self._waiting:
            loader.load_state_dict(self._waiting.pop(name))

    def known(self, batch: Any) -> tuple[EngineLoader, tuple[int, ...]] | None:
        """Which loader handed out `batch`, and how many samples each data rank has; None for other batches."""
        pairs = ((loader, loader.shares_of(batch)) for loader in self.by_name.values())
        return next(((loader, shares) for loader, shares in pairs if shares is not None), None)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Where each loader stands."""
        return {name: loader.state_dict() for name, loader in self.by_name.items()}

    def load_state_dict(self, states: dict[str, dict[str, Any]]) -> None:
        """Puts each loader where it was at :meth:`state_dict`, those that are made later, too."""
        self._waiting = dict(states)
        for name, loader in self.by_name.items():
            if name in self._waiting:
                loader.load_state_dict(self._waiting.pop(name))


def _with_samples(batch: Any) -> Iterator[torch.Tensor]:
    """The tensors whose first dimension is the samples."""
    return (leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0)


class _ByLength:
    """Deals the samples of a batch to data ranks by their lengths.

    Args:
        lengths: of each sample of the dataset, or a function of a stream's sample.
    """

    def __init__(self, lengths: Any, balance: Balance, dp_size: int) -> None:
        self._lengths, self._balance, self._dp_size = lengths, balance, dp_size

    def __call__(self, samples: list[Any]) -> list[list[int]]:
        """Places in `samples`, indices or a stream's samples, for each rank."""
        of = self._lengths if callable(self._lengths) else self._lengths.__getitem__
        lengths = [float(of(sample)) for sample in samples]
        wrong = next((length for length in lengths if not 0 <= length < math.inf), None)
        if wrong is not None:
            raise ValueError(f"engine.loader was given a sample's length of {wrong}; lengths are finite, and 0 or more")
        return self._balance.deal(lengths, self._dp_size)


class _AtLeastOne(Sampler[list[int]]):
    """The batches of `sampler`. In place of an empty one there is any one sample, from which tensors of the right form
    can be made."""

    def __init__(self, sampler: ShardedBatchSampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        return (indices or [0] for indices in self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)


def is_stream(dataset: Any) -> bool:
    """Whether samples of `dataset` come one after the other, and have no index."""
    if isinstance(dataset, DataLoader):
        # torchdata's StatefulDataLoader, of samples. An order that each rank draws for itself is none.
        return hasattr(dataset, "load_state_dict") and dataset.batch_size is None and is_stream(dataset.dataset)
    return isinstance(dataset, IterableDataset) or (
        hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__") and is_stateful(dataset)
    )


def _as_it_is(batch: Any) -> Any:
    return batch


def _check_generator(generator: Any, shuffle: bool) -> None:
    if not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator is {generator!r}; it must be a torch.Generator in the same state on every rank, such as "
            f"torch.Generator().manual_seed(0)"
        )
    if not shuffle:
        raise ValueError(
            "a generator was given with shuffle=False, which keeps the dataset's order: give one of the two"
        )


def _check_lengths(lengths: Any, dataset: Any) -> None:
    if lengths is None:
        return
    if is_stream(dataset):
        if not callable(lengths):
            raise TypeError(
                f"lengths is {kind_of(lengths)}; for a stream it must be a function from a sample to its length, since "
                f"samples have no index"
            )
    elif not hasattr(lengths, "__getitem__") or not hasattr(lengths, "__len__"):
        raise TypeError(f"lengths is {kind_of(lengths)}; it must be a sequence of numbers, one for each sample")
    elif len(lengths) != len(dataset):
        raise ValueError(
            f"lengths has {len(lengths)} numbers for the {len(dataset)} samples of the {type(dataset).__name__}; it "
            f"must have one for each"
        )


def _check(dataset: Any, batch_size: Any, options: dict[str, Any]) -> None:
    has_index = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not has_index and not is_stream(dataset):
        raise TypeError(
            f"dataset is {kind_of(dataset)}; engine.loader deals samples to ranks by their index, so it needs "
            f"one with len(dataset) and dataset[index]; or a stream: a torch.utils.data.IterableDataset, or another "
            f"class with __iter__, state_dict and load_state_dict; or torchdata's StatefulDataLoader of a stream, with "
            f"batch_size=None"
        )
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise (ValueError if isinstance(batch_size, int) else TypeError)(
            f"batch_size is {batch_size!r}; it must be an integer of at least 1, the samples of all data ranks together"
        )
    if has_index and not is_stream(dataset) and not len(dataset):
        raise ValueError(f"the {type(dataset).__name__} has no samples; engine.loader needs at least one")
    known = inspect.signature(DataLoader).parameters
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f": {', '.join(known)}"
            raise TypeError(f"engine.loader was given {name!r}, which is not an option of torch's DataLoader{hint}")
    workers = options.get("num_workers", 0)
    if not isinstance(workers, int) or workers < 0:
        raise ValueError(f"num_workers is {workers!r}; it must be a number of processes, 0 to load in this one")
    for name in _OURS:
        if name in options:
            raise TypeError(
                f"engine.loader was given {name}, but it deals the samples to ranks in an order of its own; give "
                f"batch_size (of all data ranks), shuffle, drop_last and seed as its arguments, or make a "
                f"DataLoader of your own with engine.mesh.dp_rank and engine.mesh.dp_size"
            )
