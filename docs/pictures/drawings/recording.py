"""A terminal, as it showed a command: line after line, at its own pace, but faster."""

import json

from drawings.svg import PICTURES, rectangle, svg, text

_PLAYED = 14.0  # seconds that the picture takes
_WIDE, _HIGH = 7.25, 18  # pixels: of a character, of a line
_SHOWN = 8  # states of a line that changes, such as the progress bar


def draw_recording() -> str:
    """The recorded quickstart. Who prefers no motion sees all of it at once."""
    recorded = json.loads((PICTURES / "quickstart.json").read_text(encoding="utf-8"))
    lines: list[list[tuple[float, str]]] = [[(0.0, f"$ {recorded['command']}")], *recorded["lines"]]
    pace = _PLAYED / recorded["seconds"]
    widest = max(len(words) for states in lines for _, words in states)
    rules, shapes = [], []
    for number, all_states in enumerate(lines):
        y = 34 + number * _HIGH
        states = _few(all_states)
        for at, (begins, words) in enumerate(states):
            if not words:
                continue
            last = at + 1 == len(states)
            name = f"s{number}-{at}"
            animation = f"show 1ms {begins * pace:.1f}s both"
            if not last:
                animation += f", hide 1ms {states[at + 1][0] * pace:.1f}s forwards"
            rules.append(f".{name} {{ animation: {animation} }}")
            shapes.append(text(18, y, words, f"code {name}{'' if last else ' passing'}"))
    style = (
        "<style>@keyframes show { from { opacity: 0 } } @keyframes hide { to { opacity: 0 } } .passing { opacity: 0 }\n"
        "@media (prefers-reduced-motion: no-preference) { .passing { opacity: 1 }\n" + "\n".join(rules) + "\n}</style>"
    )
    return svg(
        round(36 + widest * _WIDE),
        34 + len(lines) * _HIGH,
        f"{recorded['command']}, in a terminal",
        f"It took {recorded['seconds']:.0f} seconds. At the end: {lines[-1][-1][1] if lines[-1] else ''}",
        [style, rectangle(8, 8, round(20 + widest * _WIDE), 18 + len(lines) * _HIGH, "room", corner=6), *shapes],
    )


def _few(states: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """At most `_SHOWN` of a line's states, the last one among them."""
    if len(states) <= _SHOWN:
        return states
    return [states[round(i * (len(states) - 1) / (_SHOWN - 1))] for i in range(_SHOWN)]
