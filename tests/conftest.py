"""Fixtures that every test may use."""

import gc
import os
import time
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TENSORSHARD_CACHE"] = "off"  # tests neither read nor write what the user keeps
os.environ.setdefault("TENSORSHARD_PROCESS_SETTINGS", "1")  # as workers have it, since ranks share two cores
os.environ.setdefault("TENSORSHARD_DEBUG_WEIGHTS", "1")  # weights are NaN until they have arrived

import pytest
import torch
import torch.distributed as dist
from _pytest.mark.expression import Expression

from bounds import record_comparisons
from rank_pool import RankPool

# On a machine that is too slow for all of them, CI runs the slow tests that fit into its time, others on each commit.
_UNTIL = float(os.environ.get("TENSORSHARD_TESTS_UNTIL", "inf"))  # seconds since the epoch
_FROM = float(os.environ.get("TENSORSHARD_TESTS_FROM", "0"))  # where in their order the tests begin, from 0 to 1

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
record_comparisons()
_POOL = RankPool()  # given the environment before a test changes it


def pytest_configure(config: pytest.Config) -> None:
    """Hides GPUs from all tests and their ranks, unless -m asks for tests that are marked gpu. On a machine that has
    some, the others would take them, and there are tests with more ranks than it has GPUs."""
    if not asks_for_gpus(config.option.markexpr):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    _POOL.note_environment()


def asks_for_gpus(expression: str) -> bool:
    """Whether an expression of -m takes tests because they are marked gpu."""
    if not expression:
        return False
    compiled = Expression.compile(expression)

    def takes(*marks: str) -> bool:
        return compiled.evaluate(lambda name, **_: name in marks)

    return any(takes("gpu", *others) and not takes(*others) for others in ((), ("slow",)))


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """``ranks(world_size, function, *args)``: runs `function` on CPU ranks and returns what each returned."""
    yield _POOL
    _POOL.close()


@pytest.fixture(autouse=True)
def no_world_is_left() -> Iterator[None]:
    """Fails a test that joins a world in the process that runs the tests, and ends it for those that follow."""
    joined_before = dist.is_initialized()
    yield
    if dist.is_initialized() and not joined_before:
        dist.destroy_process_group()
        pytest.fail("the test left a process group in the process of the tests; run it by ranks(1, ...)")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > _UNTIL and item.get_closest_marker("slow") is not None:
        pytest.skip("the time for slow tests is over; the next commit begins with others")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the slow cases of parametrized tests, before slow tests are left out.

    With ``slow_cases`` or ``fast_cases``, a test says itself which they are: by the whole id of a case, or by the id of
    one of its values, which names all cases with that value. Of the cases of another test on several ranks, the
    first is fast, and each eighth after it.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    selected = any("::" in argument for argument in config.args)  # then not every case of a test may be here
    for test, of_test in cases.items():
        for mark in ("slow_cases", "fast_cases"):
            marker = of_test[0].get_closest_marker(mark)
            if marker is None:
                continue
            named = {item for name in marker.args for item in _cases_named(name, of_test, test, selected)}
            for item in of_test:
                if (item in named) == (mark == "slow_cases"):
                    item.add_marker(pytest.mark.slow)
        own_choice = of_test[0].get_closest_marker("fast_cases") is not None
        if not (own_choice or selected) and "ranks" in getattr(of_test[0], "fixturenames", ()):
            fast = [item for item in of_test if item.get_closest_marker("slow") is None]
            kept = set(fast[:: max(8, len(fast) // 8)])
            for item in fast:
                if item not in kept:
                    item.add_marker(pytest.mark.slow)
    first = int(_FROM * len(items))
    items[:] = items[first:] + items[:first]


def pytest_collection_finish() -> None:
    """What was imported and collected stays, and need not be searched for garbage."""
    gc.collect()
    gc.freeze()


def _cases_named(name: str, cases: list[pytest.Item], test: str, selected: bool) -> list[pytest.Item]:
    ids = {item: item.nodeid.partition("[")[2][:-1] for item in cases}
    named = [item for item in cases if ids[item] == name] or [item for item in cases if f"-{name}-" in f"-{ids[item]}-"]
    if not named and not selected:
        raise pytest.UsageError(f"{test} names the case {name!r}, which it does not have: {', '.join(ids.values())}")
    return named
