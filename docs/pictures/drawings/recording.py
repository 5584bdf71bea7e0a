"""A terminal, as it showed a command: line after line, and scrolled when it is full."""

import json
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

from drawings.svg import PICTURES, rectangle, svg, text

_PLAYED = 16.0  # seconds that the picture takes
_ROWS = 30  # of the terminal that is drawn
_WIDE, _HIGH = 7.25, 17  # pixels: of a character, of a line
_STATES = 6  # of a line that changes, such as the progress bar, at most


def draw_recording() -> str:
    """The recorded quickstart, faster than it ran. Who prefers no motion sees its end."""
    recorded = json.loads((PICTURES / "quickstart.json").read_text(encoding="utf-8"))
    lines = [[(0.0, f"$ {recorded['command']}")], *(_few(states) for states in recorded["lines"] if states)]
    pace = _pace(lines)
    wide = round(20 + max(len(words) for states in lines for _, words in states) * _WIDE)
    high = _ROWS * _HIGH + 14
    rules, shapes = [], []
    for number, states in enumerate(lines):
        for at, (begins, words) in enumerate(states):
            last = at + 1 == len(states)
            animation = f"show 1ms {pace(begins):.1f}s both"
            if not last:
                animation += f", hide 1ms {pace(states[at + 1][0]):.1f}s forwards"
            rules.append(f".s{number}-{at} {{ animation: {animation} }}")
            look = f"code s{number}-{at}{'' if last else ' passing'}"
            shapes.append(text(20, 28 + number * _HIGH, words, look) if words else "")
    up = max(0, len(lines) - _ROWS) * _HIGH
    moves = [
        f"{pace(states[0][0]) / _PLAYED:.1%} {{ transform: translateY(-{(number - _ROWS) * _HIGH}px) }}"
        for number, states in enumerate(lines, start=1)
        if number > _ROWS
    ]
    style = (
        f"<style>.scrolled {{ transform: translateY(-{up}px) }}\n.passing {{ opacity: 0 }}\n"
        "@keyframes show { from { opacity: 0 } } @keyframes hide { to { opacity: 0 } }\n"
        f"@keyframes scroll {{ 0% {{ transform: none }}\n{chr(10).join(moves)} }}\n"
        "@media (prefers-reduced-motion: no-preference) { .passing { opacity: 1 }\n"
        f".scrolled {{ animation: scroll {_PLAYED:g}s step-end both }}\n{chr(10).join(rules)}\n}}</style>"
    )
    return svg(
        wide + 16,
        high + 16,
        f"{recorded['command']}, in a terminal",
        "Played faster than it ran. The last lines: " + "; ".join(states[-1][1] for states in lines[-12:-8]),
        [
            style,
            rectangle(8, 8, wide, high, "room", corner=6),
            f'<clipPath id="screen">{rectangle(8, 14, wide, high - 6, "room")}</clipPath>',
            '<g clip-path="url(#screen)"><g class="scrolled">',
            *filter(None, shapes),
            "</g></g>",
        ],
    )


def _few(states: list[list[Any]]) -> list[tuple[float, str]]:
    """At most `_STATES` of a line's states, the first and the last one among them."""
    count = min(len(states), _STATES)
    kept = [states[round(i * (len(states) - 1) / max(1, count - 1))] for i in range(count)]
    return [(begins, words) for begins, words in kept]


def _pace(lines: list[list[tuple[float, str]]]) -> Callable[[float], float]:
    """From seconds of the recording to seconds of the picture: half by the clock, half by how much happens."""
    times = sorted(begins for states in lines for begins, _ in states)
    return lambda seconds: _PLAYED * (0.4 * seconds / times[-1] + 0.6 * bisect_left(times, seconds) / len(times))
