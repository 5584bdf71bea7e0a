"""Fixtures that every test may use."""

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from bounds import record_comparisons
from rank_pool import RankPool

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
record_comparisons()


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """``ranks(world_size, function, *args)``: runs `function` on CPU ranks and returns what each returned."""
    pool = RankPool()
    yield pool
    pool.close()
