"""Ranks that do different things: each told in a sentence, at once or when the timeout is over."""

import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tensorshard as ts
from tensorshard.models import GPT, next_token_loss
from tensorshard.torch_private.process_groups import set_group_timeout
from wrong_inputs import Case, Said, assert_refused, said, say_all

TOKENS = torch.arange(16).view(4, 4) % 11
SECONDS = 1.0


def _build(width: int = 16) -> nn.Module:
    return GPT(11, 8, 1, 2, width)


def _engine(build: Any = _build, rate: float = 0.1, seed: int = 0, **fields: Any) -> ts.Engine:
    return ts.parallelize(
        build,
        ts.Plan(**fields),
        optimizer=partial(torch.optim.SGD, lr=rate),
        loss_fn=next_token_loss,
        seed=seed,
        timeout=SECONDS,
    )


class Rank:
    """One of two, and a folder for both."""

    def __init__(self, folder: Path) -> None:
        self.number = dist.get_rank()
        self.folder = folder

    def fails(self, path: Path) -> Path:
        """`path`, and on rank 1 one that cannot be."""
        (self.folder / "file").write_text("")
        return path if self.number == 0 else self.folder / "file" / "x"


# what is refused at once, on both ranks
AT_ONCE: dict[str, Case] = {
    "different plans": (lambda r: _engine(zero=1 + r.number), "different plans", "rank 1", "zero"),
    "different degrees": (
        lambda r: _engine(tp=1 + r.number), "different plans", "dp_shard is 2 on rank 0 and 1 on rank 1"
    ),
    "models of different sizes": (
        lambda r: _engine(lambda: _build(16 + 16 * r.number)), "different models", "(11, 32)"
    ),
    "models of different classes": (
        lambda r: _engine(_build if r.number else lambda: nn.Linear(3, 3)), "different models", "GPT", "Linear"
    ),
    "different seeds": (lambda r: _engine(seed=r.number), "different seeds", "0 on rank 0 and 1 on rank 1"),
    "different learning rates": (lambda r: _engine(rate=0.1 + r.number), "different optimizers", "0.1", "1.1"),
    "different batches along tp": (
        lambda r: _engine(tp=2).step(TOKENS + r.number, TOKENS), "different batches", "engine.mesh.dp_rank"
    ),
    "different lengths along tp": (
        lambda r: _engine(tp=2).step(TOKENS[:, : 4 - r.number], TOKENS[:, : 4 - r.number]), "[4, 4] and [4, 3]"
    ),
    "a folder that one rank cannot read": (lambda r: _engine().load(r.fails(r.folder)), "not a checkpoint"),
    "prompts of different lengths along tp": (
        lambda r: _engine(tp=2).generate(TOKENS[:, : 2 + r.number], max_new_tokens=2), "different batches"
    ),
}  # fmt: skip


def _say_all(folder: Path) -> dict[str, Said]:
    return say_all(AT_ONCE, Rank(folder))


@pytest.fixture(scope="module")
def found(ranks, tmp_path_factory) -> list[dict[str, Said]]:
    return ranks(2, _say_all, tmp_path_factory.mktemp("wrong"))


@pytest.mark.parametrize("what", AT_ONCE)
def test_ranks_that_differ(found, what):
    for by_rank in found:
        assert_refused(what, by_rank[what], AT_ONCE[what])


def _one_fails(rank: Rank) -> None:
    engine = _engine()
    if rank.number == 1:
        raise ZeroDivisionError("made by the test")
    engine.step(TOKENS, TOKENS)


def _out_of_step(rank: Rank) -> None:
    engine = _engine(zero=1)
    (engine.step if rank.number == 0 else engine.evaluate)(TOKENS, TOKENS)
    engine.full_state_dict()


def _one_parallelizes(rank: Rank) -> None:
    if rank.number == 0:
        _engine()


# what rank 0 says when the timeout is over
IN_TIME: dict[str, Case] = {
    "parallelize on one rank": (_one_parallelizes, "parallelize is a collective"),
    "a step after the other rank failed": (_one_fails, "engine.step", "has failed"),
    "one steps, one evaluates": (_out_of_step, "could not finish", "the same calls"),
}


def _say_in_time(what: str, folder: Path) -> tuple[Said, float]:
    set_group_timeout(dist.group.WORLD, timedelta(seconds=SECONDS))  # the fixture's own world
    started = time.monotonic()
    found = said(IN_TIME[what][0], Rank(folder))
    time.sleep(2 * SECONDS * dist.get_rank())  # the other one is still there
    return found, time.monotonic() - started


@pytest.mark.parametrize("what", IN_TIME)
def test_ranks_out_of_step(ranks, what, tmp_path):
    (first, seconds), _ = ranks(2, _say_in_time, what, tmp_path)
    assert_refused(what, first, IN_TIME[what])
    assert seconds < 60
