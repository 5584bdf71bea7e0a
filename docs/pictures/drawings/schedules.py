"""A pipeline's schedules, each played through by the library itself."""

from drawings.svg import rectangle, svg, text
from tensorshard.pipeline.run.draw_schedule import DURATIONS, Timeline, timeline
from tensorshard.plan.schedules import find_schedule

_SHOWN = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "zbv": 2}  # stages a rank
_RANKS, _MICRO_BATCHES = 4, 8
_KINDS = {  # an action's class, and its words
    "F": ("parameters", "forward"),
    "B": ("states", "backward"),
    "I": ("activations", "backward: gradients of inputs"),
    "W": ("gradients", "backward: gradients of parameters"),
}
_UNIT, _ROW, _APART = 20, 20, 44  # pixels: of a forward of a quarter of the model, of a rank, between schedules


def draw_schedules() -> str:
    """Four schedules on four ranks and eight micro-batches, one below the other, on one scale of time."""
    played = [_play(name, stages) for name, stages in _SHOWN.items()]
    left, top = 70, 88
    longest = max(one.length for one in played)
    shapes, x = [], 20
    for kind, words in _KINDS.values():
        shapes += [rectangle(x, 17, 14, 14, kind, corner=2), text(x + 20, 29, words)]
        x += 48 + 6.7 * len(words)
    shapes.append(
        text(20, 52, "A box is one micro-batch in one stage. Faded boxes are the rank's second stage.", "small")
    )
    y = float(top)
    for one in played:
        shapes += [
            text(left, y - 8, one.schedule, "strong"),
            text(left + 140, y - 8, f"waits {one.bubble:.0%} of the time, keeps {_kept(one)} micro-batches", "small"),
        ]
        for rank in range(_RANKS):
            shapes += [text(20, y + 14, f"rank {rank}", "small"), *_row(one, rank, left, y)]
            y += _ROW
        y += _APART
    description = "; ".join(
        f"{one.schedule}: the ranks wait {one.bubble:.1%} of the time, and the busiest keeps the activations of "
        f"{_kept(one)} micro-batches"
        for one in played
    )
    title = f"Four schedules of a pipeline of {_RANKS} ranks and {_MICRO_BATCHES} micro-batches"
    return svg(round(left + longest * _UNIT + 20), round(y - _APART + 18), title, description, shapes)


def _play(name: str, stages_per_rank: int) -> Timeline:
    """A stage takes as much less time as there are more of them: the model is the same."""
    durations = {kind: length / stages_per_rank for kind, length in DURATIONS.items()}
    return timeline(
        name, ranks=_RANKS, stages_per_rank=stages_per_rank, micro_batches=_MICRO_BATCHES, durations=durations
    )


def _kept(one: Timeline) -> str:
    """For how many micro-batches the busiest rank keeps the activations of all its layers."""
    return f"{max(one.kept(rank) for rank in range(_RANKS)) / one.stages_per_rank:g}"


def _row(one: Timeline, rank: int, left: float, y: float) -> list[str]:
    own = find_schedule(one.schedule).stages_of(rank, _RANKS, one.stages_per_rank)
    shapes = [rectangle(left, y, one.length * _UNIT, _ROW - 3, "room")]
    for timed in one.ranks[rank]:
        kind, _ = _KINDS[timed.action.kind]
        x, wide = left + timed.start * _UNIT, (timed.end - timed.start) * _UNIT
        pale = " pale" if own.index(timed.action.stage) else ""
        shapes.append(rectangle(x, y, wide - 1, _ROW - 3, kind + pale))
        if wide > 14:
            shapes.append(text(x + wide / 2 - 0.5, y + 12.5, f"{timed.action.micro_batch}", "within middle"))
    return shapes
