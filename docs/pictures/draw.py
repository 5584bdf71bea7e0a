"""Draws the pictures of README and docs: ``python docs/pictures/draw.py`` writes them anew, beside this file.

They have a ground of their own, light or dark as the reader's system is, and take their numbers from the package, or
from the results of the benchmarks.
"""

import json
import math
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from tensorshard.mesh import coordinates, group_ranks
from tensorshard.plan import AXES

_STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
.small { font-size: 12px; fill: #59636e }
.strong { font-weight: 600 }
.middle { text-anchor: middle }
.ground { fill: #ffffff; stroke: #d1d9e0 }
.room { fill: #eff2f5 }
.parameters { fill: #0969da }
.gradients { fill: #bf8700 }
.states { fill: #1a7f37 }
.activations { fill: #8250df }
.memory { fill: #59636e }
.gathered { fill: #7cb8ff }
.temporaries { fill: #cf222e }
.chosen { fill: #bc4c00 }
.limit { fill: none; stroke: #d1242f; stroke-width: 1.5; stroke-dasharray: 5 4 }
.rank { fill: #ffffff; stroke: #59636e; stroke-width: 1.5 }
.tp { fill: none; stroke: #0969da; stroke-width: 3 }
.dp { fill: none; stroke: #bf8700; stroke-width: 3 }
.pp { fill: none; stroke: #1a7f37; stroke-width: 3 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .small { fill: #9198a1 }
  .ground { fill: #0d1117; stroke: #3d444d }
  .room { fill: #262c36 }
  .parameters { fill: #4493f8 }
  .gradients { fill: #d29922 }
  .states { fill: #3fb950 }
  .activations { fill: #ab7df8 }
  .memory { fill: #9198a1 }
  .gathered { fill: #a5d0ff }
  .temporaries { fill: #f47067 }
  .chosen { fill: #f0883e }
  .limit { stroke: #f85149 }
  .rank { fill: #0d1117; stroke: #9198a1 }
  .tp { stroke: #4493f8 }
  .dp { stroke: #d29922 }
  .pp { stroke: #3fb950 }
}
"""


def _svg(width: int, height: int, title: str, description: str, shapes: Iterable[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" aria-labelledby="title description">',
            f'<title id="title">{title}</title>',
            f'<desc id="description">{description}</desc>',
            f"<style>{_STYLE}</style>",
            _rectangle(0.5, 0.5, width - 1, height - 1, "ground", corner=8),
            *shapes,
            "</svg>\n",
        ]
    )


def _rectangle(x: float, y: float, width: float, height: float, kind: str, corner: float = 0) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{corner:g}" class="{kind}"/>'


def _text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}"{f" class={chr(34)}{kind}{chr(34)}" if kind else ""}>{words}</text>'


# -- what each rank holds --

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
        shapes += [_rectangle(x, 17, 14, 14, kind, corner=2), _text(x + 21, 29, words)]
    shapes += [
        _text(left + rank * (wide + _GAP) + wide / 2, top - 14, f"rank {rank}", "small middle")
        for rank in range(_RANKS)
    ]
    shapes.append(_text(right, top - 14, "bytes a parameter", "small"))
    for row, (level, words) in enumerate(_LEVELS.items()):
        y = top + row * (_TALL + 18)
        shapes.append(_text(20, y + _TALL / 2 - 3, f"ZeRO {level}", "strong"))
        shapes.append(_text(20, y + _TALL / 2 + 15, words, "small"))
        for rank in range(_RANKS):
            x = left + rank * (wide + _GAP)
            shapes.append(_rectangle(x, y, wide, _TALL, "room"))
            for kind, (size, sharded_from) in _HELD.items():
                shard = level >= sharded_from
                high = _TALL / _RANKS if shard else _TALL
                shapes.append(_rectangle(x, y + rank * high * shard, _BYTE * size, high, kind))
                x += _BYTE * size
        shapes.append(_text(right, y + _TALL / 2 + 5, f"{bytes_held(level):g}", "strong"))
    description = (
        "Four ranks in a row for each level, each a box as wide as the bytes that a parameter takes and as high as all "
        "parameters. ZeRO 0: all boxes are full. ZeRO 1: a rank has its quarter of the optimizer states. ZeRO 2: its "
        "quarter of the gradients, too. ZeRO 3: its quarter of everything."
    )
    return _svg(right + 130, top + 4 * (_TALL + 18), "What each rank holds at ZeRO 0 to 3", description, shapes)


def bytes_held(level: int, ranks: int = _RANKS) -> float:
    """Bytes that a rank holds for each parameter of the model, in fp32 with AdamW, at its fullest in backward."""
    return sum(size / (ranks if level >= sharded_from else 1) for size, sharded_from in _HELD.values())


# -- a mesh and its groups --

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
        shapes.append(_rectangle(x - 34, top - 60, 2 * middle + 68, 2 * middle + 120, "room", corner=10))
        shapes.append(_text(x + middle, top + middle + 5, f"stage {stage}", "small middle"))
    for axis, kind, margin in (("tp", "tp", 8), ("dp_shard", "dp", 14)):
        for group in sorted({tuple(group_ranks(rank, axis, _DEGREES)) for rank in range(size)}):
            (x0, y0), (x1, y1) = center(group[0]), center(group[-1])
            half = _CELL / 2 + margin
            shapes.append(_rectangle(x0 - half, y0 - half, x1 - x0 + 2 * half, y1 - y0 + 2 * half, kind, corner=16))
    for first, second in sorted({tuple(group_ranks(rank, "pp", _DEGREES)) for rank in range(size)}):
        (x0, y), (x1, _) = center(first), center(second)
        outward = -1 if coordinates(first, _DEGREES)["dp_shard"] == 0 else 1
        edge = y + outward * (_CELL / 2 + 1)
        bend = f"Q{(x0 + x1) / 2:g} {edge + outward * 80:g} {x1:g} {edge:g}"
        shapes.append(f'<path d="M{x0:g} {edge:g}{bend}" class="pp"/>')
    for rank in range(size):
        x, y = center(rank)
        shapes += [
            _rectangle(x - _CELL / 2, y - _CELL / 2, _CELL, _CELL, "rank", corner=8),
            _text(x, y + 5, f"rank {rank}", "middle"),
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
            _text(left, y, axis, "strong"),
            _text(left + 72, y, words),
        ]
    description = (
        "Eight ranks. Stage 0 has ranks 0 to 3, stage 1 ranks 4 to 7. Groups of tp are 0 1, 2 3, 4 5 and 6 7; "
        "0 2, 1 3, 4 6 and 5 7 groups of dp_shard; 0 4, 1 5, 2 6 and 3 7 groups of pp."
    )
    return _svg(
        2 * left + apart + _STEP + _CELL,
        bottom + 66,
        "The mesh of Plan(pp=2, dp_shard=2, tp=2) on eight ranks",
        description,
        shapes,
    )


# -- what a step holds, as it was measured --

_AREA, _APART, _HIGH = 132, 14, 170  # pixels: a plan's width, between plans, the height of the scale


def draw_memory() -> str:
    """One step under several plans, stacked by what the memory is for; the numbers are those of memory.json."""
    measured = json.loads(Path(__file__).with_name("memory.json").read_text(encoding="utf-8"))
    plans, categories = measured["plans"], measured["categories"]
    most = max(plan["peak"] for plan in plans.values())
    for plan in plans.values():  # the fuller one of every two moments: there are more than pixels
        plan["held"] = [max(plan["held"][i : i + 2], key=sum) for i in range(0, len(plan["held"]), 2)]
    used = [i for i in range(len(categories)) if any(held[i] for plan in plans.values() for held in plan["held"])]
    left, top = 20, 92
    shapes = []
    for place, index in enumerate(used):
        x, y = left + place % 4 * 170, 17 + place // 4 * 24
        shapes += [
            _rectangle(x, y, 14, 14, _CLASSES[categories[index]], corner=2),
            _text(x + 21, y + 12, categories[index]),
        ]
    for number, (name, plan) in enumerate(plans.items()):
        x0 = left + number * (_AREA + _APART)
        shapes.append(_rectangle(x0, top, _AREA, _HIGH, "room"))
        below = [0.0] * len(plan["held"])
        for index in used:
            above = [low + held[index] for low, held in zip(below, plan["held"], strict=True)]
            shapes.append(_area(x0, top, below, above, most, _CLASSES[categories[index]]))
            below = above
        shapes.append(_text(x0 + _AREA / 2, top + _HIGH + 20, name, "strong middle"))
        shapes.append(_text(x0 + _AREA / 2, top + _HIGH + 38, f"{plan['peak'] / 2**20:.0f} MiB", "small middle"))
    peaks = ", ".join(f"{name} {plan['peak'] / 2**20:.0f} MiB" for name, plan in plans.items())
    width = 2 * left + len(plans) * (_AREA + _APART) - _APART
    return _svg(
        width,
        top + _HIGH + 56,
        "What a step holds on one of two ranks, as it was measured",
        f"Memory over one step under five plans, each adding to the one before. At the peak: {peaks}.",
        shapes,
    )


_CLASSES = {
    "parameters": "parameters",
    "gathered parameters": "gathered",
    "gradients": "gradients",
    "optimizer states": "states",
    "activations": "activations",
    "inputs": "small",
    "temporaries": "temporaries",
}


def _area(x: float, top: float, below: list[float], above: list[float], most: float, kind: str) -> str:
    """What lies between two lines of steps, each as wide as the next."""
    step = _AREA / len(below)

    def line(heights: list[float]) -> list[str]:
        return [
            f"{round(x + (i + side) * step, 1):g},{round(top + _HIGH * (1 - height / most), 1):g}"
            for i, height in enumerate(heights)
            for side in (0, 1)
        ]

    return f'<polygon points="{" ".join([*line(above), *line(below)[::-1]])}" class="{kind}"/>'


# -- what is in memory and what is on disk under offload --

_KINDS = {
    "parameters": "parameters",
    "master weights": "parameters",
    "optimizer states": "states",
    "gradients": "gradients",
    "activations": "activations",
}
_RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
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
    shapes = [_text(20, 30, group["title"], "strong")]
    shown = dict.fromkeys(kind for name in held for kind in on_disk[name])
    x = 20
    for words, kind in (("in memory, at most", "memory"), *((f"{kind} on disk", _KINDS[kind]) for kind in shown)):
        shapes += [_rectangle(x, 45, 14, 14, kind, corner=2), _text(x + 20, 57, words)]
        x += 34 + 8 * len(words)
    for row, contender in enumerate(rows):
        name, y = contender["contender"], top + row * tall
        shapes.append(_text(20, y + 15, name, "strong" if contender["ours"] else ""))
        if name not in held:
            shapes.append(_text(left, y + 15, contender["note"], "small"))
            continue
        at = float(left)
        for kind, nbytes in (("memory", held[name]), *((_KINDS[k], n) for k, n in on_disk[name].items())):
            shapes.append(_rectangle(round(at, 1), y, round(nbytes / longest * _WIDE, 1), _BAR, kind))
            at += nbytes / longest * _WIDE
        total = held[name] + sum(on_disk[name].values())
        shapes.append(_text(round(at + 8, 1), y + 15, f"{held[name] / 1e9:.1f} of {total / 1e9:.1f} GB", "small"))
    bottom = top + len(rows) * tall
    line = round(left + limit / longest * _WIDE, 1)
    shapes.append(f'<path d="M{line:g} {top - 8}V{bottom}" class="limit"/>')
    shapes.append(_text(line, bottom + 16, f"limit: {limit / 1e9:g} GB", "small middle"))
    description = "; ".join(
        f"{row['contender']}: {row['note']}"
        if row["contender"] not in held
        else f"{row['contender']}: {held[row['contender']] / 1e9:.1f} GB in memory, "
        f"{sum(on_disk[row['contender']].values()) / 1e9:.1f} GB on disk"
        for row in rows
    )
    title = "What is in memory and what is on disk"
    return _svg(max(left + _WIDE + 130, x), bottom + 34, title, description, shapes)


def offload_group() -> dict[str, Any] | None:
    """Of the benchmark's results, the largest model's on one process; None before there are any."""
    for path in sorted(_RESULTS.glob("offload-cpu-*.json")):
        groups = json.loads(path.read_text())["groups"]
        alone = [group for group in groups if group["settings"]["ranks"] == 1]
        if alone:
            return max(alone, key=lambda group: group["settings"]["parameters"])
    return None


# -- plans: predicted against measured, and memory against time --

_PANEL = 330  # pixels: of a panel's side
_MARKS = ("parameters", "gradients", "states", "activations", "gathered", "temporaries", "memory", "chosen")


def draw_planner(models: dict[str, Any]) -> str:
    """Every plan that was run as a point: predicted against measured time, and memory against time of one model.

    Args:
        models: as the results of the planner's benchmark have them, by name.
    """
    runs = {name: [run for run in one["runs"] if not run["refused"]] for name, one in models.items()}
    first = next(iter(runs))
    left, top, apart = 70, 62, _PANEL + 90
    second = left + apart
    times = [run[key] for own in runs.values() for run in own for key in ("busy", "predicted_busy")]
    low, high = min(times) / 1.2, max(times) * 1.2

    def along(seconds: float) -> float:
        return math.log(seconds / low) / math.log(high / low) * _PANEL

    shapes = [
        _text(left, 32, "processor time of a step, all ranks together", "strong"),
        _rectangle(left, top, _PANEL, _PANEL, "room"),
        f'<path d="M{left} {top + _PANEL}L{left + _PANEL} {top}" class="limit"/>',
    ]
    for tick in (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0):
        if low < tick < high:
            shapes.append(_text(left + along(tick), top + _PANEL + 18, f"{tick:g} s", "small middle"))
            shapes.append(_text(left - 40, top + _PANEL - along(tick) + 4, f"{tick:g} s", "small"))
    shapes.append(_text(left + _PANEL / 2, top + _PANEL + 38, "measured", "small middle"))
    shapes.append(_text(left + 8, top + 18, "predicted", "small"))
    for mark, own in zip(_MARKS, runs.values(), strict=False):
        for run in own:
            y = top + _PANEL - along(run["predicted_busy"])
            shapes.append(_point(left + along(run["busy"]), y, mark, chosen=run["chosen"]))
    for number, name in enumerate(runs):
        x, y = left + number % 4 * 100, top + _PANEL + 66 + number // 4 * 22
        shapes += [_point(x, y - 4, _MARKS[number], chosen=False), _text(x + 10, y, name, "small")]

    own = runs[first]
    spans = [(min(run[key] for run in own) * 0.95, max(run[key] for run in own) * 1.05) for key in ("busy", "memory")]
    (shortest, longest), (emptiest, fullest) = spans

    def at(run: dict[str, Any]) -> tuple[float, float]:
        across = (run["busy"] - shortest) / (longest - shortest)
        return second + across * _PANEL, top + _PANEL * (fullest - run["memory"]) / (fullest - emptiest)

    shapes += [
        _text(second, 32, f"{first}: memory of the fullest rank against time", "strong"),
        _rectangle(second, top, _PANEL, _PANEL, "room"),
        _text(second + _PANEL / 2, top + _PANEL + 38, f"measured, {shortest:.2g} to {longest:.2g} s", "small middle"),
        _text(second + 8, top + 18, f"memory, {emptiest / 2**20:.0f} to {fullest / 2**20:.0f} MiB", "small"),
    ]
    best = [a for a in own if not any(b["busy"] < a["busy"] and b["memory"] < a["memory"] for b in own)]
    steps = sorted((at(run) for run in best), key=lambda place: place[0])
    line = f"M{steps[0][0]:.1f} {steps[0][1]:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in steps[1:])
    shapes.append(f'<path d="{line}" class="dp"/>')
    shapes += [_point(*at(run), _MARKS[0], chosen=run["chosen"]) for run in own]
    shapes.append(_text(second, top + _PANEL + 66, "On the line: the frontier. Rings: the search's choice.", "small"))
    description = (
        f"Left: {sum(map(len, runs.values()))} plans of {len(runs)} models, the measured time of each against the "
        f"predicted one, mostly a little below the diagonal. Right: the plans of {first} by time and memory, with the "
        "frontier."
    )
    title = "Plans on four CPU ranks: predicted against measured, and memory against time"
    return _svg(second + _PANEL + 40, top + _PANEL + 110, title, description, shapes)


def _point(x: float, y: float, kind: str, *, chosen: bool) -> str:
    dot = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="{kind}"/>'
    return dot + (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="8" class="pp"/>' if chosen else "")


def planner_models() -> dict[str, Any]:
    """What the planner's benchmark found of real runs; nothing before there is any."""
    for path in sorted((_RESULTS / "planner").glob("cpu-*.json")):
        return json.loads(path.read_text())["models"]
    return {}


PICTURES = {"zero.svg": draw_zero, "mesh.svg": draw_mesh, "memory.svg": draw_memory}
if (_group := offload_group()) is not None:
    PICTURES["offload.svg"] = partial(draw_offload, _group)
if _models := planner_models():
    PICTURES["planner.svg"] = partial(draw_planner, _models)

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        Path(__file__).with_name(name).write_text(draw(), encoding="utf-8")
