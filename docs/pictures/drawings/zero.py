"""What each rank holds at ZeRO 0 to 3, to scale."""

from drawings.svg import rectangle, svg, text

# Bytes a parameter in fp32 under AdamW, which keeps two numbers a parameter; from which ZeRO level on each is sharded.
_HELD = {"parameters": (4, 3), "gradients": (4, 2), "states": (8, 1)}
_LEVELS = {
    0: "nothing is sharded",
    1: "shards optimizer states",
    2: "and gradients",
    3: "and parameters",
}
_RANKS = 4
_BYTE, _TALL, _GAP = 8, 48, 22  # pixels: of a byte's width, of all parameters' height, between ranks


def draw_zero() -> str:
    """What each of four ranks holds at ZeRO 0 to 3, to scale."""
    left, top = 200, 74
    wide = _BYTE * sum(size for size, _ in _HELD.values())
    right = left + _RANKS * (wide + _GAP)
    shapes = []
    for place, (kind, words) in enumerate(
        [("parameters", "parameters"), ("gradients", "gradients"), ("states", "optimizer states (AdamW)")]
    ):
        x = left + place * 130
        shapes += [rectangle(x, 17, 14, 14, kind, corner=2), text(x + 21, 29, words)]
    shapes += [
        text(left + rank * (wide + _GAP) + wide / 2, top - 14, f"rank {rank}", "small middle") for rank in range(_RANKS)
    ]
    shapes.append(text(right, top - 14, "bytes a parameter", "small"))
    for row, (level, words) in enumerate(_LEVELS.items()):
        y = top + row * (_TALL + 18)
        shapes.append(text(20, y + _TALL / 2 - 3, f"ZeRO {level}", "strong"))
        shapes.append(text(20, y + _TALL / 2 + 15, words, "small"))
        for rank in range(_RANKS):
            x = left + rank * (wide + _GAP)
            shapes.append(rectangle(x, y, wide, _TALL, "room"))
            for kind, (size, sharded_from) in _HELD.items():
                shard = level >= sharded_from
                high = _TALL / _RANKS if shard else _TALL
                shapes.append(rectangle(x, y + rank * high * shard, _BYTE * size, high, kind))
                x += _BYTE * size
        shapes.append(text(right, y + _TALL / 2 + 5, f"{bytes_held(level):g}", "strong"))
    description = (
        "Four ranks in a row for each level, each a box as wide as the bytes that a parameter takes and as high as all "
        "parameters. ZeRO 0: all boxes are full. ZeRO 1: a rank has its quarter of the optimizer states. ZeRO 2: its "
        "quarter of the gradients, too. ZeRO 3: its quarter of everything."
    )
    return svg(right + 130, top + 4 * (_TALL + 18), "What each rank holds at ZeRO 0 to 3", description, shapes)


def bytes_held(level: int, ranks: int = _RANKS) -> float:
    """Bytes that a rank holds for each parameter of the model, in fp32 with AdamW, at its fullest in backward."""
    return sum(size / (ranks if level >= sharded_from else 1) for size, sharded_from in _HELD.values())
