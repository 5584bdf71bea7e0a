"""`find_plans`: the best plans for a model and some hardware, and why."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from tensorshard.common.quantities import seconds_words
from tensorshard.engine.optimizer import OptimizerFactory
from tensorshard.plan.plan import Plan
from tensorshard.predict.hardware import Hardware
from tensorshard.predict.search.nothing_fits import nothing_fits
from tensorshard.predict.search.plan_search import FoundPlan, PlanSearch
from tensorshard.predict.search.problem import SearchProblem, check_objective, make_problem
from tensorshard.predict.search.search import BY_MEMORY, BY_TIME, Key, Progress, Search
from tensorshard.predict.search.wording import found_reasons, rejections
from tensorshard.weights.files.pretrained_model import without_files

_TRIES = 8  # the most plans that are estimated, the best first, as long as none of them fits


def find_plans(
    model: nn.Module | Callable[[], nn.Module],
    *,
    world_size: int,
    inputs: Any,
    targets: Any,
    optimizer: OptimizerFactory,
    loss_fn: Callable[[Any, Any], Any],
    hardware: str | Hardware | None = None,
    memory: int | str | None = None,
    global_batch: int | None = None,
    fixed: Plan | Mapping[str, Any] | None = None,
    objective: str = "time",
    top: int = 5,
    step_time: float | None = None,
) -> PlanSearch:
    """The best plans for a model on `world_size` ranks, without the hardware.

    It considers every plan that the number of ranks and the batch allow: degrees of data parallelism (with hybrid
    sharding between nodes), `tp` with and without sequence parallelism, pipelines with their schedules, ZeRO levels,
    micro-batches, recomputation, `cp` where a micro-batch has one sample, `ep` for mixtures of experts, and, on CPU
    ranks, offload to disk. It
    predicts the time of each, and estimates those near the best (:func:`tensorshard.estimate`), the most promising
    first. The same search gives the same plans.
    Fields that change results, such as precision and clipping, are as in `fixed`, or at a Plan's defaults.

    Args:
        model, optimizer, loss_fn: as for :func:`tensorshard.estimate`.
        world_size: the number of ranks.
        inputs, targets: a batch, as for :meth:`Engine.step`; shapes and types matter, and the number of samples only
            where `global_batch` is None.
        hardware: a name such as "h100", or a :class:`Hardware`. None for this machine: as ``tensorshard check``
            measured it, else the profile of its GPU, else a CPU whose speed is assumed.
        memory: bytes that a rank may take, or text such as "70GiB"; None for all of the device's. CPU ranks share
            their machine's.
        global_batch: samples of a step, the same under every plan. None for as many as `world_size` data ranks have if
            each is given `inputs`: a plan with ``tp * pp`` of 4 then gives each data rank four times as many.
        fixed: fields that every plan must have: a dict of a Plan's fields, or a Plan, whose fields count if they are
            not at their defaults.
        objective: "time" of a step; "memory" of the fullest rank; or "cost", the fewest devices, at most `world_size`,
            that take a step in `step_time` seconds.
        top: how many plans to return, at most. The first is the best; the others are the next best.
        step_time: seconds, for the objective "cost".

    Raises:
        ValueError, TypeError: an argument makes no sense; or nothing fits. The error then names the smallest changes
            that would.
        RuntimeError: this process is in a process group already.

    Examples:
        >>> adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
        >>> build = functools.partial(torch.nn.Linear, 64, 64)
        >>> batch = torch.zeros(8, 64)
        >>> found = ts.find_plans(build, world_size=2, inputs=batch, targets=batch, optimizer=adamw, top=1,
        ...                       loss_fn=torch.nn.functional.mse_loss, hardware="h100", fixed={"tp": 1, "pp": 1})
        >>> found.best.plan.dp_shard * found.best.plan.dp_replicate
        2
    """
    check_objective(objective, step_time, top)
    problem = make_problem(
        without_files(model),
        world_size=world_size,
        inputs=inputs,
        targets=targets,
        optimizer=optimizer,
        loss_fn=loss_fn,
        hardware=hardware,
        memory=memory,
        global_batch=global_batch,
        fixed=fixed,
    )
    progress = Progress()
    if step_time is not None:
        return _answer(_cheapest(problem, top, step_time, progress), top, by_memory=False)
    by_memory = objective == "memory"
    search = _best(Search(problem), BY_MEMORY if by_memory else BY_TIME, top, progress)
    if not search.found:
        raise nothing_fits(search, progress)
    return _answer(search, top, by_memory=by_memory)


def _best(search: Search, key: Key, top: int, progress: Progress) -> Search:
    """Runs the search. If none of the best plans fits, those that take the least memory are tried next."""
    search.run(key, top, progress, max_misfits=_TRIES)
    if not search.found and not search.exhausted:
        search.run(BY_MEMORY, 1, progress, stop_at_first_fit=True)
        if search.found:
            search.run(key, top, progress)
    return search


def _cheapest(problem: SearchProblem, top: int, step_time: float, progress: Progress) -> Search:
    """The search on the fewest devices that take a step in `step_time` seconds.

    Raises:
        ValueError: not even all devices together do.
    """
    search = Search(problem)
    for devices in range(1, problem.world_size + 1):
        if problem.world_size % devices:
            continue
        asked = problem.with_changes(world_size=devices)
        search = Search(asked, search.traces, search.facts).run(BY_TIME, top, progress, longest=step_time)
        if search.found:
            return search
    fastest = _best(Search(problem, search.traces, search.facts), BY_TIME, 1, progress)
    if not fastest.found:
        raise nothing_fits(fastest, progress)
    raise ValueError(
        f"step_time={step_time:g} was asked for, and the fastest plan of all {problem.world_size} ranks takes "
        f"{seconds_words(fastest.found[0].seconds)}; allow more time, or more devices"
    )


def _answer(search: Search, top: int, *, by_memory: bool) -> PlanSearch:
    best = search.found[0]
    problem = search.problem
    not_chosen = rejections(search, best, by_memory=by_memory)
    plans = []
    for one in search.found[:top]:
        assert one.estimate is not None  # every plan that was found was estimated
        plans.append(FoundPlan(one.plan, one.estimate, one.seconds, found_reasons(one, best)))
    return PlanSearch(
        plans,
        [*search.refused, *not_chosen],
        problem.hardware,
        problem.memory,
        problem.world_size,
        problem.global_batch,
        len(search.considered),
        search.estimates,
        search.exhausted,
    )
