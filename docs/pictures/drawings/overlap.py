"""What a step computes and what it sends, stream by stream, as `python -m benchmarks overlap` found it."""

import json

from drawings.svg import RESULTS, rectangle, svg, text

_SHOWN = ("ZeRO 1", "ZeRO 3", "ZeRO 1, 2 replicas", "ZeRO 1, tp=8")
_LEFT, _WIDE, _LANE, _GAP = 120, 700, 20, 12  # pixels: of the names, of the longest step, of a lane, between plans
_COLOURS = {"compute": "activations", "all_gather": "gathered", "reduce_scatter": "gradients", "all_reduce": "states"}
_WORDS = {
    "compute": "kernels",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
}


def draw_overlap() -> str:
    (path,) = RESULTS.glob("overlap-*.json")
    (group,) = json.loads(path.read_text(encoding="utf-8"))["groups"]
    plans = {name: group["settings"]["lanes"][name] for name in _SHOWN}
    rows = {row["contender"]: row for row in group["rows"]}
    unit = _WIDE / max(end for lanes in plans.values() for spans in lanes.values() for _, _, end in spans)
    shapes, y = [], 46.0
    x = float(_LEFT)
    for kind, colour in _COLOURS.items():
        shapes += [rectangle(x, 16, 12, 12, colour), text(x + 18, 27, _WORDS[kind], "small")]
        x += 130
    for name, lanes in plans.items():
        values = {key: value["median"] for key, value in rows[name]["values"].items()}
        said = f"{name}: {values['seconds'] * 1e3:.0f} ms, {values['hidden']:.0%} of the messages' time hidden"
        shapes.append(text(16, y + 14, said, "strong"))
        y += _LANE
        for lane, spans in sorted(lanes.items()):
            shapes.append(text(24, y + 13, lane.replace("messages, ", ""), "small"))
            for kind, start, end in spans:
                width = max(0.6, (end - start) * unit)
                shapes.append(rectangle(_LEFT + start * unit, y, width, _LANE - 4, _COLOURS.get(kind, "memory")))
            y += _LANE
        y += _GAP
    return svg(
        _LEFT + _WIDE + 20,
        int(y),
        "What one rank computes and sends in a step, computed from the recorded order",
        "Kernels and messages of a step under four plans. Gaps between kernels are waits for messages.",
        shapes,
    )
