"""A mesh of three axes, and its groups."""

from drawings.svg import rectangle, svg, text
from tensorshard.plan.mesh import coordinates, group_ranks
from tensorshard.plan.plan import AXES

_DEGREES = dict.fromkeys(AXES, 1) | {"pp": 2, "dp_shard": 2, "tp": 2}
_CELL, _STEP = 54, 136  # pixels: of a rank, from one to the next


def draw_mesh() -> str:
    """Eight ranks as ``Plan(pp=2, dp_shard=2, tp=2)`` lays them out, and the groups along each axis."""
    left, top, apart = 66, 84, 320
    size = 8

    def center(rank: int) -> tuple[float, float]:
        place = coordinates(rank, _DEGREES)
        return left + place["pp"] * apart + place["tp"] * _STEP + _CELL / 2, top + place["dp_shard"] * _STEP + _CELL / 2

    shapes = []
    for stage in range(2):
        x = left + stage * apart
        middle = (_STEP + _CELL) / 2
        shapes.append(rectangle(x - 34, top - 60, 2 * middle + 68, 2 * middle + 120, "room", corner=10))
        shapes.append(text(x + middle, top + middle + 5, f"stage {stage}", "small middle"))
    for axis, kind, margin in (("tp", "tp", 8), ("dp_shard", "dp", 14)):
        for group in sorted({tuple(group_ranks(rank, axis, _DEGREES)) for rank in range(size)}):
            (x0, y0), (x1, y1) = center(group[0]), center(group[-1])
            half = _CELL / 2 + margin
            shapes.append(rectangle(x0 - half, y0 - half, x1 - x0 + 2 * half, y1 - y0 + 2 * half, kind, corner=16))
    for first, second in sorted({tuple(group_ranks(rank, "pp", _DEGREES)) for rank in range(size)}):
        (x0, y), (x1, _) = center(first), center(second)
        outward = -1 if coordinates(first, _DEGREES)["dp_shard"] == 0 else 1
        edge = y + outward * (_CELL / 2 + 1)
        bend = f"Q{(x0 + x1) / 2:g} {edge + outward * 80:g} {x1:g} {edge:g}"
        shapes.append(f'<path d="M{x0:g} {edge:g}{bend}" class="pp"/>')
    for rank in range(size):
        x, y = center(rank)
        shapes += [
            rectangle(x - _CELL / 2, y - _CELL / 2, _CELL, _CELL, "rank", corner=8),
            text(x, y + 5, f"rank {rank}", "middle"),
        ]
    bottom = top + _STEP + _CELL + 92
    for row, (kind, axis, words) in enumerate(
        [
            ("tp", "tp", "the same samples; each rank has a part of every layer"),
            (
                "dp",
                "dp_shard",
                "different samples; sharded as zero says",
            ),
            ("pp", "pp", "the same samples, one stage after the other"),
        ]
    ):
        y = bottom + row * 24
        shapes += [
            f'<path d="M{left - 34} {y - 4}h26" class="{kind}"/>',
            text(left, y, axis, "strong"),
            text(left + 72, y, words),
        ]
    description = (
        "Eight ranks. Stage 0 has ranks 0 to 3, stage 1 ranks 4 to 7. Groups of tp are 0 1, 2 3, 4 5 and 6 7; "
        "0 2, 1 3, 4 6 and 5 7 groups of dp_shard; 0 4, 1 5, 2 6 and 3 7 groups of pp."
    )
    return svg(
        2 * left + apart + _STEP + _CELL,
        bottom + 66,
        "The mesh of Plan(pp=2, dp_shard=2, tp=2) on eight ranks",
        description,
        shapes,
    )
