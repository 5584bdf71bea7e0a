"""What one rank holds under each ZeRO level and with offload, to scale, as ts.estimate says."""

import json

from drawings.memory import CLASSES
from drawings.svg import PICTURES, rectangle, svg, text

_LEFT, _WIDE, _BAR, _ROW = 190, 470, 22, 36  # pixels: of the names, of the longest bar, its height, from row to row
_ELSEWHERE = {"host_bytes": "in host memory", "disk_bytes": "on disk"}


def draw_held() -> str:
    """A bar for each plan: what the device holds at the peak, by what it is for, then what the host holds."""
    held = json.loads((PICTURES / "held.json").read_text(encoding="utf-8"))
    plans, limit = held["plans"], held["memory"]
    longest = max(plan["device"] + sum(plan[key] for key in _ELSEWHERE) for plan in plans.values())
    used = [
        kind for kind in CLASSES if any(plan["by_category"].get(kind, 0) > longest / 400 for plan in plans.values())
    ]
    shapes, x = [text(20, 30, held["title"], "strong")], 20
    for words, kind in [*((kind, CLASSES[kind]) for kind in used), ("in host memory", "peer")]:
        shapes += [rectangle(x, 46, 14, 14, kind, corner=2), text(x + 20, 58, words, "small")]
        x += 32 + 7 * len(words)
    top = 92
    for row, (name, plan) in enumerate(plans.items()):
        y = top + row * _ROW
        shapes.append(text(20, y + 15, name))
        at = float(_LEFT)
        for kind in used:
            wide = plan["by_category"].get(kind, 0) / longest * _WIDE
            shapes.append(rectangle(round(at, 1), y, round(wide, 1), _BAR, CLASSES[kind]))
            at += wide
        elsewhere = sum(plan[key] for key in _ELSEWHERE)
        if elsewhere:
            shapes.append(rectangle(round(at + 3, 1), y, round(elsewhere / longest * _WIDE, 1), _BAR, "peer"))
            at += 3 + elsewhere / longest * _WIDE
        words = f"{plan['device'] / 2**30:.1f} GiB" + (f" + {elsewhere / 2**30:.1f} GiB" if elsewhere else "")
        shapes.append(text(round(at + 8, 1), y + 15, words, "small"))
    bottom = top + len(plans) * _ROW
    line = round(_LEFT + limit / longest * _WIDE, 1)
    shapes.append(f'<path d="M{line:g} {top - 8}V{bottom - 6}" class="limit"/>')
    shapes.append(text(line, bottom + 10, f"the device has {limit / 2**30:g} GiB", "small middle"))
    description = "; ".join(
        f"{name}: {plan['device'] / 2**30:.1f} GiB on the device"
        + "".join(f", {plan[key] / 2**30:.1f} GiB {words}" for key, words in _ELSEWHERE.items() if plan[key])
        for name, plan in plans.items()
    )
    return svg(_LEFT + _WIDE + 150, bottom + 28, held["title"], description, shapes)
