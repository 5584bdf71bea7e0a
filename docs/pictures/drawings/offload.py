"""What the contenders of the offload benchmark have in memory and on disk."""

import json
from typing import Any

from drawings.svg import RESULTS, rectangle, svg, text

_KINDS = {
    "parameters": "parameters",
    "master weights": "parameters",
    "optimizer states": "states",
    "gradients": "gradients",
    "activations": "activations",
}
_BAR, _WIDE = 20, 520  # pixels: of a bar's height, of the longest bar


def draw_offload(group: dict[str, Any]) -> str:
    """What each contender of a group of the offload benchmark held in memory and on disk, to scale.

    Args:
        group: as its results file has it.
    """
    rows, limit = group["rows"], group["settings"]["memory_bytes"]
    on_disk = group["settings"]["on_disk"]
    held = {row["contender"]: row["values"]["peak_bytes"]["median"] for row in rows if row["values"]}
    longest = max([limit, *(held[name] + sum(on_disk[name].values()) for name in held)])
    left, top, tall = 390, 88, _BAR + 16
    shapes = [text(20, 30, group["title"], "strong")]
    shown = dict.fromkeys(kind for name in held for kind in on_disk[name])
    x = 20
    for words, kind in (("in memory, at most", "memory"), *((f"{kind} on disk", _KINDS[kind]) for kind in shown)):
        shapes += [rectangle(x, 45, 14, 14, kind, corner=2), text(x + 20, 57, words)]
        x += 34 + 8 * len(words)
    for row, contender in enumerate(rows):
        name, y = contender["contender"], top + row * tall
        shapes.append(text(20, y + 15, name, "strong" if contender["ours"] else ""))
        if name not in held:
            shapes.append(text(left, y + 15, contender["note"], "small"))
            continue
        at = float(left)
        for kind, nbytes in (("memory", held[name]), *((_KINDS[k], n) for k, n in on_disk[name].items())):
            shapes.append(rectangle(round(at, 1), y, round(nbytes / longest * _WIDE, 1), _BAR, kind))
            at += nbytes / longest * _WIDE
        total = held[name] + sum(on_disk[name].values())
        shapes.append(text(round(at + 8, 1), y + 15, f"{held[name] / 1e9:.1f} of {total / 1e9:.1f} GB", "small"))
    bottom = top + len(rows) * tall
    line = round(left + limit / longest * _WIDE, 1)
    shapes.append(f'<path d="M{line:g} {top - 8}V{bottom}" class="limit"/>')
    shapes.append(text(line, bottom + 16, f"limit: {limit / 1e9:g} GB", "small middle"))
    description = "; ".join(
        f"{row['contender']}: {row['note']}"
        if row["contender"] not in held
        else f"{row['contender']}: {held[row['contender']] / 1e9:.1f} GB in memory, "
        f"{sum(on_disk[row['contender']].values()) / 1e9:.1f} GB on disk"
        for row in rows
    )
    title = "What is in memory and what is on disk"
    return svg(max(left + _WIDE + 130, x), bottom + 34, title, description, shapes)


def offload_group() -> dict[str, Any] | None:
    """Of the benchmark's results, the largest model's on one process; None before there are any."""
    for path in sorted(RESULTS.glob("offload-cpu-*.json")):
        groups = json.loads(path.read_text())["groups"]
        alone = [group for group in groups if group["settings"]["ranks"] == 1]
        if alone:
            return max(alone, key=lambda group: group["settings"]["parameters"])
    return None
