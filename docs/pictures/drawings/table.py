"""A tensor-parallel table drawn on a transformer block: which weights are cut, and which way."""

import json
from typing import Any

from drawings.svg import PICTURES, arrow, rectangle, svg, text

_UNIT = 0.75  # pixels: of a feature
_GAP = 2  # pixels: between the two ranks' parts
_RANKS = ("parameters", "chosen")  # the classes of rank 0's and rank 1's parts


def draw_table() -> str:
    """The block of a small Llama at ``tp=2``, by the table that the search has found."""
    found = json.loads((PICTURES / "table.json").read_text(encoding="utf-8"))
    weights = {entry["name"].rsplit(".", 1)[-1]: entry for entry in found}
    shapes = []
    for x, kind, words in ((20, "parameters", "rank 0"), (100, "chosen", "rank 1"), (180, "peer", "on both ranks")):
        shapes += [rectangle(x, 17, 14, 14, kind, corner=2), text(x + 21, 29, words)]
    shapes.append(text(330, 29, "Each weight is as high as its inputs and as wide as its outputs.", "small"))
    y = 76.0
    for title, columns, middle, row in (
        ("attention", ("q_proj", "k_proj", "v_proj"), ("attention:", "each rank", "its own heads"), "o_proj"),
        ("MLP", ("gate_proj", "up_proj"), ("activation:", "each rank", "its own features"), "down_proj"),
    ):
        part, high = _lane(title, [weights[name] for name in columns], middle, weights[row], y)
        shapes += part
        y += high + 40
    styles = "; ".join(f"{entry['name']}: {entry['style']}" for entry in found)
    return svg(
        820,
        round(y - 8),
        "The tensor-parallel table of a Llama block at tp=2",
        f"Attention, then the MLP: the first layers of each are cut along their outputs (colwise), the last one along "
        f"its inputs (rowwise), and one all-reduce adds the two ranks' sums. {styles}.",
        shapes,
    )


def _lane(
    title: str, columns: list[dict[str, Any]], middle: tuple[str, ...], row: dict[str, Any], y: float
) -> tuple[list[str], float]:
    """One half of the block, from its norm to its sum; and how high it is."""
    heights = [max(34.0, entry["shape"][1] * _UNIT) for entry in columns]
    row_wide, row_high = row["shape"][0] * _UNIT, row["shape"][1] * _UNIT
    high = max(sum(heights) + 30 * len(heights), row_high + 40)
    center = y + high / 2
    shapes = [
        text(20, center - 24, title, "strong"),
        rectangle(20, center - 15, 62, 30, "peer", corner=4),
        text(51, center + 5, "norm", "middle"),
    ]
    at = y + (high - sum(heights) - 30 * len(heights)) / 2
    for entry, tall in zip(columns, heights, strict=True):
        middle_of_it = at + 22 + tall / 2
        wide = entry["shape"][0] * _UNIT
        shapes += [
            arrow([(82, center), (110, center), (110, middle_of_it), (134, middle_of_it)]),
            text(140, at + 16, f"{_short(entry)}: {entry['style']}", "small"),
            rectangle(140, at + 22, wide / 2, tall, _RANKS[0]),
            rectangle(140 + wide / 2 + _GAP, at + 22, wide / 2, tall, _RANKS[1]),
        ]
        if wide / 2 > 30:
            shapes += [text(140 + wide * share + _GAP * share, middle_of_it + 4, f"{round(share)}", "within middle")
                       for share in (0.25, 0.75)]  # fmt: skip
        right = 140 + wide + _GAP
        shapes.append(arrow([(right, middle_of_it), (356, middle_of_it), (356, center), (380, center)]))
        at += tall + 30
    shapes.append(rectangle(384, center - 38, 122, 76, "box", corner=6))
    shapes += [text(445, center - 14 + 19 * line, words, "middle small") for line, words in enumerate(middle)]
    top = center - row_high / 2
    shapes += [
        arrow([(506, center), (536, center)]),
        text(542, top - 6, f"{_short(row)}: {row['style']}", "small"),
        rectangle(542, top, row_wide, row_high / 2, _RANKS[0]),
        rectangle(542, top + row_high / 2 + _GAP, row_wide, row_high / 2, _RANKS[1]),
        text(542 + row_wide / 2, top + row_high * 0.25 + 4, "0", "within middle"),
        text(542 + row_wide / 2, top + row_high * 0.75 + 4, "1", "within middle"),
        arrow([(542 + row_wide, center), (680, center)]),
        rectangle(684, center - 24, 116, 48, "box", corner=6),
        text(742, center - 3, "all-reduce", "middle small"),
        text(742, center + 14, "adds both sums", "middle small"),
    ]
    return shapes, high


def _short(entry: dict[str, Any]) -> str:
    return entry["name"].rsplit(".", 1)[-1]
