"""Memory over a step under several plans, stacked by what it is for."""

import json

from drawings.svg import PICTURES, rectangle, svg, text

_APART, _HIGH = 14, 170  # pixels: between plans, the height of the scale


def draw_memory(file: str, title: str, description: str, area: int = 132) -> str:
    """One step under several plans, stacked by what the memory is for.

    Args:
        file: of the numbers, beside the pictures, such as "memory.json".
        description: what the plans are; the peaks are added to it.
        area: pixels, a plan's width.
    """
    measured = json.loads((PICTURES / file).read_text(encoding="utf-8"))
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
            rectangle(x, y, 14, 14, CLASSES[categories[index]], corner=2),
            text(x + 21, y + 12, categories[index]),
        ]
    for number, (name, plan) in enumerate(plans.items()):
        x0 = left + number * (area + _APART)
        shapes.append(rectangle(x0, top, area, _HIGH, "room"))
        below = [0.0] * len(plan["held"])
        for index in used:
            above = [low + held[index] for low, held in zip(below, plan["held"], strict=True)]
            shapes.append(_area(x0, top, below, above, most, CLASSES[categories[index]], area))
            below = above
        shapes.append(text(x0 + area / 2, top + _HIGH + 20, name, "strong middle"))
        shapes.append(text(x0 + area / 2, top + _HIGH + 38, f"{plan['peak'] / 2**20:.0f} MiB", "small middle"))
    peaks = ", ".join(f"{name} {plan['peak'] / 2**20:.0f} MiB" for name, plan in plans.items())
    width = 2 * left + len(plans) * (area + _APART) - _APART
    return svg(
        width,
        top + _HIGH + 56,
        title,
        f"{description} At the peak: {peaks}.",
        shapes,
    )


CLASSES = {
    "parameters": "parameters",
    "gathered parameters": "gathered",
    "gradients": "gradients",
    "optimizer states": "states",
    "activations": "activations",
    "inputs": "small",
    "temporaries": "temporaries",
}


def _area(x: float, top: float, below: list[float], above: list[float], most: float, kind: str, wide: int) -> str:
    """What lies between two lines of steps, each as wide as the next."""
    step = wide / len(below)

    def line(heights: list[float]) -> list[str]:
        return [
            f"{round(x + (i + side) * step, 1):g},{round(top + _HIGH * (1 - height / most), 1):g}"
            for i, height in enumerate(heights)
            for side in (0, 1)
        ]

    return f'<polygon points="{" ".join([*line(above), *line(below)[::-1]])}" class="{kind}"/>'
