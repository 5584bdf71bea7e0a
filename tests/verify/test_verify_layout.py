"""`verify_layout`: FSDP2, DDP and layouts by hand, right ones and wrong ones."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tensorshard as ts
from tensorshard.trainer.launch.launch_errors import RankFailedError
from tensorshard.verify.culprit import nearest

Layout = Callable[[], tuple[nn.Module, Callable[[int], Any]]]


def _batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 8, generator=generator), torch.randint(0, 4, (8,), generator=generator)


def layout(wrap: str = "", fault: str = "") -> Layout:
    def build() -> tuple[nn.Module, Callable[[int], Any]]:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if wrap == "fsdp":
            for part in (model[0], model[2]):  # type: ignore[index]
                fully_shard(part)
            fully_shard(model)
        elif wrap == "ddp":
            model = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)

        def step(number: int) -> torch.Tensor:
            inputs, targets = _batch(number)
            rank_of_data = 0 if fault == "same samples" else rank
            loss = F.cross_entropy(model(inputs[rank_of_data::size]), targets[rank_of_data::size])
            (loss * (size if fault == "summed" else 1)).backward()
            if fault != "not clipped":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return model, step

    return build


@pytest.mark.slow_cases("fsdp")
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_right_layouts(wrap):
    found = ts.verify_layout(layout(), layout(wrap), ranks=2)

    assert found, found.describe()
    assert found.comparison.counts["norm"] == 6 and found.comparison.counts["state"] == 48


@pytest.mark.slow_cases("ddp-same samples-other samples", "ddp-not clipped-norm")
@pytest.mark.parametrize(
    ("wrap", "fault", "kind"),
    [
        pytest.param("", "", "not reduced", id="nothing reduced"),
        pytest.param("ddp", "summed", "scaled", id="ddp-summed-scaled"),
        pytest.param("ddp", "same samples", "other samples", id="ddp-same samples-other samples"),
        pytest.param("ddp", "not clipped", "norm", id="ddp-not clipped-norm"),
    ],
)
def test_wrong_layouts(wrap, fault, kind):
    found = ts.verify_layout(layout(), layout(wrap, fault), ranks=2)

    assert not found
    assert found.culprit is not None and found.culprit.kind == kind, found.describe()


def _padded(ranks_count_for_themselves: bool = False) -> Layout:
    """Samples that begin with the same token, and of whose targets some are ignored."""

    def build() -> tuple[nn.Module, Callable[[int], Any]]:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 8))
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        whole = DistributedDataParallel(model) if size > 1 else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(number: int) -> torch.Tensor:
            generator = torch.Generator().manual_seed(number)
            tokens = torch.randint(0, 8, (4, 6), generator=generator)
            tokens[:, 0] = 1
            targets = tokens.roll(-1, 1)
            targets[0, 2:] = targets[1] = targets[2, :3] = -100  # the first two samples count less than the others
            own = slice(rank * 4 // size, (rank + 1) * 4 // size)
            count = (targets != -100).sum() / size
            if ranks_count_for_themselves:
                count = (targets[own] != -100).sum()
            logits = whole(tokens[own]).flatten(0, 1)
            loss = F.cross_entropy(logits, targets[own].flatten(), reduction="sum") / count
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return model, step

    return build


def test_counts_of_samples_that_begin_alike():
    found = ts.verify_layout(_padded(), _padded(ranks_count_for_themselves=True), ranks=2)

    assert not found
    assert found.culprit is not None and found.culprit.kind == "counts", found.describe()
    assert ts.verify_layout(_padded(), _padded(), ranks=2)


def _halves() -> Layout:
    """A layer whose columns two ranks share, written by hand."""

    def build() -> tuple[nn.Module, Callable[[int], Any]]:
        torch.manual_seed(0)
        whole = nn.Linear(8, 4)
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        model = nn.Linear(8, 4 // size)
        with torch.no_grad():
            model.weight.copy_(whole.weight.chunk(size)[rank])
            model.bias.copy_(whole.bias.chunk(size)[rank])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(number: int) -> None:
            model(_batch(number)[0]).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, step

    return build


def _gather(_: str, part: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts)


def test_parts_that_a_function_gathers():
    layer = _halves()

    assert ts.verify_layout(layer, layer, ranks=2, gather=_gather)
    said = r"'weight' has the shape \[2, 8\] on rank \d and \[4, 8\] in the reference"
    with pytest.raises(RankFailedError, match=said):
        ts.verify_layout(layer, layer, ranks=2)


def test_wrong_arguments():
    with pytest.raises(TypeError, match="parallel is a Linear; it must be a function without arguments"):
        ts.verify_layout(layout(), nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ranks is 0; it must be a number from 1 on"):
        ts.verify_layout(layout(), layout(), ranks=0)
    with pytest.raises(RankFailedError, match=r"returned a Linear; it must return \(model, step\)"):
        ts.verify_layout(partial(nn.Linear, 2, 2), layout())  # type: ignore[arg-type]


def test_parts_of_a_tensor():
    whole = torch.randn(4, 6, 3)

    assert nearest(whole[[2, 0]], whole) == 0
    assert nearest(whole[:, 2:4], whole) == 0
    assert nearest(whole[:, [1, 4]], whole) == 0
    assert nearest(whole[:, [0, 5]], whole) == 0
    assert nearest(whole[:, :, 1:], whole) == 0
    assert nearest(whole[:, 2:4] + 1, whole) > 0.1
    assert nearest(torch.randn(5), whole) is None
