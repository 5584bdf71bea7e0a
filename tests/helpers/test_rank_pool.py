import os

import pytest
import torch
import torch.distributed as dist

from rank_pool import RankError


def _sum_of_ranks() -> float:
    value = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(value)
    return value.item()


def _fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("the third wheel")
    dist.barrier()


def test_groups_of_several_sizes(ranks):
    assert ranks(2, _sum_of_ranks) == [1.0, 1.0]
    assert ranks(4, _sum_of_ranks) == [6.0] * 4


def _sees_gpus() -> tuple[str, bool]:
    return os.environ["CUDA_VISIBLE_DEVICES"], torch.cuda.is_available()


def test_ranks_see_no_gpus(ranks):
    assert ranks(2, _sees_gpus) == [("", False)] * 2


def test_a_failing_rank_is_reported(ranks):
    with pytest.raises(RankError, match="the third wheel"):
        ranks(2, _fail_on, 1)
    assert ranks(2, _sum_of_ranks) == [1.0, 1.0]
