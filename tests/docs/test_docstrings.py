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

_MODULES = {
    "": ts,
    "nn.": ts.nn,
    "nn.functional.": ts.nn.functional,
    "nn.init.": ts.nn.init,
    "distributed.": ts.distributed,
    "utils.data.": ts.utils.data,
}
_PUBLIC = {
    prefix + name: getattr(module, name)
    for prefix, module in _MODULES.items()
    for name in module.__all__
    if not isinstance(getattr(module, name), ModuleType)
}
_PUBLIC |= {"data.pack": ts.data.pack, "data.mix": ts.data.mix}
_PUBLIC["nn.ParallelLinear.convert_parallel_linear"] = ts.nn.ParallelLinear.convert_parallel_linear
# What is returned by what has an example, is an error, or is one line.
_WITHOUT_EXAMPLE = {
    "Estimate",
    "FoundPlan",
    "PlanSearch",
    "Swaps",
    "Verification",
    "distributed.CollectiveMismatchError",
    "get_parallel_dim",
}
_RAISE_NOTHING = {"distributed.destroy_process_group", "distributed.is_initialized", "get_parallel_dim"}
_ELSEWHERE = {"estimate", "find_plans"}  # they are about a world that is not there
_STARTS_RANKS = {"verify", "verify_layout"}


@pytest.mark.parametrize("name", _PUBLIC)
def test_what_is_called_says_what_it_takes_and_raises(name):
    words = inspect.getdoc(_PUBLIC[name])
    assert words is not None and ("Examples:" in words) == (name not in _WITHOUT_EXAMPLE)
    called = inspect.isfunction(_PUBLIC[name])
    if called and name not in _RAISE_NOTHING | {"profile_memory"}:
        assert "Raises:" in words


def _run(name: str, folder: Path) -> str:
    """What differs from the example of `name`; "" if nothing does."""
    if name in _ELSEWHERE:
        dist.destroy_process_group()
    torch.manual_seed(0)
    names = {"ts": ts, "torch": torch, "functools": functools}
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    example = doctest.DocTestParser().get_doctest(inspect.getdoc(_PUBLIC[name]) or "", names, name, name, 0)
    with contextlib.chdir(folder):
        runner.run(example, out=said.append)
    return "".join(said)


@pytest.mark.parametrize("name", [name for name in _PUBLIC if name not in _WITHOUT_EXAMPLE])
def test_the_example_runs(ranks, tmp_path, name):
    if name in _STARTS_RANKS:
        assert _run(name, tmp_path) == ""
        return
    processes = 2 if "# on two ranks" in (inspect.getdoc(_PUBLIC[name]) or "") else 1
    assert ranks(processes, _run, name, tmp_path) == [""] * processes
