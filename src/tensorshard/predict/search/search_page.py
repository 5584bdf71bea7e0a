"""A search for plans as one page that needs no network."""

from dataclasses import dataclass
from html import escape

from tensorshard.common.quantities import seconds_words
from tensorshard.predict.page_frame import document
from tensorshard.predict.sizes import size_text

_WIDTH, _HEIGHT, _EDGE = 640, 320, 60


@dataclass(frozen=True)
class Point:
    """A plan in the picture.

    Args: as for :class:`tensorshard.predict.search.plan_search.FoundPlan`; the plan is in words.
    """

    seconds: float
    memory: int
    words: str
    reasons: list[str]


def search_page(title: str, points: list[Point], rejected: list[str], note: str) -> str:
    """The page, as HTML."""
    rows = "".join(
        f"<tr><td>{number}</td><td>{seconds_words(point.seconds)}</td><td>{size_text(point.memory)}</td>"
        f"<td><code>{escape(point.words)}</code></td><td>{escape('; '.join(point.reasons))}</td></tr>"
        for number, point in enumerate(points, start=1)
    )
    others = "".join(f"<li>{escape(reason)}</li>" for reason in rejected)
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<table><tr><th></th><th>a step</th><th>a rank</th><th>plan</th><th>reasons</th></tr>{rows}</table>",
        f"<h2>Time against memory</h2>{_picture(points)}",
        f"<h2>Not chosen</h2><ul>{others}</ul><p>{escape(note)}</p>",
    ]
    return document(title, body)


def _picture(points: list[Point]) -> str:
    """Plans as points, labelled with their numbers in the table: the further left and down, the better."""
    longest, most = max(point.seconds for point in points), max(point.memory for point in points)
    marks = []
    for number, point in enumerate(points, start=1):
        x = _EDGE + (_WIDTH - 2 * _EDGE) * point.seconds / longest
        y = _HEIGHT - _EDGE - (_HEIGHT - 2 * _EDGE) * point.memory / most
        label = f"{escape(point.words)}: {seconds_words(point.seconds)}, {size_text(point.memory)}"
        marks.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="#1f77b4"><title>{label}</title></circle>'
            f'<text x="{x + 7:.1f}" y="{y - 7:.1f}" font-size="12">{number}</text>'
        )
    right, low = _WIDTH - _EDGE, _HEIGHT - _EDGE
    axes = (
        f'<path d="M{_EDGE} {_EDGE / 2}V{low}H{right + _EDGE / 2}" fill="none" stroke="currentColor"/>'
        f'<text x="{right}" y="{low + 20}" font-size="12" text-anchor="middle">{seconds_words(longest)}</text>'
        f'<text x="{_EDGE - 5}" y="{_EDGE}" font-size="12" text-anchor="end">{size_text(most)}</text>'
        f'<text x="{_WIDTH / 2}" y="{low + 40}" font-size="12" text-anchor="middle">a step</text>'
    )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img" aria-label="Plans by time and memory">'
        f"{axes}{''.join(marks)}</svg>"
    )
