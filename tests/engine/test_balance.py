"""Batches whose samples are dealt by length: the same losses, and ranks that finish together."""

from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

import seeds
import tensorshard as ts
from tensorshard.data.sampler import Balance
from tensorshard.models import GPT, next_token_loss

SGD = partial(torch.optim.SGD, lr=0.5)


def lognormal(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(5, 1, count).round().clip(2)


def conversations(count: int = 44) -> list[torch.Tensor]:
    generator = seeds.generator(2)
    lengths = (lognormal(count) ** 2 / 4000).clip(2, 31).astype(int).tolist()
    return [torch.randint(61, (length,), generator=generator) for length in lengths]


def padded_batch(samples: list[torch.Tensor]) -> Any:
    """A dict, padded to the longest of the samples."""
    longest = max(map(len, samples))
    full = torch.full((len(samples), longest), -100)
    for row, sample in zip(full, samples, strict=True):
        row[: len(sample)] = sample
    return {"tokens": full[:, :-1].clamp(min=0)}, full[:, 1:]


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self):
        yield from conversations()


def steps(fields: dict[str, Any], options: dict[str, Any], own_loop: bool = False) -> Any:
    seeds.seed(1)
    model = GPT(61, 32, 2, 2, 16).double()
    engine = ts.parallelize(model, ts.Plan(**fields), optimizer=SGD, loss_fn=next_token_loss)
    data: Any = conversations()
    if callable(options.get("lengths")):
        data, options = Stream(), {**options, "shuffle": False}
    elif "lengths" in options:
        options = {**options, "lengths": [len(sample) for sample in data]}
    loader = engine.loader(data, 16, collate_fn=padded_batch, **options)
    losses, shares = [], []
    for inputs, targets in loader:
        shares.append(len(targets))
        if own_loop:
            engine.backward(next_token_loss(engine.model(**inputs), targets))
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            losses.append(engine.mean(next_token_loss(engine.model(**inputs), targets)).item())
        else:
            losses.append(engine.step(inputs, targets).item())
    losses.append(engine.evaluate(loader).item())
    return losses, engine.full_state_dict(), shares


@pytest.mark.parametrize("by", ["lengths", "padded", "stream"])
@pytest.mark.parametrize(
    ("world", "fields"),
    [
        pytest.param(2, {"zero": 3}, id="zero3"),
        pytest.param(4, {"zero": 1}, id="zero1"),
        pytest.param(4, {"tp": 2, "zero": 2}, id="tp2"),
        pytest.param(4, {"pp": 2, "micro_batches": 2}, id="pp2"),
        pytest.param(4, {"cp": 2, "zero": 3}, id="cp2"),
        pytest.param(2, {"zero": 2, "micro_batches": 4, "recompute": "full"}, id="micro4"),
    ],
)
@pytest.mark.fast_cases("zero3-padded")
def test_dealing_by_length_changes_no_loss(ranks, world, fields, by):
    options = {"lengths": len if by == "stream" else True, "padded": by == "padded"}
    found = ranks(world, steps, fields, options)
    expected = ranks(1, steps, {}, {"shuffle": False} if by == "stream" else {})[0]
    torch.testing.assert_close(found[0][0], expected[0], rtol=1e-9, atol=1e-9)
    for name, value in expected[1].items():
        torch.testing.assert_close(found[0][1][name], value, rtol=1e-8, atol=1e-8, msg=name)
    shares = {tuple(rank[2]) for rank in found}  # of each data rank
    assert len(shares) > 1  # they differ


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 3])
def test_a_loop_of_ones_own_on_batches_dealt_by_length(ranks, zero):
    found = ranks(2, steps, {"zero": zero}, {"lengths": True}, True)
    expected = ranks(1, steps, {}, {}, True)[0]
    torch.testing.assert_close(found[0][0], expected[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("ranks_", [2, 8])
def test_ranks_wait_half_as_long(padded, ranks_):
    """64 samples on 2 or 8 ranks, whose lengths are drawn from a log-normal."""
    balance = Balance(padded)
    in_a_row = [list(range(part[0], part[-1] + 1)) for part in np.split(np.arange(64), ranks_)]
    before, after = [], []
    for seed in range(50):
        lengths = lognormal(64, seed)
        dealt = balance.deal(lengths, ranks_)
        assert sorted(chain(*dealt)) == list(range(64))
        before.append(balance.idle_share(lengths, in_a_row))
        after.append(balance.idle_share(lengths, dealt))
    assert np.mean(after) < np.mean(before) / 2


@pytest.mark.parametrize("padded", [False, True])
def test_each_rank_gets_the_least_number_of_samples(padded):
    for lengths in ([1000.0] + [1.0] * 11, [0.0] * 12, lognormal(12)):
        dealt = Balance(padded, least=3).deal(lengths, 4)
        assert [len(part) for part in dealt] == [3] * 4
        assert min(map(len, Balance(padded, least=2).deal(lengths, 4))) >= 2
        assert sorted(map(len, Balance(padded, least=2).deal(lengths[:3], 4))) == [0, 1, 1, 1]


def refusals() -> list[str]:
    engine = ts.parallelize(GPT(61, 32, 1, 2, 16), ts.Plan(), optimizer=SGD, loss_fn=next_token_loss)
    said = []
    for data, options in (
        (conversations(), {"lengths": [1, 2]}),
        (conversations(), {"lengths": len}),
        (Stream(), {"lengths": [1, 2], "shuffle": False}),
        (conversations(), {"padded": True}),
        (conversations(), {"lengths": [-1.0] * 44}),
    ):
        try:
            next(iter(engine.loader(data, 16, collate_fn=padded_batch, **options)))
        except (ValueError, TypeError) as error:
            said.append(str(error))
    return said


def test_lengths_that_are_none_are_refused(ranks):
    said = ranks(1, refusals)[0]
    parts = (
        "lengths has 2 numbers for the 44 samples of the list; it must have one for each",
        "it must be a sequence of numbers, one for each sample",
        "for a stream it must be a function from a sample to its length",
        "padded=True without lengths",
        "a sample's length of -1.0",
    )
    assert all(part in message for part, message in zip(parts, said, strict=True))


class TokensSeen:
    """How many samples and tokens there were, and the sum of their logits."""

    def reset(self) -> None:
        self.samples, self.tokens, self.total = 0, 0, 0.0

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        counts = targets != -100
        self.samples, self.tokens = self.samples + len(targets), self.tokens + int(counts.sum())
        self.total += outputs.gather(-1, targets.clamp(min=0)[..., None])[..., 0][counts].sum().item()

    def compute(self) -> list[float]:
        return [self.samples, self.tokens, self.total]


def measured(fields: dict[str, Any], padded: bool | None) -> list[float]:
    seeds.seed(1)
    model = GPT(61, 32, 2, 2, 16).double()
    engine = ts.parallelize(model, ts.Plan(**fields), optimizer=SGD, loss_fn=next_token_loss)
    lengths = {} if padded is None else {"lengths": list(map(len, conversations())), "padded": padded}
    loader = engine.loader(conversations(), 16, collate_fn=padded_batch, **lengths)
    return [*engine.evaluate(loader, metrics=TokensSeen()), engine.evaluate(loader).item()]


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("world", "fields"), [(2, dict(zero=3)), (4, dict(zero=1, micro_batches=2)), (4, dict(pp=2, micro_batches=2))]
)
def test_metrics_count_each_sample_once(ranks, world, fields, padded):
    expected = ranks(1, measured, {}, None)[0]
    torch.testing.assert_close(ranks(world, measured, fields, padded)[0], expected, rtol=1e-9, atol=1e-9)
