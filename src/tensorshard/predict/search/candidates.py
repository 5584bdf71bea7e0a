"""Every plan that a world allows, by arithmetic alone; and the plans that it does not allow, with the reason."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tensorshard.model.whole_sequences import first_sequence
from tensorshard.plan.plan import RECOMPUTE_MODES, Plan
from tensorshard.predict.search.problem import SearchProblem

# Schedules that are tried, with the stages of each rank. Others take as long as one of these, or differ only in memory.
_SCHEDULES: tuple[tuple[str, int | None], ...] = (("1f1b", None), ("interleaved_1f1b", 2), ("zbv", 2))
# Fields that say how samples are cut. Where none is fixed, sequences are cut only where samples cannot be.
_OF_SAMPLES = {"dp_replicate", "dp_shard", "cp"}


@dataclass(frozen=True)
class Refusal:
    """Plans that are not allowed, and why.

    Args:
        region: what they have in common, such as "tp=3".
        reason: why, with a number.
    """

    region: str
    reason: str

    def __str__(self) -> str:
        return f"{self.region} {self.reason}"


@dataclass(frozen=True)
class Candidate:
    """A plan that the world and the batch allow.

    Args:
        plan: with every axis set.
        micro_batch: samples that a rank computes at once.
        order: among equally good plans, those with a lower number, which are simpler, come first.
    """

    plan: Plan
    micro_batch: int
    order: int


def candidates(problem: SearchProblem, expert_parts: Sequence[int] = (1,)) -> tuple[list[Candidate], list[Refusal]]:
    """The plans to choose from, simpler ones first, and the regions without any plan.

    Args:
        expert_parts: over how many ranks the model's experts can be split.
    """
    refused: dict[str, str] = {}
    candidates: list[Candidate] = []
    for tp, pp, cp, dp in _splits(problem, refused):
        for shape in _shapes(problem, tp, pp, cp, dp, expert_parts):
            for plan in _plans(problem, shape, problem.global_batch // dp, refused):
                size = problem.global_batch // dp // plan.micro_batches
                candidates.append(Candidate(plan, size, len(candidates)))
    regions = {_region(candidate.plan) for candidate in candidates}
    return candidates, [Refusal(region, reason) for region, reason in refused.items() if region not in regions]


def _splits(problem: SearchProblem, refused: dict[str, str]) -> Iterator[tuple[int, int, int, int]]:
    """Degrees of tp, pp, cp and of both data axes together."""
    world, batch = problem.world_size, problem.global_batch
    node = problem.rates.devices_per_node
    for axis in ("tp", "pp", "cp"):
        degree = problem.fixed.get(axis, 1)
        if world % degree:
            refused[f"{axis}={degree}"] = f"does not divide the {world} ranks"
    for tp in _options(problem, "tp", _divisors(world)):
        if world % tp:
            continue
        if tp > node and "tp" not in problem.fixed:
            refused[f"tp={tp}"] = f"crosses nodes, which have {node} devices each"
            continue
        for pp in _options(problem, "pp", _divisors(world // tp)):
            if world // tp % pp:
                continue
            for cp in _options(problem, "cp", _sequence_parts(problem, world // tp // pp)):
                if world // tp // pp % cp:
                    continue
                dp = world // tp // pp // cp
                if batch % dp:
                    refused[f"dp={dp}"] = f"does not divide the batch of {batch} samples"
                    continue
                yield tp, pp, cp, dp


def _sequence_parts(problem: SearchProblem, ranks: int) -> list[int]:
    """Degrees of cp for so many ranks of each pipeline stage and place along tp."""
    if not problem.may_split_sequences:
        return [1]
    first = first_sequence({"": problem.inputs})
    # A number for each sample and feature is no sequence.
    is_one = first is not None and (first[0].dim() > 2 or not first[0].is_floating_point())
    longest = first[0].shape[first[1]] // 2 if first is not None and is_one else 1
    if problem.fixed.get("cp_dims") is not None:
        longest = ranks
    return [cp for cp in _divisors(ranks) if cp <= longest or cp == 1]


def _shapes(
    problem: SearchProblem, tp: int, pp: int, cp: int, dp: int, expert_parts: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Fields of a Plan with these degrees: the axes, sequence parallelism, the pipeline's schedule, and ep."""
    sequences = _options(problem, "sequence_parallel", (False, True) if tp > 1 else (False,))
    names = _options(problem, "pp_schedule", [name for name, _ in _SCHEDULES] if pp > 1 else ["1f1b"])
    for sequence in sequences:
        for name in names:
            default = dict(_SCHEDULES).get(name) if pp > 1 else None
            for stages in _options(problem, "pp_stages_per_rank", (default,)):
                for shard in _shard_degrees(problem, tp * cp, dp):
                    parts = [n for n in expert_parts if shard * cp % n == 0]
                    for ep in _options(problem, "ep", parts):
                        yield {
                            "tp": tp,
                            "pp": pp,
                            "cp": cp,
                            "dp_shard": shard,
                            "dp_replicate": dp // shard,
                            "sequence_parallel": sequence,
                            "pp_schedule": name,
                            "pp_stages_per_rank": stages,
                            "ep": ep,
                        }


def _shard_degrees(problem: SearchProblem, inner: int, dp: int) -> list[int]:
    """The values of dp_shard to try: all data ranks, or those of a node (hybrid sharding).

    Args:
        inner: how many ranks compute for one data rank within a node.
    """
    degrees = [dp]
    within = max((d for d in _divisors(dp) if d * inner <= problem.rates.devices_per_node), default=1)
    if 1 < within < dp:
        degrees.append(within)
    fixed = problem.fixed.get("dp_shard"), problem.fixed.get("dp_replicate")
    if fixed[0] is not None:
        degrees = [fixed[0]] if dp % fixed[0] == 0 else []
    elif fixed[1] is not None:
        degrees = [dp // fixed[1]] if dp % fixed[1] == 0 else []
    return [d for d in degrees if fixed[1] in (None, dp // d)]


def _plans(problem: SearchProblem, shape: dict[str, Any], batch: int, refused: dict[str, str]) -> Iterator[Plan]:
    """The plans of a shape, with all ZeRO levels, micro-batches, recomputation and offload.

    Args:
        batch: samples of one data rank.
    """
    several = shape["dp_shard"] * shape["cp"] > 1
    if shape["dp_shard"] * shape["cp"] % shape["ep"]:
        refused.setdefault(f"ep={shape['ep']}", f"does not divide the {shape['dp_shard']} ranks of dp_shard")
        return
    if shape["dp_replicate"] > 1 and several:
        levels: Sequence[Any] = (1, 2, 3)  # ZeRO 0 shards nothing: all data ranks are replicas, which is another shape
    else:
        levels = (0, 1, 2, 3) if several else (0,)
    counts = _micro_batches(batch)
    if "micro_batches" in problem.fixed and batch % problem.fixed["micro_batches"]:
        count = problem.fixed["micro_batches"]
        refused[f"dp={problem.global_batch // batch}"] = f"leaves {batch} samples, not a multiple of {count}"
        return
    # CPU ranks have no device memory apart from the host's. So only offload to disk saves any.
    places = (None, "disk") if problem.rates.disk_bandwidth else (None,)
    if not problem.on_cpus:  # stages hold little, and a plan of each kind with offload would double the search
        places = (None, "cpu") if shape["pp"] == 1 else (None,)
    for offload in _options(problem, "offload", places):
        for recompute in _options(problem, "recompute", RECOMPUTE_MODES):
            for zero in _options(problem, "zero", levels):
                if offload == "cpu" and several and zero in (0, 1) and not problem.fixed.keys() & {"offload", "zero"}:
                    continue  # what is offloaded is sharded further without a cost
                for count in _options(problem, "micro_batches", counts):
                    if math.gcd(shape["cp"], batch // count) > 1 and not problem.fixed.keys() & _OF_SAMPLES:
                        continue  # with more data ranks, each micro-batch has fewer samples, and nothing is exchanged
                    chosen = {**shape, "zero": zero, "recompute": recompute, "offload": offload, "micro_batches": count}
                    is_backward_whole = recompute != "none" or shape["tp"] > 1 or (zero == 3 and several)
                    if is_backward_whole and shape["pp_schedule"] == "zbv" and "pp_schedule" not in problem.fixed:
                        continue  # if backward is not split in two halves, zbv is no better than the others
                    try:
                        plan = problem.plan(**chosen).resolve(problem.world_size)
                        _ = plan.stages_per_rank
                    except ValueError as error:
                        of_region = _region(Plan(tp=shape["tp"], pp=shape["pp"], pp_schedule=shape["pp_schedule"]))
                        refused.setdefault(of_region, f"is refused: {error}")
                        continue
                    yield plan


def _region(plan: Plan) -> str:
    """The region that a refused plan belongs to. It is reported if no plan of the region is left."""
    return f"pp={plan.pp} pp_schedule={plan.pp_schedule}" if plan.pp > 1 else f"tp={plan.tp}"


def _micro_batches(batch: int) -> list[int]:
    """Numbers of micro-batches: 1, and those that give each of them a power of two of samples."""
    return [count for count in _divisors(batch) if count == 1 or (batch // count).bit_count() == 1]


def _options(problem: SearchProblem, name: str, otherwise: Sequence[Any]) -> Sequence[Any]:
    """The values that a field may have: the one that is fixed, or `otherwise`."""
    return (problem.fixed[name],) if name in problem.fixed else otherwise


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
