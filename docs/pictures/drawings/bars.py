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
_TIME = "step_seconds"
_LEFT, _WIDE, _BAR, _ROW = 300, 180, 12, 19  # pixels: of the names, of the longest bar, of a bar's height, of a row
_NUMBER = 50  # pixels: behind a bar


def bar_groups() -> list[tuple[dict[str, Any], str | None]]:
    """The groups of results that are drawn, each with the key of its memory."""
    found = []
    for name, title, memory in _SHOWN:
        for path in sorted(RESULTS.glob(f"{name}-cpu-*.json")):
            groups = json.loads(path.read_text(encoding="utf-8"))["groups"]
            found += [(group, memory) for group in groups if group["title"] == title]
    return found


def draw_bars(groups: list[tuple[dict[str, Any], str | None]]) -> str:
    """Step time and memory of every contender of `groups`; a group's longest bars are equally long."""
    times, memories = _LEFT, _LEFT + _WIDE + _NUMBER + 20
    shapes = [
        rectangle(20, 17, 14, 14, "ours", corner=2),
        text(41, 29, "tensorshard"),
        rectangle(150, 17, 14, 14, "peer", corner=2),
        text(171, 29, "others"),
        text(times, 29, "step time, best other = 1", "small"),
        text(memories, 29, "peak memory, best other = 1", "small"),
    ]
    y, words = 62.0, []
    for group, memory in groups:
        rows = [row for row in group["rows"] if row["values"]]
        shapes.append(text(20, y, group["title"], "strong"))
        y += 10
        for row in rows:
            kind = "ours" if row["ours"] else "peer"
            shapes.append(text(32, y + 10.5, row["contender"], "tiny"))
            for x, key in ((times, _TIME), (memories, memory)):
                if key is None or key not in row["values"]:
                    continue
                best = min(other["values"][key]["median"] for other in rows if not other["ours"])
                most = max(other["values"][key]["median"] for other in rows)
                value = row["values"][key]["median"]
                wide = max(1.0, round(value / most * _WIDE, 1))
                ratio = f"{value / best:.2f}" if value / best >= 0.005 else "below 0.01"
                shapes += [rectangle(x, y, wide, _BAR, kind), text(round(x + wide + 6, 1), y + 10.5, ratio, "tiny")]
                if row["ours"] and key == _TIME:
                    words.append(f"{group['title']}: {row['contender']} takes {ratio} of the best other's time")
            y += _ROW
        y += 24
    return svg(
        memories + _WIDE + _NUMBER + 30,
        round(y - 14),
        "Step time and peak memory beside the peers",
        "; ".join(words),
        shapes,
    )
