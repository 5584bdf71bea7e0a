"""A search over a part of the space never finds a better plan than the search over the whole space."""

import os
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tensorshard.models import GPT, next_token_loss
from tensorshard.predict.estimate import Estimate
from tensorshard.predict.search.problem import SearchProblem, make_problem
from tensorshard.predict.search.search import BY_TIME, Search

PARTS: dict[str, dict[str, Any]] = {
    "tp=1 pp=1": {"tp": 1, "pp": 1},
    "zero=3": {"zero": 3},
    "recompute=full": {"recompute": "full"},
}
TOKENS = 1024
# Twelve blocks have the shapes of a model's, and a device of less memory is as full with them as with all. By the size
# of the whole model: the width, the heads, and the memory.
MODELS = {"1B": (2048, 16, "10GiB"), "7B": (4096, 32, "30GiB"), "13B": (5120, 40, "32GiB"), "70B": (8192, 64, "32GiB")}


@cache
def problem_of(size: str) -> SearchProblem:
    width, heads, memory = MODELS[size]
    tokens = torch.zeros(1, TOKENS, dtype=torch.long)
    return make_problem(
        partial(GPT, 32000, TOKENS, 12, heads, width, bias=False), world_size=8, inputs=tokens, targets=tokens,
        optimizer=partial(torch.optim.AdamW, lr=1e-3), loss_fn=next_token_loss, hardware="h100", memory=memory,
        global_batch=8, fixed={"precision": "bf16"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def quick() -> Any:
    """Searches share what does not depend on the part: traces, by model and samples, and the estimates of plans."""
    estimates: dict[Any, Estimate | Exception] = {}
    run: Callable[..., Estimate] = SearchProblem.estimate

    def once(problem: SearchProblem, plan: Any, *args: Any, **options: Any) -> Estimate:
        key = (problem.model, problem.world_size, problem.global_batch, plan, args, *options.items())
        if options.get("stop_above") is None:
            return run(problem, plan, *args, **options)
        if key not in estimates:
            try:
                estimates[key] = run(problem, plan, *args, **options)
            except (ValueError, NotImplementedError, RuntimeError) as error:
                estimates[key] = error
        found = estimates[key]
        if isinstance(found, Exception):
            raise found
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SearchProblem, "estimate", once)
        yield


def best_seconds(problem: SearchProblem, known: Search | None = None) -> tuple[float, Search]:
    search = Search(problem) if known is None else Search(problem, known.traces, known.facts)
    search.run(BY_TIME, 1)
    return (search.fitting[0].seconds if search.fitting else float("inf")), search


GRID = [
    ("7B", 64, 512), ("1B", 8, 64), ("1B", 64, 512), ("1B", 256, 256), ("7B", 16, 64), ("7B", 256, 1024),
    ("13B", 64, 256), ("13B", 512, 1024), ("70B", 64, 256), ("7B", 1024, 4096),
]  # fmt: skip
if "TENSORSHARD_WHOLE_GRID" not in os.environ:  # all of it takes five minutes
    GRID = [case for case in GRID if case in (("7B", 64, 512), ("1B", 8, 64), ("70B", 64, 256))]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "world", "batch"), GRID, ids=[f"{m} on {w}, {b}" for m, w, b in GRID])
def test_no_part_has_a_better_plan_than_the_whole(quick, size, world, batch):
    if dist.is_initialized():
        dist.destroy_process_group()
    problem = problem_of(size).with_changes(world_size=world, global_batch=batch)
    whole, search = best_seconds(problem)
    assert search.fitting and search.exhausted
    for one in search.considered:
        assert one.estimate is None or one.first.memory <= one.memory, f"{one.plan}: {one.first.memory}, {one.memory}"
    for name, part in PARTS.items():
        seconds, _ = best_seconds(problem.with_changes(**part), search)
        assert seconds >= whole, f"{name}: {seconds:.4f} s, and the whole search found {whole:.4f} s"
