"""Fixtures that every test may use."""

import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TENSORSHARD_CACHE"] = "off"  # tests neither read nor write what the user keeps
os.environ.setdefault("TENSORSHARD_PROCESS_SETTINGS", "1")  # as workers have it, since ranks share two cores
os.environ.setdefault("TENSORSHARD_DEBUG_WEIGHTS", "1")  # weights are NaN until they have arrived

import pytest
import torch
import torch.distributed as dist

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


@pytest.fixture(autouse=True)
def no_world_is_left() -> Iterator[None]:
    """Fails a test that joins a world in the process that runs the tests, and ends it for those that follow."""
    joined_before = dist.is_initialized()
    yield
    if dist.is_initialized() and not joined_before:
        dist.destroy_process_group()
        pytest.fail("the test left a process group in the process of the tests; run it by ranks(1, ...)")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what ``slow_cases.txt`` lists, before slow tests are left out."""
    lines = (Path(__file__).parent / "slow_cases.txt").read_text().splitlines()
    listed = {line for line in lines if line and not line.startswith("#")}
    found = set()
    for item in items:
        if item.nodeid in listed:
            found.add(item.nodeid)
            item.add_marker(pytest.mark.slow)
    whole = {item.nodeid.partition("::")[0] for item in items}
    unknown = sorted(line for line in listed - found if line.partition("::")[0] in whole)
    if unknown and not any("::" in argument for argument in config.args) and not config.option.keyword:
        raise pytest.UsageError(f"tests/slow_cases.txt lists cases that do not exist: {', '.join(unknown)}")
