"""The losses of one training with dropout under five layouts: tensorshard's, and torch's."""

import json
import math

from drawings.svg import PICTURES, rectangle, svg, text

_WIDE, _HIGH, _LEFT, _TOP, _APART = 310, 190, 52, 78, 66  # pixels
_FROM = 30  # the first step that is drawn
_LOOKS = (("line", "memory"), ("tp", "parameters"), ("dp", "gradients"), ("pp", "states"), ("ep", "activations"))


def draw_dropout() -> str:
    measured = json.loads((PICTURES / "dropout.json").read_text(encoding="utf-8"))["runs"]
    losses = [loss for runs in measured.values() for run in runs.values() for loss in run[_FROM:]]
    low, high = min(losses), max(losses)
    shapes, spoken = [], []
    for place, (side, runs) in enumerate(measured.items()):
        x0 = _LEFT + place * (_WIDE + _APART)
        apart = max(abs(a - b) for run in runs.values() for a, b in zip(run, runs["1 process"], strict=True))
        said = f"{apart:.0e}".replace("e-0", "e-") if apart < 1e-3 else f"{apart:.2f}"
        name = {"tensorshard": "tensorshard", "torch": "torch: FSDP2 and tensor parallelism"}[side]
        shapes.append(text(x0, 26, name, "strong"))
        shapes.append(text(x0, 46, f"five layouts, at most {said} from one process", "small"))
        shapes.append(rectangle(x0, _TOP, _WIDE, _HIGH, "room"))
        for tenths in range(math.ceil(5 * low), math.floor(5 * high) + 1):
            loss = tenths / 5
            y = _TOP + _HIGH * (high - loss) / (high - low)
            shapes.append(f'<path d="M{x0} {y:.1f}h{_WIDE}" class="line pale"/>')
            shapes.append(text(x0 - 24, y + 4, f"{loss:.1f}", "small"))
        for (line, _), run in zip(_LOOKS, runs.values(), strict=True):
            points = " ".join(
                f"{x0 + _WIDE * i / (len(run) - _FROM - 1):.1f},{_TOP + _HIGH * (high - loss) / (high - low):.1f}"
                for i, loss in enumerate(run[_FROM:])
            )
            shapes.append(f'<polyline points="{points}" class="{line}" style="stroke-width: 1.3"/>')
        for index, ((_, square), layout) in enumerate(zip(_LOOKS, runs, strict=True)):
            x, y = x0 + index % 3 * 108, _TOP + _HIGH + 40 + index // 3 * 22
            shapes += [rectangle(x, y - 11, 12, 12, square, corner=2), text(x + 18, y, layout, "small")]
        shapes.append(text(x0 + 24, _TOP + _HIGH + 17, f"step {_FROM + 1}", "tiny middle"))
        shapes.append(text(x0 + _WIDE - 12, _TOP + _HIGH + 17, f"{len(runs['1 process'])}", "tiny middle"))
        spoken.append(f"{name}: five layouts whose losses are at most {said} from one process.")
    return svg(
        2 * _LEFT + 2 * _WIDE + _APART - 20,
        _TOP + _HIGH + 78,
        "Loss of a small language model with dropout of 0.2: the same batches, weights and seed",
        " ".join(spoken),
        shapes,
    )
