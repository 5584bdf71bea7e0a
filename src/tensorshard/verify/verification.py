"""What a comparison has found: a verdict, a line for each kind of number, the culprit, a hash for CI, a page."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from tensorshard.common import __version__
from tensorshard.common.paths import as_path
from tensorshard.predict.page_frame import document
from tensorshard.verify.compare import KINDS, Comparison
from tensorshard.verify.culprit import Culprit


@dataclass(frozen=True)
class Part:
    """A part of a plan, or the plan without one."""

    name: str
    is_exact: bool


@dataclass(frozen=True)
class Verification:
    """Whether some ranks compute what one process computes. True in a condition if they do.

    Attributes:
        title: what was compared.
        comparison: all that was compared, and what differs.
        culprit: what went wrong first; None if nothing did.
        ranks, steps: how many.
        seconds: how long it took.
        facts: what was compared, for :attr:`hash`: the plan, the model's shapes, versions.
        parts: of the plan; where it is not exact, the plan without each of them.
        notes: sentences, such as what was made smaller.
    """

    title: str
    comparison: Comparison
    culprit: Culprit | None
    ranks: int
    steps: int
    seconds: float
    facts: Mapping[str, Any]
    parts: Sequence[Part] = ()
    notes: Sequence[str] = field(default_factory=tuple)

    def __bool__(self) -> bool:
        return not self.comparison.differences

    @property
    def hash(self) -> str:
        """16 hexadecimal digits of model, plan, versions and verdict. It does not depend on times or errors."""
        text = json.dumps({**self.facts, "exact": bool(self)}, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def describe(self) -> str:
        """The verdict, and a line for each kind of number that was compared."""
        verdict = "exact" if self else "NOT EXACT"
        lines = [
            f"{self.title}: {verdict}, {_count(self.ranks, 'rank')} against one process, {_count(self.steps, 'step')}"
        ]
        lines += [f"  {note}" for note in self.notes]
        lines.append(f"  {'compared':<32}{'how many':>9}  largest error, of what rounding may make")
        lines += [f"  {name:<32}{count:>9,}  {_share(used)}" for name, count, used in self._rows()]
        for part in self.parts:
            lines.append(f"  {part.name:<32}{'exact' if part.is_exact else 'NOT EXACT':>9}")
        if self.culprit is not None:
            lines += [f"  culprit: {_sentence(self.culprit)}"]
        lines.append(f"  certificate {self.hash} ({self.seconds:.1f} s)")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The same for programs: plain numbers, strings, lists and dicts."""
        culprit = None if self.culprit is None else vars(self.culprit)
        return {
            "exact": bool(self),
            "hash": self.hash,
            "title": self.title,
            "ranks": self.ranks,
            "steps": self.steps,
            "seconds": round(self.seconds, 2),
            "facts": dict(self.facts),
            "notes": list(self.notes),
            "compared": [
                {"what": name, "count": count, "largest_error_of_allowed": used} for name, count, used in self._rows()
            ],
            "parts": [vars(part) for part in self.parts],
            "culprit": culprit,
        }

    def to_html(self, path: Any) -> Path:
        """Writes a page that needs no other file; returns its path."""
        target = as_path(path)
        rows = "".join(
            f"<tr><td>{escape(name)}</td><td>{count:,}</td><td>{_share(used)}</td></tr>"
            for name, count, used in self._rows()
        )
        head = "<tr><th>compared</th><th>how many</th><th>largest error, of what rounding may make</th></tr>"
        verdict = '<p class="verdict good">Exact</p>' if self else '<p class="verdict bad">Not exact</p>'
        body = [
            f"<h1>{escape(self.title)}</h1>",
            verdict,
            f"<p>{_count(self.ranks, 'rank')} against one process, {_count(self.steps, 'step')}, {self.seconds:.1f} s. "
            f"Certificate <code>{self.hash}</code>.</p>",
            "".join(f"<p>{escape(note)}</p>" for note in self.notes),
            f'<table class="numbers">{head}{rows}</table>',
        ]
        if self.culprit is not None:
            body += ["<h2>The culprit</h2>", f"<p>{escape(_sentence(self.culprit))}</p>"]
        if self.parts:
            tried = "".join(
                f'<tr><td>{escape(part.name)}</td><td class="{"good" if part.is_exact else "bad"}">'
                f"{'exact' if part.is_exact else 'not exact'}</td></tr>"
                for part in self.parts
            )
            body += ["<h2>Parts of the plan</h2>", f"<table>{tried}</table>"]
        if self.comparison.differences:
            body += ["<h2>What differs first</h2>", self._first_differences()]
        facts = "".join(f"<tr><td>{escape(str(k))}</td><td>{escape(str(v))}</td></tr>" for k, v in self.facts.items())
        body += ["<h2>What the certificate is of</h2>", f"<table>{facts}</table>"]
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(document(self.title, body))
        return target

    def _first_differences(self) -> str:
        rows = "".join(
            f"<tr><td>{one.step + 1 if one.step >= 0 else 'before'}</td><td>{one.kind}</td><td>{escape(one.name)}</td>"
            f"<td>{one.rank}</td><td>{one.error:.1e}</td><td>{one.allowed:.1e}</td></tr>"
            for one in self.comparison.differences[:20]
        )
        head = "<tr><th>step</th><th>kind</th><th>name</th><th>rank</th><th>error</th><th>allowed</th></tr>"
        return f"<table>{head}{rows}</table>"

    def _rows(self) -> list[tuple[str, int, float]]:
        comparison = self.comparison
        return [
            (name, comparison.counts[kind], comparison.largest[kind])
            for kind, name in KINDS.items()
            if comparison.counts[kind]
        ]


def versions() -> dict[str, str]:
    """The versions that a certificate is of."""
    import platform

    import torch

    return {
        "tensorshard": __version__,
        "torch": torch.__version__.partition("+")[0],
        "python": ".".join(platform.python_version_tuple()[:2]),
    }


def _count(number: int, name: str) -> str:
    return f"{number} {name}" + ("" if number == 1 else "s")


def _share(used: float) -> str:
    return f"{used:.0%}" if used < 10 else f"{used:,.0f} times" if used != float("inf") else "without bound"


def _sentence(culprit: Culprit) -> str:
    under = f"under {culprit.axis} alone, " if culprit.axis else ""
    return f"{culprit.kind}: {under}{culprit.explanation} (relative error {culprit.size:.1e})"
