"""The benchmarks as bars: what each contender takes, beside the others."""

import json
from typing import Any

from drawings.svg import RESULTS, rectangle, svg, text

_SHOWN = (  # benchmark, group, what of tensorshard's, key, how it is called
    ("zero", "60M parameters, ZeRO 3", "tensorshard zero=3", "step_seconds", "step time"),
    ("zero", "60M parameters, ZeRO 3", "tensorshard zero=3", "steady_peak_bytes", "peak memory"),
    ("tensor", "Llama 512, 2 layers, 1024 tokens", "tensorshard tp=2", "step_seconds", "step time"),
    ("tensor", "Llama 512, 2 layers, 1024 tokens", "tensorshard tp=2", "peak_bytes", "peak memory"),
)
_BAR, _ROW = 12, 19  # pixels: of a bar's height, of a row
_NUMBER = 50  # pixels: behind a bar

Groups = list[tuple[dict[str, Any], tuple[str | None, ...]]]
"""Groups of results, each with the key of what a column shows of it."""


def bar_groups() -> Groups:
    """Step time and memory of two plans, each beside the best of the others."""
    found: Groups = []
    for name, title, ours, key, called in _SHOWN:
        for group in _groups(name):
            if group["title"] == title:
                rows = [row for row in group["rows"] if key in row["values"]]
                best = min((r for r in rows if not r["ours"]), key=lambda r: r["values"][key]["median"])
                shown = [next(row for row in rows if row["contender"] == ours), best]
                found.append(({"title": f"{title}: {called}", "rows": shown}, (key,)))
    return found


def checkpoint_groups() -> Groups:
    """Seconds of saves and loads."""
    return [(group, ("blocked", "saved", "loaded")) for group in _groups("checkpoint")]


def _groups(name: str) -> list[dict[str, Any]]:
    paths = sorted(RESULTS.glob(f"{name}-cpu-*.json"))
    return [group for path in paths for group in json.loads(path.read_text(encoding="utf-8"))["groups"]]


def draw_bars(groups: Groups, columns: tuple[str, ...], title: str, left: int = 300, wide: int = 180) -> str:
    """Each of `columns` of every contender of `groups`; a group's longest bars are `wide`, and begin at `left`."""
    places = [left + place * (wide + _NUMBER + 20) for place in range(len(columns))]
    shapes = [
        rectangle(20, 17, 14, 14, "ours", corner=2),
        text(41, 29, "tensorshard"),
        rectangle(150, 17, 14, 14, "peer", corner=2),
        text(171, 29, "others"),
        text(20, 52, "on CPUs; shorter is better; best other = 1", "small"),
        *(text(x, 52, column, "small") for x, column in zip(places, columns, strict=True) if column),
    ]
    y, words = 84.0, []
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
                long = max(1.0, round(value / most * wide, 1))
                ratio = f"{value / best:.2f}" if value / best >= 0.005 else "below 0.01"
                shapes += [rectangle(x, y, long, _BAR, kind), text(round(x + long + 6, 1), y + 10.5, ratio, "tiny")]
                if row["ours"] and column == columns[0]:
                    said = ", ".join(filter(None, (row["contender"], column)))
                    words.append(f"{group['title']}: {said}, {ratio} of the best other's")
            y += _ROW
        y += 24
    return svg(places[-1] + wide + _NUMBER + 30, round(y - 14), title, "; ".join(words), shapes)
