"""Plans, times and reasons in words."""

from tensorshard.common.words import size_text
from tensorshard.plan.offload import Offload
from tensorshard.plan.plan import Plan
from tensorshard.predict.search.candidates import Refusal
from tensorshard.predict.search.problem import SEARCHED
from tensorshard.predict.search.search import CandidateState, Search
from tensorshard.predict.step_time import BUBBLE, COMMUNICATION, OFFLOAD

_LOSSES = {BUBBLE: "to the bubble", COMMUNICATION: "to exposed communication", OFFLOAD: "to offload"}
_WORTH_SAYING = 0.02
# The order in which rejected values of fields are listed.
_TOLD = ("zero", "recompute", "micro_batches", "tp", "sequence_parallel", "cp", "ep", "pp", "dp_replicate", "offload")


def plan_words(plan: Plan) -> str:
    """The chosen fields of a resolved plan as overrides, without those that change nothing."""
    words = []
    for name in SEARCHED:
        value = getattr(plan, name)
        says_nothing = value is not True and value in (None, 1, False, "none") and name not in ("dp_shard", "zero")
        if says_nothing or (name == "pp_schedule" and plan.pp == 1):
            continue
        words.append(_region(name, value))
    return " ".join(words)


def found_reasons(one: CandidateState, best: CandidateState) -> list[str]:
    """The reasons of a plan that was found: what it loses time to, and how far it is behind the best."""
    said = []
    if one is not best:
        said.append(_compared(one, best))
    if one is best:
        for category, share in _lost(one).items():
            if share >= _WORTH_SAYING:
                said.append(f"{_cause(one.plan, category)} loses {share:.0%} {_LOSSES[category]}")
    if one.plan.cp > 1 and one.estimate is not None:
        exchanged = one.estimate.largest.traffic.get("cp", {}).values()
        received = size_text(int(sum(traffic.sent for traffic in exchanged)))
        said.append(f"cp={one.plan.cp} splits sequences, of which each rank receives {received} in a step")
    return said


def rejections(search: Search, best: CandidateState, *, by_memory: bool) -> list[Refusal]:
    """For each other value of a field than the best plan's: why no plan with it was chosen. The last line has those of
    which nothing is known but a prediction, without its numbers."""
    said, predicted = [], []
    for name in _TOLD:
        values = {getattr(one.plan, name) for one in search.considered} - {getattr(best.plan, name)}
        for value in sorted(values, key=_by_number):
            group = [one for one in search.considered if getattr(one.plan, name) == value]
            why = _why_not(search, group, best, by_memory=by_memory)
            if why is None:
                predicted.append(_region(name, value))
            else:
                said.append(Refusal(_region(name, value), why))
    if predicted:
        said.append(Refusal(", ".join(predicted), "not estimated, since predicted to take longer"))
    return said


def _by_number(value: object) -> tuple[float, str]:
    return (value, "") if isinstance(value, int) else (0, str(value))


def why_nothing_fits(search: Search) -> list[Refusal]:
    """For each ZeRO level and kind of recomputation, how much memory is missing."""
    said = []
    for name in ("zero", "recompute"):
        for value in sorted({getattr(one.plan, name) for one in search.considered}, key=str):
            group = [one for one in search.considered if getattr(one.plan, name) == value and not one.refused]
            if group:
                said.append(Refusal(_region(name, value), _excess(search, group)))
    return said


def _why_not(search: Search, group: list[CandidateState], best: CandidateState, *, by_memory: bool) -> str | None:
    """Why none of a group is the best; None if its time was predicted, and not estimated."""
    taken = [one for one in group if not one.refused]
    if not taken:
        return f"is refused: {group[0].refused}"
    fit = [one for one in taken if one.memory <= search.problem.memory]
    if not fit:
        return _excess(search, taken)
    if by_memory:
        nearest = min(fit, key=lambda one: (one.memory, one.likely_seconds))
        least = "" if nearest.estimate else "at least "
        more = nearest.memory - best.memory
        return f"takes {least}{size_text(more)} more" if more > 0 else "takes as much"
    nearest = min(fit, key=lambda one: (one.likely_seconds, one.estimate is None, one.memory))
    if not nearest.is_estimated and nearest.likely_seconds < best.seconds:
        return "was not estimated: what is known of it does not exclude that it is faster"
    return _compared(nearest, best) if nearest.is_estimated or nearest.extrapolated else None


def _compared(one: CandidateState, best: CandidateState) -> str:
    more = one.likely_seconds / best.seconds - 1
    text = "takes as long" if abs(more) < 0.005 else f"takes {'' if one.estimate else 'about '}{more:.0%} longer"
    if more < -0.005:
        text = f"takes {-more:.0%} less time"
    if more < _WORTH_SAYING:
        return text
    lost = _lost(one)
    category = max(lost, key=lambda name: lost[name])
    share = lost[category]
    return f"{text}, and loses {share:.0%} {_LOSSES[category]}" if share >= _WORTH_SAYING else text


def _lost(one: CandidateState) -> dict[str, float]:
    """The shares of a step that are lost, by what they are lost to; from the estimate, else from the prediction."""
    time = None if one.estimate is None else one.estimate.step_time
    if time is not None:
        return {name: time.by_category[name] / time.seconds for name in _LOSSES}
    predicted = one.predicted
    lost = {BUBBLE: predicted.bubble, COMMUNICATION: predicted.communication}
    return {name: seconds / predicted.seconds for name, seconds in lost.items()}


def _excess(search: Search, group: list[CandidateState]) -> str:
    limit = search.problem.memory
    least = min(group, key=lambda one: one.memory)
    if least.memory <= limit:
        too_large = [one for one in group if one.memory > limit and one.estimate is not None]
        if not too_large:
            return "was not estimated, and may fit"
        least = min(too_large, key=lambda one: one.memory)
        return f"does not fit by {size_text(least.memory - limit)} as far as it was estimated"
    how = "" if least.is_estimated else "at least " if least.memory == least.first.memory else "about "
    return f"does not fit by {how}{size_text(least.memory - limit)}"


def _region(name: str, value: object) -> str:
    """A field's value as an override."""
    if isinstance(value, Offload):
        tiers = {value.optimizer, value.gradients}
        only = value == Offload(optimizer=value.optimizer, gradients=value.gradients)
        value = tiers.pop() if only and len(tiers) == 1 else value
    return f"{name}={str(value).lower() if isinstance(value, bool) else value}"


def _cause(plan: Plan, category: str) -> str:
    if category == BUBBLE:
        return f"pp={plan.pp}"
    if category == OFFLOAD:
        return f"offload={plan.offload}"
    axes = ("tp", "cp", "ep", "dp_replicate", "dp_shard")
    names = [f"{name}={getattr(plan, name)}" for name in axes if getattr(plan, name) > 1]
    return " ".join(names) or f"pp={plan.pp}"
