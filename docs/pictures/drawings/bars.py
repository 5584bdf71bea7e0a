"""The benchmarks as bars: what each contender takes, beside the others."""

import json
from typing import Any

from drawings.svg import RESULTS, rectangle, svg, text

_SHOWN = (  # benchmark, group, the memory that is shown
    ("zero", "60M parameters, ZeRO 2", "steady_peak_bytes"),
    ("zero", "60M parameters, ZeRO 3", "steady_peak_bytes"),
    ("tensor", "Llama 512, 2 layers, 1024 tokens", "peak_bytes"),
    ("pipeline", "8 MLP blocks, 4 ranks", None),
    ("heads", "1 million classes, one process", "peak_bytes"),
)
_LEFT, _WIDE, _BAR, _ROW = 300, 180, 12, 19  # pixels: of the names, of the longest bar, of a bar's height, of a row
_NUMBER = 50  # pixels: behind a bar

Groups = list[tuple[dict[str, Any], tuple[str | None, ...]]]
"""Groups of results, each with the key of what a column shows of it."""


def bar_groups() -> Groups:
    """Step time and memory of what is trained."""
    return [
        (group, ("step_seconds", memory))
        for name, title, memory in _SHOWN
        for group in _groups(name)
        if group["title"] == title
    ]


def checkpoint_groups() -> Groups:
    """Seconds of saves and loads."""
    return [(group, ("blocked", "saved", "loaded")) for group in _groups("checkpoint")]


def _groups(name: str) -> list[dict[str, Any]]:
    paths = sorted(RESULTS.glob(f"{name}-cpu-*.json"))
    return [group for path in paths for group in json.loads(path.read_text(encoding="utf-8"))["groups"]]


def draw_bars(groups: Groups, columns: tuple[str, ...], title: str) -> str:
    """Each of `columns` of every contender of `groups`; a group's longest bars are equally long."""
    places = [_LEFT + place * (_WIDE + _NUMBER + 20) for place in range(len(columns))]
    shapes = [
        rectangle(20, 17, 14, 14, "ours", corner=2),
        text(41, 29, "tensorshard"),
        rectangle(150, 17, 14, 14, "peer", corner=2),
        text(171, 29, "others"),
        *(text(x, 29, f"{column}, best other = 1", "small") for x, column in zip(places, columns, strict=True)),
    ]
    y, words = 62.0, []
    for group, keys in groups:
        rows = [row for row in group["rows"] if row["values"]]
        shapes.append(text(20, y, group["title"], "strong"))
        y += 10
        for row in rows:
            kind = "ours" if row["ours"] else "peer"
            shapes.append(text(32, y + 10.5, row["contender"], "tiny"))
            for x, key, column in zip(places, keys, columns, strict=True):
                if key is None or key not in row["values"]:
                    continue
                best = min(other["values"][key]["median"] for other in rows if not other["ours"])
                most = max(other["values"][key]["median"] for other in rows)
                value = row["values"][key]["median"]
                wide = max(1.0, round(value / most * _WIDE, 1))
                ratio = f"{value / best:.2f}" if value / best >= 0.005 else "below 0.01"
                shapes += [rectangle(x, y, wide, _BAR, kind), text(round(x + wide + 6, 1), y + 10.5, ratio, "tiny")]
                if row["ours"] and column == columns[0]:
                    words.append(f"{group['title']}: {row['contender']}, {column}, {ratio} of the best other's")
            y += _ROW
        y += 24
    return svg(places[-1] + _WIDE + _NUMBER + 30, round(y - 14), title, "; ".join(words), shapes)
