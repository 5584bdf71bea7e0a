"""The plans that a search has found, and why it rejected the others.

Also here: plans, times and reasons in words.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from textwrap import wrap

from tensorshard.common.words import seconds_words, size_text
from tensorshard.plan.offload import Offload
from tensorshard.plan.plan import Plan
from tensorshard.predict.estimate import Estimate
from tensorshard.predict.hardware import Hardware
from tensorshard.predict.page_frame import document
from tensorshard.predict.search.candidates import Refusal
from tensorshard.predict.search.problem import SEARCHED
from tensorshard.predict.search.search import CandidateState, Search
from tensorshard.predict.step_time import BUBBLE, COMMUNICATION, OFFLOAD

_WIDTH = 80
_LOSSES = {BUBBLE: "to the bubble", COMMUNICATION: "to exposed communication", OFFLOAD: "to offload"}
_WORTH_SAYING = 0.02
# The order in which rejected values of fields are listed.
_TOLD = ("zero", "recompute", "micro_batches", "tp", "sequence_parallel", "cp", "ep", "pp", "dp_replicate", "offload")


@dataclass(frozen=True)
class FoundPlan:
    """A plan that fits.

    Args:
        plan: with every axis set.
        estimate: its memory on every distinct rank, and its time.
        seconds: estimated seconds of a step.
        reasons: what speaks for or against the plan, in words with numbers.
        measured_seconds: of a step that was really taken; None if none was.
        failed: why the steps that were tried could not be taken; "" if they were, or if none was tried.
    """

    plan: Plan
    estimate: Estimate
    seconds: float
    reasons: list[str]
    measured_seconds: float | None = None
    failed: str = ""

    @property
    def memory(self) -> int:
        """Bytes of the fullest rank's device."""
        return self.estimate.largest.peak_device


@dataclass(frozen=True)
class PlanSearch:
    """The best plans for a model on some machines; iterating goes through them, the best first.

    Args:
        plans: the plans that were found.
        rejected: groups of plans that were not chosen, each with the reason.
        hardware, memory, world_size, global_batch: those of the search. `memory` is the bytes that a rank may take.
        considered: how many plans the world and the batch allow.
        estimated: how many of them were run on fake tensors. The others are predicted to be slower, or do not fit.
        proven: whether everything that was predicted to be near the best was estimated.
        ended: why the search ended before that; "" if it did not, or came to its most estimates.
    """

    plans: list[FoundPlan]
    rejected: list[Refusal]
    hardware: Hardware
    memory: int
    world_size: int
    global_batch: int
    considered: int
    estimated: int
    proven: bool
    ended: str = ""

    def __iter__(self) -> Iterator[FoundPlan]:
        return iter(self.plans)

    def __len__(self) -> int:
        return len(self.plans)

    def __getitem__(self, index: int) -> FoundPlan:
        return self.plans[index]

    @property
    def best(self) -> FoundPlan:
        """The first plan."""
        return self.plans[0]

    def describe(self) -> str:
        """A table of the plans, why the first one is the best, and what was rejected; lines of at most 80 columns."""
        measured = any(choice.measured_seconds is not None or choice.failed for choice in self.plans)
        lines = [self.title(), "", f"{'':>3}  {'measured  ' * measured:>12}{'a step':>24}  {'a rank':>9}  plan"]
        for number, choice in enumerate(self.plans, start=1):
            time = choice.estimate.time_words(choice.seconds)
            head = f"{number:>3}  {_measured_words(choice) * measured}{time:>24}  {size_text(choice.memory):>9}  "
            lines += wrap(plan_words(choice.plan), _WIDTH, initial_indent=head, subsequent_indent=" " * len(head))
        for number, choice in enumerate(self.plans, start=1):
            reasons = [*choice.reasons, *([f"failed: {choice.failed}"] if choice.failed else [])]
            if reasons:
                lines += ["", f"of plan {number}:"]
                lines += [line for reason in reasons for line in _wrapped(reason)]
        if self.rejected:
            lines += ["", "not chosen:", *(line for refusal in self.rejected for line in _wrapped(str(refusal)))]
        lines += ["", *wrap(self._note(), _WIDTH)]
        return "\n".join(lines)

    def title(self) -> str:
        """What the search was for, in one line."""
        ranks = f"{self.world_size} rank{'s' * (self.world_size > 1)} of {self.hardware.name}"
        return f"{ranks}, {size_text(self.memory)} each, {self.global_batch} samples a step"

    def to_html(self, path: str | Path) -> None:
        """Writes a page that needs nothing else: the table, time against memory of each plan found, and the reasons."""
        points = [
            Point(
                choice.seconds,
                choice.estimate.time_words(choice.seconds),
                choice.memory,
                plan_words(choice.plan),
                choice.reasons,
            )
            for choice in self.plans
        ]
        page = search_page(self.title(), points, [str(refusal) for refusal in self.rejected], self._note())
        Path(path).write_text(page, encoding="utf-8")

    def _note(self) -> str:
        grade = "from measured rates" if self.hardware.is_measured else "not validated"
        how = f"{self.considered} plans considered, {self.estimated} estimated; times are {grade}."
        if self.proven:
            return f"{how} Of the others it is only predicted that they take longer, or known that they do not fit."
        why = self.ended or "it came to its most estimates"
        return f"{how} The search ended since {why}: a plan that was not estimated may be better."


def _measured_words(choice: FoundPlan) -> str:
    seconds = choice.measured_seconds
    words = "failed" if choice.failed else "" if seconds is None else seconds_words(seconds)
    return f"{words:>10}  "


def _wrapped(text: str) -> list[str]:
    return wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="    ")


_PICTURE_WIDTH, _PICTURE_HEIGHT, _EDGE = 640, 320, 60


@dataclass(frozen=True)
class Point:
    """A plan in the picture.

    Args: as for :class:`tensorshard.predict.search.plan_search.FoundPlan`; the time and the plan are in words.
    """

    seconds: float
    time: str
    memory: int
    words: str
    reasons: list[str]


def search_page(title: str, points: list[Point], rejected: list[str], note: str) -> str:
    """The page, as HTML."""
    rows = "".join(
        f"<tr><td>{number}</td><td>{point.time}</td><td>{size_text(point.memory)}</td>"
        f"<td><code>{escape(point.words)}</code></td><td>{escape('; '.join(point.reasons))}</td></tr>"
        for number, point in enumerate(points, start=1)
    )
    others = "".join(f"<li>{escape(reason)}</li>" for reason in rejected)
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<table><tr><th></th><th>a step</th><th>a rank</th><th>plan</th><th>reasons</th></tr>{rows}</table>",
        f"<h2>Time against memory</h2>{_picture(points)}",
        f"<h2>Not chosen</h2><ul>{others}</ul><p>{escape(note)}</p>",
    ]
    return document(title, body)


def _picture(points: list[Point]) -> str:
    """Plans as points, labelled with their numbers in the table: the further left and down, the better."""
    longest, most = max(point.seconds for point in points), max(point.memory for point in points)
    marks = []
    for number, point in enumerate(points, start=1):
        x = _EDGE + (_PICTURE_WIDTH - 2 * _EDGE) * point.seconds / longest
        y = _PICTURE_HEIGHT - _EDGE - (_PICTURE_HEIGHT - 2 * _EDGE) * point.memory / most
        label = f"{escape(point.words)}: {point.time}, {size_text(point.memory)}"
        marks.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="#1f77b4"><title>{label}</title></circle>'
            f'<text x="{x + 7:.1f}" y="{y - 7:.1f}" font-size="12">{number}</text>'
        )
    right, low = _PICTURE_WIDTH - _EDGE, _PICTURE_HEIGHT - _EDGE
    axes = (
        f'<path d="M{_EDGE} {_EDGE / 2}V{low}H{right + _EDGE / 2}" fill="none" stroke="currentColor"/>'
        f'<text x="{right}" y="{low + 20}" font-size="12" text-anchor="middle">{seconds_words(longest)}</text>'
        f'<text x="{_EDGE - 5}" y="{_EDGE}" font-size="12" text-anchor="end">{size_text(most)}</text>'
        f'<text x="{_PICTURE_WIDTH / 2}" y="{low + 40}" font-size="12" text-anchor="middle">a step</text>'
    )
    return (
        f'<svg viewBox="0 0 {_PICTURE_WIDTH} {_PICTURE_HEIGHT}" width="{_PICTURE_WIDTH}" role="img" '
        f'aria-label="Plans by time and memory">'
        f"{axes}{''.join(marks)}</svg>"
    )


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
    reasons = []
    if one is not best:
        reasons.append(_compared(one, best))
    if one is best:
        for category, share in _lost(one).items():
            if share >= _WORTH_SAYING:
                reasons.append(f"{_cause(one.plan, category)} loses {share:.0%} {_LOSSES[category]}")
    if one.plan.cp > 1 and one.estimate is not None:
        exchanged = one.estimate.largest.traffic.get("cp", {}).values()
        received = size_text(int(sum(traffic.sent for traffic in exchanged)))
        reasons.append(f"cp={one.plan.cp} splits sequences, of which each rank receives {received} in a step")
    if one.estimate is not None and not one.estimate.largest.on_host and one.estimate.largest.host_bytes:
        reasons.append(f"offload keeps {size_text(one.estimate.largest.host_bytes)} of each rank in host memory")
    return reasons


def rejections(search: Search, best: CandidateState, *, by_memory: bool) -> list[Refusal]:
    """For each other value of a field than the best plan's: why no plan with it was chosen. The last line has those of
    which nothing is known but a prediction, without its numbers."""
    refusals, predicted = [], []
    for name in _TOLD:
        values = {getattr(one.plan, name) for one in search.considered} - {getattr(best.plan, name)}
        for value in sorted(values, key=_by_number):
            group = [one for one in search.considered if getattr(one.plan, name) == value]
            why = _why_not(search, group, best, by_memory=by_memory)
            if why is None:
                predicted.append(_region(name, value))
            else:
                refusals.append(Refusal(_region(name, value), why))
    if predicted:
        refusals.append(Refusal(", ".join(predicted), "not estimated, since predicted to take longer"))
    return refusals


def _by_number(value: object) -> tuple[float, str]:
    return (value, "") if isinstance(value, int) else (0, str(value))


def why_nothing_fits(search: Search) -> list[Refusal]:
    """For each ZeRO level and kind of recomputation, how much memory is missing."""
    refusals = []
    for name in ("zero", "recompute"):
        for value in sorted({getattr(one.plan, name) for one in search.considered}, key=str):
            group = [one for one in search.considered if getattr(one.plan, name) == value and not one.refused]
            if group:
                refusals.append(Refusal(_region(name, value), _excess(search, group)))
    return refusals


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
