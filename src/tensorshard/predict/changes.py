"""Changes that would make a plan fit, each estimated, the cheapest first."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from tensorshard.common.progress import say
from tensorshard.common.words import size_text
from tensorshard.plan.plan import AXES, Plan
from tensorshard.predict.estimate import REFUSALS


@dataclass(frozen=True)
class Change:
    """A change with which a plan fits.

    Args:
        words: the change, as overrides of ``train.plan`` without that prefix.
        cost: what it costs, in words.
        needed: bytes on the device with the change.
    """

    words: str
    cost: str
    needed: int

    def describe(self) -> str:
        """One line, or two where it would be longer than 80 columns."""
        line = f"  {self.words:<24}{size_text(self.needed):>10}  {self.cost}"
        if len(line) <= 80:
            return line
        return f"  {self.words}\n  {'':<24}{size_text(self.needed):>10}  {self.cost}"


@dataclass(frozen=True)
class _Candidate:
    kind: str
    fields: dict[str, Any]
    cost: str


def find_changes(
    plan: Plan, memory: int, needed: Callable[[Plan], int], *, batch: int | None = None, most: int = 3
) -> Iterator[Change]:
    """The `most` cheapest changes that make `plan` fit, as they are found; if no single one does, several together.

    Where nothing is enough, or the search is interrupted before it has found anything, it yields what needs the least.

    Args:
        plan: a resolved plan that does not fit.
        memory: bytes of a device.
        needed: returns the bytes that a plan takes on the device; raises one of `REFUSALS` if the plan does not suit
            the model or the batch.
        batch: samples of one data rank, a multiple of the number of micro-batches; None if it is not known.
    """
    kinds: set[str] = set()
    best: dict[str, tuple[int, _Candidate]] = {}
    try:
        for kind, group in groupby(_candidates(plan, batch), key=lambda candidate: candidate.kind):
            if kind in kinds:  # a milder change of this kind is enough
                continue
            found = _mildest(plan, memory, needed, list(group), best)
            if found is not None:
                yield found
                kinds.add(kind)
                if len(kinds) == most:
                    return
        if not kinds:
            yield from _together(plan, memory, needed, [candidate for _, candidate in best.values()])
    except KeyboardInterrupt:
        if best and not kinds:
            least, nearest = min(best.values(), key=lambda one: one[0])
            yield Change(_words(nearest.fields), nearest.cost, least)
        raise


def _mildest(
    plan: Plan,
    memory: int,
    needed: Callable[[Plan], int],
    group: list[_Candidate],
    best: dict[str, tuple[int, _Candidate]],
) -> Change | None:
    """The mildest of a `group` of changes that is enough; None if the strongest that this model takes is not.

    Args:
        best: for each kind, the change that needs the least so far, and how much; this adds to it.
    """
    while group:
        strongest = group.pop()
        least = _needed(plan, strongest.fields, needed)
        if least is None:
            continue
        if strongest.kind not in best or least < best[strongest.kind][0]:
            best[strongest.kind] = (least, strongest)
        if least > memory:
            return None
        for milder_one in group:
            bytes_needed = _needed(plan, milder_one.fields, needed)
            if bytes_needed is not None and bytes_needed <= memory:
                strongest, least = milder_one, bytes_needed
                break
        return Change(_words(strongest.fields), strongest.cost, least)
    return None


def milder(plan: Plan, batch: int | None = None) -> list[tuple[str, str]]:
    """The changes that :func:`find_changes` would try, one of each kind, without an estimate: each with its cost.

    Args:
        plan: a resolved plan.
        batch: samples of one data rank, a multiple of the number of micro-batches; None if it is not known.
    """
    first: dict[str, _Candidate] = {}
    for candidate in _candidates(plan, batch):
        first.setdefault(candidate.kind, candidate)
    return [(_words(candidate.fields), candidate.cost) for candidate in first.values()]


def _together(plan: Plan, memory: int, needed: Callable[[Plan], int], candidates: list[_Candidate]) -> list[Change]:
    """Changes that make the plan fit together, each of which helps; all that help if they are not enough."""
    fields: dict[str, Any] = {}
    least = needed(plan)
    for candidate in candidates:
        if set(candidate.fields) & set(fields) & set(AXES):
            continue  # an earlier change has set these axes already
        tried = fields | candidate.fields
        bytes_needed = _needed(plan, tried, needed)
        if bytes_needed is None or bytes_needed >= least:
            continue
        fields, least = tried, bytes_needed
        if least <= memory:
            break
    return [Change(_words(fields), "all of these together", least)] if fields else []


def _needed(plan: Plan, fields: dict[str, Any], needed: Callable[[Plan], int]) -> int | None:
    say(f"trying {_words(fields)}")
    try:
        return needed(replace(plan, **fields))
    except REFUSALS:
        return None  # this model or batch does not take such a plan


def _candidates(plan: Plan, batch: int | None) -> Iterator[_Candidate]:
    """Changes to try, the cheapest first; those of one kind from mild to strong."""
    zero = int(plan.zero)
    if plan.dp_shard > 1:
        for level in range(zero + 1, 3):
            yield _Candidate("zero", {"zero": level}, "no more traffic")
    for count in sorted({plan.micro_batches * factor for factor in (2, 4, 8)} | {batch or 0}):  # at last, each sample
        if batch is not None and plan.micro_batches < count and batch % count == 0:
            yield _Candidate("micro_batches", {"micro_batches": count}, "smaller matrix products")
    if plan.dp_shard > 1 and zero < 3:
        yield _Candidate("zero", {"zero": 3}, "half as much traffic again")
    if plan.tp > 1 and not plan.sequence_parallel:
        yield _Candidate("sequence_parallel", {"sequence_parallel": True}, "as many bytes, in more collectives")
    if plan.recompute != "full":
        yield _Candidate("recompute", {"recompute": "full"}, "each block's forward runs twice")
    if plan.precision == "fp32":
        yield _Candidate("precision", {"precision": "bf16"}, "matrix products are rounded to 8 bits")
    for axis, cost in (("tp", "collectives inside of every layer"), ("pp", "a bubble in every step")):
        degree = 2
        while plan.dp_shard % degree == 0 and degree <= 8:
            fields = {axis: getattr(plan, axis) * degree, "dp_shard": plan.dp_shard // degree}
            if axis == "pp":
                fields["micro_batches"] = max(plan.micro_batches, 2 * fields["pp"])
            yield _Candidate(axis, fields, cost)
            degree *= 2
        if axis == "tp" and degree > 2 and not plan.sequence_parallel:
            yield _Candidate(axis, {**fields, "sequence_parallel": True}, cost)
    if plan.offload is None:
        yield _Candidate("offload", {"offload": "cpu"}, "the host makes the update, which waits for the link to it")


def _words(fields: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in fields.items())
