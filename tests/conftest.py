"""Fixtures that every test may use."""

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from rank_pool import RankPool

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """``ranks(world_size, function, *args)``: runs `function` on CPU ranks and returns what each returned."""
    pool = RankPool()
    yield pool
    pool.close()
