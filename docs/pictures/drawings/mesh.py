"""A mesh of three axes, and its groups; and the groups of experts."""

from drawings.svg import rectangle, svg, text
from tensorshard.plan.mesh import coordinates, group_ranks
from tensorshard.plan.plan import AXES, Plan

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
    shapes += _legend(
        left,
        bottom,
        [
            ("tp", "tp", "the same samples; each rank has a part of every layer"),
            ("dp", "dp_shard", "different samples; sharded as zero says"),
            ("pp", "pp", "the same samples, one stage after the other"),
        ],
    )
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


def draw_experts() -> str:
    """Four ranks as ``Plan(dp_shard=4, ep=2)`` lays them out: who shares the experts, and who has the same ones."""
    left, top, ranks, experts = 66, 84, 4, 8
    seen = Plan(dp_shard=ranks, ep=2)
    degrees = dict.fromkeys(AXES, 1) | {"dp_shard": ranks // seen.ep, "cp": seen.ep}  # as Mesh.experts has them
    each = experts // seen.ep
    middle = top + _CELL / 2

    def center(rank: int) -> float:
        return left + rank * _STEP + _CELL / 2

    def around(group: tuple[int, ...], kind: str, margin: int) -> str:
        half = _CELL / 2 + margin
        width = center(group[-1]) - center(group[0]) + 2 * half
        return rectangle(center(group[0]) - half, middle - half, width, 2 * half, kind, corner=16)

    def groups(axis: str) -> list[tuple[int, ...]]:
        return sorted({tuple(group_ranks(rank, axis, degrees)) for rank in range(ranks)})

    shapes = [around(tuple(range(ranks)), "dp", 30)]
    shapes += [around(group, "ep", 20) for group in groups("cp")]
    for (first, second), down in zip(groups("dp_shard"), (-1, 1), strict=True):
        edge = middle + down * (_CELL / 2 + 1)
        bend = f"Q{(center(first) + center(second)) / 2:g} {edge + down * 100:g} {center(second):g} {edge:g}"
        shapes.append(f'<path d="M{center(first):g} {edge:g}{bend}" class="line"/>')
    for rank in range(ranks):
        own = coordinates(rank, degrees)["cp"] * each
        shapes += [
            rectangle(center(rank) - _CELL / 2, top, _CELL, _CELL, "rank", corner=8),
            text(center(rank), middle - 3, f"rank {rank}", "middle"),
            text(center(rank), middle + 15, f"{own} to {own + each - 1}", "small middle"),
        ]
    bottom = top + _CELL + 100
    shapes += _legend(
        left,
        bottom,
        [
            ("ep", "ep", "different experts (numbers in the boxes); tokens travel"),
            ("line", "same", "the same experts; their gradients are summed"),
            ("dp", "dp_shard", "different samples; all other parameters, sharded as zero says"),
        ],
    )
    return svg(
        2 * left + (ranks - 1) * _STEP + _CELL,
        bottom + 66,
        "The groups of Plan(dp_shard=4, ep=2) on four ranks",
        "Ranks 0 1 and 2 3 are groups of ep. Ranks 0 and 2 have experts 0 to 3, ranks 1 and 3 experts 4 to 7. All four "
        "are the group of dp_shard.",
        shapes,
    )


def _legend(left: float, bottom: float, rows: list[tuple[str, str, str]]) -> list[str]:
    """The kind, name and words of each kind of group, in rows."""
    shapes = []
    for row, (kind, axis, words) in enumerate(rows):
        y = bottom + row * 24
        shapes += [
            f'<path d="M{left - 34} {y - 4}h26" class="{kind}"/>',
            text(left, y, axis, "strong"),
            text(left + 72, y, words),
        ]
    return shapes
