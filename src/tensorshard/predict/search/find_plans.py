"""`find_plans`: the best plans for a model and some hardware, and why.

Also here: the best plan for the world that this process is in: rank 0 searches for it, and all ranks take it.

Also here: the error of a search in which no plan fits: by how much, and the smallest changes with which one fits.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.comm.decisions import decide_once
from tensorshard.comm.forked import ForkFailed, in_forked_process
from tensorshard.comm.groups import world_group
from tensorshard.comm.world import ranks_here
from tensorshard.common.progress import progress, say
from tensorshard.common.words import size_text
from tensorshard.engine.optimizer import OptimizerFactory
from tensorshard.host.memory import room_for_rank
from tensorshard.model.batches import batch_size
from tensorshard.model.model_errors import raised_by_model
from tensorshard.model.tensors import map_tensors, tensor_leaves
from tensorshard.plan.field_checks import size_in_seconds
from tensorshard.plan.plan import Plan
from tensorshard.predict.estimate import REFUSALS
from tensorshard.predict.hardware import Hardware, hardware_here
from tensorshard.predict.search.model_facts import model_facts
from tensorshard.predict.search.plan_search import (
    FoundPlan,
    PlanSearch,
    found_reasons,
    plan_words,
    rejections,
    why_nothing_fits,
)
from tensorshard.predict.search.problem import SearchProblem, check_objective, fixed_fields, make_problem
from tensorshard.predict.search.search import BY_MEMORY, BY_TIME, CandidateState, Key, Search
from tensorshard.torch_private.fake_results import QuickFakeTensorMode
from tensorshard.weights.files.pretrained_model import without_files

_TRIES = 8  # the most plans that are estimated, the best first, as long as none of them fits
_ROOMS, _TRIES_OF_A_ROOM = (0.75, 0.5), 3  # then the best plans that need no more of the memory by their bounds
_TRIES_OF_A_CHANGE = 2  # estimates for each change
_DOUBLINGS = 4
_WIDTH = 80


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
    within: float | str | None = None,
) -> PlanSearch:
    """The best plans for a model on `world_size` ranks, without the hardware.

    It considers every plan that the number of ranks and the batch allow: degrees of data parallelism (with hybrid
    sharding between nodes), `tp` with and without sequence parallelism, pipelines with their schedules, ZeRO levels,
    micro-batches, recomputation, `cp` where a micro-batch has one sample, `ep` for mixtures of experts, and offload:
    on CPU ranks to disk, on GPUs without a pipeline to host memory, whose size is not checked. It predicts the time of
    each, and estimates those near the best (:func:`tensorshard.estimate`), the most promising first. The same search
    gives the same plans.
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
        within: seconds, or text such as "2m", after which the search ends with the best plans so far.

    Raises:
        ValueError, TypeError: an argument makes no sense; or nothing fits, or was found within the time. The error then
            names the smallest changes that would, as far as there was time to try them.
        RuntimeError: this process is in a process group already.

    Examples:
        >>> adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
        >>> build = functools.partial(torch.nn.Linear, 64, 64)
        >>> batch = torch.zeros(8, 64)
        >>> search = ts.find_plans(build, world_size=2, inputs=batch, targets=batch, optimizer=adamw, top=1,
        ...                        loss_fn=torch.nn.functional.mse_loss, hardware="h100", fixed={"tp": 1, "pp": 1})
        >>> search.best.plan.dp_shard * search.best.plan.dp_replicate
        2
    """
    check_objective(objective, step_time, top)
    until = None if within is None else time.monotonic() + size_in_seconds("within", within)
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
    with progress("looking for plans", until=until):
        if step_time is not None:
            return _answer(_cheapest(problem, top, step_time), top, by_memory=False)
        by_memory = objective == "memory"
        search = _best(Search(problem), BY_MEMORY if by_memory else BY_TIME, top)
        if not search.fitting:
            raise nothing_fits(search)
        return _answer(search, top, by_memory=by_memory)


def _best(search: Search, key: Key, top: int) -> Search:
    """Runs the search. If none of the best plans fits, the best of those that need less of the memory by their bounds
    are tried next, and at last those that take the least."""
    search.run(key, top, max_misfits=_TRIES)
    if search.fitting or search.exhausted or search.ended:
        return search
    for room in _ROOMS if key is BY_TIME else ():
        if not search.fitting:
            most = search.estimates + _TRIES_OF_A_ROOM
            search.run(key, top, max_misfits=most, room=room, stop_at_first_fit=True)
    if not search.fitting:
        search.run(BY_MEMORY, 1, stop_at_first_fit=True)
    if search.fitting:
        search.run(key, top)
    return search


def _cheapest(problem: SearchProblem, top: int, step_time: float) -> Search:
    """The search on the fewest devices that take a step in `step_time` seconds.

    Raises:
        ValueError: not even all devices together do.
    """
    search = Search(problem)
    for devices in range(1, problem.world_size + 1):
        if problem.world_size % devices:
            continue
        asked = problem.with_changes(world_size=devices)
        search = Search(asked, search.traces, search.facts).run(BY_TIME, top, longest=step_time)
        if search.fitting:
            return search
        if search.ended:
            raise nothing_fits(search)
    fastest = _best(Search(problem, search.traces, search.facts), BY_TIME, 1)
    if not fastest.fitting:
        raise nothing_fits(fastest)
    raise ValueError(
        f"step_time={step_time:g} was asked for, and the fastest plan of all {problem.world_size} ranks takes "
        f"{fastest.fitting[0].time_words}; allow more time, or more devices"
    )


def _answer(search: Search, top: int, *, by_memory: bool) -> PlanSearch:
    best = search.fitting[0]
    problem = search.problem
    not_chosen = rejections(search, best, by_memory=by_memory)
    plans = []
    for one in search.fitting[:top]:
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
        search.ended,
    )


def choose_plan(
    model: nn.Module | Callable[[], nn.Module],
    optimizer: OptimizerFactory,
    loss_fn: Callable[[Any, Any], Any],
    inputs: Any,
    targets: Any,
    fixed: Plan | Mapping[str, Any] | None,
) -> Plan:
    """The best plan, the same on every rank. A collective of the world.

    The search runs in a fork of rank 0, which is in no process group and leaves nothing behind. It prints its choice.

    Args:
        inputs, targets: as for :func:`tensorshard.parallelize`; without targets, they are guessed.

    Raises:
        ValueError: nothing fits, or an argument makes no sense.
    """
    ranks = dist.get_world_size()

    def choose() -> dict[str, Any]:
        size = batch_size(inputs)
        given = fixed_fields(fixed)
        hardware = hardware_here()  # a fork cannot ask a GPU
        memory = room_for_rank(ranks_here()) if hardware.is_cpu else None  # a container may have less than the machine

        def search() -> tuple[dict[str, Any], str]:
            plan_search = find_plans(
                model,
                world_size=ranks,
                inputs=inputs,
                targets=guess_targets(without_files(model), loss_fn, inputs, size) if targets is None else targets,
                optimizer=optimizer,
                loss_fn=loss_fn,
                hardware=hardware,
                memory=memory,
                fixed=given,
                top=1,
            )
            return plan_search.best.plan.to_dict(), plan_search.describe()

        try:
            plan, description = in_forked_process(search, None, shown=True)
        except ForkFailed as error:
            raise ValueError(f"plan 'auto': {error}") from error
        print(f"the best plan for {description}", flush=True)
        return plan

    return Plan.from_dict(decide_once(choose, world_group()))


def guess_targets(
    model: nn.Module | Callable[[], nn.Module], loss_fn: Callable[[Any, Any], Any], inputs: Any, samples: int
) -> Any:
    """Zeros that ``loss_fn(model(inputs), targets)`` takes: classes, values like the output's, or the inputs.

    Args:
        inputs: a batch of `samples`.

    Raises:
        ValueError: the loss takes none of these.
    """
    facts = model_facts(model, inputs, samples)
    outputs = [] if facts is None else tensor_leaves(facts.output)
    if facts is not None and outputs:
        candidates = [torch.zeros(shape, dtype=dtype) for shape, dtype in _shapes(outputs[0])]
        for targets in (*candidates, inputs):
            if _is_taken(loss_fn, facts.output, targets):
                return targets
    raise ValueError(
        "sample_targets were not given, and could not be guessed: the loss takes neither classes nor values like the "
        "model's output nor its inputs; give sample_targets=, of one batch as Engine.step is given them"
    )


def _shapes(output: torch.Tensor) -> Iterator[tuple[tuple[int, ...], torch.dtype]]:
    shape = tuple(output.shape)
    if output.dim() > 1 and shape[-1] > 1:
        yield shape[:-1], torch.long  # a class for each place
    if output.dim() > 2:
        yield (shape[0], *shape[2:]), torch.long  # channels come second, as in segmentation
    yield shape, torch.float32


def _is_taken(loss_fn: Callable[[Any, Any], Any], output: Any, targets: Any) -> bool:
    with QuickFakeTensorMode(), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")  # such as the warning about shapes that are broadcast
        try:
            fakes = [map_tensors(lambda t: torch.empty(t.shape, dtype=t.dtype), tree) for tree in (output, targets)]
            loss_fn(*fakes)
        except Exception as error:  # a loss may raise anything for targets that do not suit it
            if isinstance(error, Warning) or raised_by_model(error):
                return False
            raise
    return True


@dataclass(frozen=True)
class FittingChange:
    """A change of the search's arguments with which a plan fits.

    Args:
        words: what to change. plan: the plan that fits then, in words. memory: bytes that this plan takes.
    """

    words: str
    plan: str
    memory: int

    def __str__(self) -> str:
        return f"{self.words} ({size_text(self.memory)} with {self.plan})"


class NothingFitsError(ValueError):
    """No plan fits.

    Args:
        problem: a sentence that says by how much. regions: what each ZeRO level and kind of recomputation lacks.
        changes: the smallest changes with which a plan fits.
    """

    def __init__(self, problem: str, regions: list[str], changes: list[str]) -> None:
        remedy = "; or ".join(changes) if changes else "none of the changes that were tried"
        super().__init__(f"{problem} ({', '.join(regions)}). What would fit: {remedy}")
        self.problem, self.regions, self.changes = problem, regions, changes

    def __reduce__(self) -> Any:
        return type(self), (self.problem, self.regions, self.changes)

    def describe(self) -> str:
        """The same in lines of at most 80 columns."""
        lines = [*wrap(self.problem, _WIDTH), ""]
        for region in self.regions:
            lines += wrap(region, _WIDTH, initial_indent="  ", subsequent_indent="    ")
        lines += ["", "what would fit:" if self.changes else "no change that was tried makes one fit"]
        for change in self.changes:
            lines += wrap(change, _WIDTH, initial_indent="  ", subsequent_indent="    ")
        return "\n".join(lines)


def nothing_fits(search: Search) -> ValueError:
    """The error of a search without a plan that fits."""
    problem = search.problem
    taken = [one for one in search.considered if not one.refused]
    if search.ended and not search.estimates:
        return ValueError(f"{search.ended} before a plan was estimated; give it more time")
    if not taken:
        return ValueError(_no_plan(search))
    least = _nearest(search, taken)
    too_much = size_text(max(0, least.memory - problem.memory))
    changes = [] if search.ended else list(_changes(search))
    how = "" if least.is_estimated else "at least "
    sentence = (
        f"no plan of {problem.world_size} ranks fits {size_text(problem.memory)} each; the nearest, "
        f"{plan_words(least.plan)}, takes {how}{size_text(least.memory)}, {too_much} too much"
    )
    if search.ended:
        sentence = (
            f"none of the {search.estimates} plans that were estimated fits {size_text(problem.memory)} each, and then "
            f"{search.ended}; the nearest, {plan_words(least.plan)}, takes {how}{size_text(least.memory)}"
        )
    return NothingFitsError(sentence, [str(refusal) for refusal in why_nothing_fits(search)], list(map(str, changes)))


def _no_plan(search: Search) -> str:
    problem = search.problem
    reasons = [str(refusal) for refusal in search.refused]
    reasons += sorted({f"{plan_words(one.plan)}: {one.refused}" for one in search.considered})[:3]
    return (
        f"no plan of {problem.world_size} ranks suits a batch of {problem.global_batch} samples and what is fixed "
        f"({dict(problem.fixed) or 'nothing'}): {'; '.join(reasons[:6]) or 'none is allowed'}"
    )


def _nearest(search: Search, taken: list[CandidateState]) -> CandidateState:
    """The plan that takes the least memory: an estimated one, unless a few tries give no estimate."""
    for _ in range(0 if search.ended else 2 * _TRIES_OF_A_CHANGE):
        nearest = min(taken, key=lambda one: one.memory)
        if nearest.is_estimated:
            break
        with suppress(*REFUSALS):  # without an estimate its bound stays
            nearest.estimate = search.problem.under(nearest.plan.ep).estimate(nearest.plan)
    return min(taken, key=lambda one: (not one.is_estimated, one.memory))


def _changes(search: Search) -> Iterator[FittingChange]:
    """The smallest change of each kind that helps."""
    for kind in (_smaller_batches, _more_devices, _lower_precision):
        for words, problem in kind(search.problem):
            say(f"no plan fits; trying {words}")
            tried = Search(problem)
            if problem.fixed.get("precision") == search.problem.fixed.get("precision"):
                tried = replace(tried, traces=search.traces, facts=search.facts)
            tried.run(BY_MEMORY, 1, most=_TRIES_OF_A_CHANGE, stop_at_first_fit=True)
            if tried.ended:
                return
            if tried.fitting:
                candidate = tried.fitting[0]
                yield FittingChange(words, plan_words(candidate.plan), candidate.memory)
                break


def _smaller_batches(problem: SearchProblem) -> Iterator[tuple[str, SearchProblem]]:
    batch = problem.global_batch
    for _ in range(_DOUBLINGS):
        if batch % 2:
            return
        batch //= 2
        yield f"global_batch={batch}", problem.with_changes(global_batch=batch)


def _more_devices(problem: SearchProblem) -> Iterator[tuple[str, SearchProblem]]:
    fixed = {name: value for name, value in problem.fixed.items() if name not in ("dp_shard", "dp_replicate")}
    for doubling in range(1, _DOUBLINGS + 1):
        size = problem.world_size * 2**doubling
        yield f"world_size={size}", replace(problem, world_size=size, fixed=fixed)


def _lower_precision(problem: SearchProblem) -> Iterator[tuple[str, SearchProblem]]:
    if problem.fixed.get("precision", "fp32") == "fp32":
        yield "precision=bf16", problem.with_changes(precision="bf16")
