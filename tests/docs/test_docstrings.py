"""The public names of ``tensorshard`` say what they raise, and the examples in their docstrings run."""

import contextlib
import doctest
import functools
import inspect
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

import tensorshard as ts

_NAMES = [name for name in ts.__all__ if not isinstance(getattr(ts, name), ModuleType)]
# What is returned by what has an example, or is one line.
_WITHOUT_EXAMPLE = {"Estimate", "FoundPlan", "PlanSearch", "get_parallel_dim"}
_ELSEWHERE = {"estimate", "find_plans"}  # they are about a world that is not there


@pytest.mark.parametrize("name", _NAMES)
def test_what_is_called_says_what_it_takes_and_raises(name):
    words = inspect.getdoc(getattr(ts, name))
    assert words is not None and ("Examples:" in words) == (name not in _WITHOUT_EXAMPLE)
    called = inspect.isfunction(getattr(ts, name))
    if called and name not in ("get_parallel_dim", "profile_memory", "collect_state_dict"):
        assert "Raises:" in words


def _run(name: str, folder: Path) -> str:
    """What differs from the example of `name`; "" if nothing does."""
    if name in _ELSEWHERE:
        dist.destroy_process_group()
    torch.manual_seed(0)
    names = {"ts": ts, "torch": torch, "functools": functools}
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    example = doctest.DocTestParser().get_doctest(inspect.getdoc(getattr(ts, name)) or "", names, name, name, 0)
    with contextlib.chdir(folder):
        runner.run(example, out=said.append)
    return "".join(said)


@pytest.mark.parametrize("name", [name for name in _NAMES if name not in _WITHOUT_EXAMPLE])
def test_the_example_runs(ranks, tmp_path, name):
    assert ranks(1, _run, name, tmp_path) == [""]
