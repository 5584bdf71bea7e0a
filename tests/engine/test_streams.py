"""Streams: the same samples in the same order on any number of ranks and workers, also after a checkpoint."""

import multiprocessing
from collections.abc import Iterator
from functools import partial
from multiprocessing import Barrier
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, get_worker_info

import tensorshard as ts
from rank_pool import RankPool
from tensorshard.engine.loader import EngineLoader

SAMPLES, BATCH = 22, 4


class Numbers(IterableDataset[float]):
    """Numbers by epoch. It shards itself over the workers, as streams do."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[float]:
        info = get_worker_info()
        return iter(range(0 if info is None else info.id, SAMPLES, 1 if info is None else info.num_workers))


class Stateful(Numbers):
    """Some of its samples depend on those before them."""

    def __init__(self) -> None:
        super().__init__()
        self.next, self.total = 0, 0

    def __iter__(self) -> Iterator[float]:
        assert get_worker_info() is None
        while self.next < SAMPLES:
            self.total += self.next
            self.next += 1
            yield 1000.0 * self.epoch + self.total

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next, self.total = state["next"], state["total"]


class SharedEpoch(Numbers):
    """Its workers share its epoch, as those of a Hugging Face stream do, and here both always add at once."""

    def __init__(self) -> None:
        super().__init__()
        self._epoch = torch.tensor(0).share_memory_()
        self._both = Barrier(2)

    def set_epoch(self, epoch: int) -> None:
        change = epoch - self._epoch
        if multiprocessing.parent_process() is not None:
            self._both.wait(60)
        self._epoch += change

    def __iter__(self) -> Iterator[float]:
        return iter([float(self._epoch)] * 2 * BATCH)


def _loader(stream: Any, rank: int = 0, size: int = 1, workers: int = 0, **changes: Any) -> EngineLoader:
    options = {"num_workers": workers, **changes}
    order = {"shuffle": False, "drop_last": False, "seed": 0}
    order |= {name: options.pop(name) for name in list(order) if name in options}
    cpu = torch.device("cpu")
    return EngineLoader(stream, BATCH, dp_rank=rank, dp_size=size, device=cpu, options=options, **order)


def _taken(loader: EngineLoader, batches: int) -> list[list[float]]:
    """The next batches, of several epochs if there are fewer in one."""
    found: list[list[float]] = []
    while len(found) < batches:
        for batch in loader:
            found.append(batch.tolist())
            if len(found) == batches:
                break
    return found


@pytest.mark.slow_cases("2-Stateful")
@pytest.mark.parametrize("kind", [Numbers, Stateful])
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_resumed_stream_repeats_and_drops_nothing(kind: type[Numbers], workers: int) -> None:
    whole = _taken(_loader(kind()), 14)
    assert [len(batch) for batch in whole] == [4, 4, 4, 4, 4, 2] * 2 + [4, 4]
    found: list[list[float]] = []
    state = None
    for batches in (2, 1, 5, 3, 3):  # the fourth begins in the second epoch
        loader = _loader(kind(), workers=workers)
        if state is not None:
            loader.load_state_dict(state)
            assert loader.state_dict() == state
        found += _taken(loader, batches)
        state = loader.state_dict()
    assert found == whole


@pytest.mark.slow_cases("False")
@pytest.mark.parametrize("mixed", [False, True])
def test_workers_that_share_an_epoch_read_the_same_one(mixed: bool) -> None:
    stream = ts.data.mix([SharedEpoch()], [1.0]) if mixed else SharedEpoch()
    epochs = [batch[0] for batch in _taken(_loader(stream, workers=2), 6)]
    assert epochs == [0, 0, 1, 1, 2, 2]


def test_ranks_take_shares_of_the_same_batches() -> None:
    whole = _taken(_loader(Stateful()), 7)
    first, second = (_taken(_loader(Stateful(), rank, 2), 7) for rank in range(2))
    assert [one + two for one, two in zip(first, second, strict=True)] == whole
    dropped = _taken(_loader(Stateful(), drop_last=True), 6)
    assert len(dropped[4]) == len(dropped[5]) == 4 and dropped[5][0] == 1000.0


def test_what_a_stream_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Numbers is a stream.*shuffle=False"):
        _loader(Numbers(), shuffle=True)
    with pytest.raises(TypeError, match="has no length"):
        len(_loader(Numbers()))
    held = Numbers()
    held.file = iter([open(__file__)])  # type: ignore[attr-defined]  # noqa: SIM115
    held.file2 = open(__file__)  # type: ignore[attr-defined]  # noqa: SIM115
    with pytest.raises(TypeError, match="Numbers, which cannot be copied"):
        _loader(held)


class _Pairs(Stateful):
    def __iter__(self) -> Iterator[Any]:
        return ((torch.full((3,), value / 100), torch.ones(1)) for value in super().__iter__())


def _losses(path: Path, load: bool, batches: int) -> list[float]:
    adam = partial(torch.optim.AdamW, lr=0.01)
    engine = ts.parallelize(partial(nn.Linear, 3, 1), ts.Plan(zero=1), optimizer=adam, loss_fn=nn.functional.mse_loss)
    loader = engine.loader(_Pairs(), BATCH, shuffle=False)
    if load:
        engine.load(path)
    found: list[float] = []
    while len(found) < batches:
        for inputs, targets in loader:
            found.append(engine.step(inputs, targets).item())
            if len(found) == 3 and not load:
                engine.save(path)
            if len(found) == batches:
                break
    return found


def test_a_checkpoint_holds_the_place_of_a_stream(ranks: RankPool, tmp_path: Path) -> None:
    undisturbed = ranks(2, _losses, tmp_path / "saved", False, 9)[0]
    assert ranks(1, _losses, tmp_path / "saved", True, 6)[0] == pytest.approx(undisturbed[3:], rel=1e-5)


@pytest.mark.slow
def test_workers_that_are_spawned_read_the_same() -> None:
    spawned = _loader(Stateful(), workers=1, multiprocessing_context="spawn")
    assert _taken(spawned, 4) == _taken(_loader(Stateful()), 4)
