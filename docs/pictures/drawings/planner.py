"""Plans as points: predicted against measured time, and memory against time."""

import json
import math
from typing import Any

from drawings.svg import RESULTS, rectangle, svg, text

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
    times = [run[key] for own in runs.values() for run in own for key in ("wall", "predicted")]
    low, high = min(times) / 1.2, max(times) * 1.2

    def along(seconds: float) -> float:
        return math.log(seconds / low) / math.log(high / low) * _PANEL

    shapes = [
        text(left, 32, "time of a step on four ranks", "strong"),
        rectangle(left, top, _PANEL, _PANEL, "room"),
        f'<path d="M{left} {top + _PANEL}L{left + _PANEL} {top}" class="limit"/>',
    ]
    for tick in (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0):
        if low < tick < high:
            shapes.append(text(left + along(tick), top + _PANEL + 18, f"{tick:g} s", "small middle"))
            shapes.append(text(left - 40, top + _PANEL - along(tick) + 4, f"{tick:g} s", "small"))
    shapes.append(text(left + _PANEL / 2, top + _PANEL + 38, "measured, two ranks to a core", "small middle"))
    shapes.append(text(left + 8, top + 18, "predicted, a core for each rank", "small"))
    for mark, own in zip(_MARKS, runs.values(), strict=False):
        for run in own:
            y = top + _PANEL - along(run["predicted"])
            shapes.append(_point(left + along(run["wall"]), y, mark, chosen=run["chosen"]))
    for number, name in enumerate(runs):
        x, y = left + number % 4 * 100, top + _PANEL + 66 + number // 4 * 22
        shapes += [_point(x, y - 4, _MARKS[number], chosen=False), text(x + 10, y, name, "small")]

    own = runs[first]
    spans = [(min(run[key] for run in own) * 0.95, max(run[key] for run in own) * 1.05) for key in ("busy", "memory")]
    (shortest, longest), (emptiest, fullest) = spans

    def at(run: dict[str, Any]) -> tuple[float, float]:
        across = (run["busy"] - shortest) / (longest - shortest)
        return second + across * _PANEL, top + _PANEL * (fullest - run["memory"]) / (fullest - emptiest)

    shapes += [
        text(second, 32, f"{first}: memory of the fullest rank against time", "strong"),
        rectangle(second, top, _PANEL, _PANEL, "room"),
        text(second + _PANEL / 2, top + _PANEL + 38, f"measured, {shortest:.2g} to {longest:.2g} s", "small middle"),
        text(second + 8, top + 18, f"memory, {emptiest / 2**20:.0f} to {fullest / 2**20:.0f} MiB", "small"),
    ]
    best = [a for a in own if not any(b["busy"] < a["busy"] and b["memory"] < a["memory"] for b in own)]
    steps = sorted((at(run) for run in best), key=lambda place: place[0])
    line = f"M{steps[0][0]:.1f} {steps[0][1]:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in steps[1:])
    shapes.append(f'<path d="{line}" class="dp"/>')
    shapes += [_point(*at(run), _MARKS[0], chosen=run["chosen"]) for run in own]
    shapes.append(text(second, top + _PANEL + 66, "On the line: the frontier. Rings: the search's choice.", "small"))
    description = (
        f"Left: {sum(map(len, runs.values()))} plans of {len(runs)} models, the measured time of each against the "
        f"predicted one, mostly about twice as long, since two ranks share a core. Right: the plans of {first} by time "
        "and memory, with the frontier."
    )
    title = "Plans on four CPU ranks: predicted against measured, and memory against time"
    return svg(second + _PANEL + 40, top + _PANEL + 110, title, description, shapes)


def _point(x: float, y: float, kind: str, *, chosen: bool) -> str:
    dot = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="{kind}"/>'
    return dot + (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="8" class="pp"/>' if chosen else "")


def planner_models() -> dict[str, Any]:
    """What the planner's benchmark found of real runs; nothing before there is any."""
    for path in sorted((RESULTS / "planner").glob("cpu-*.json")):
        return json.loads(path.read_text())["models"]
    return {}
