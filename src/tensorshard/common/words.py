"""Texts for people: kinds of values, numbers, errors, dotted names, and lines as wide as a terminal."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

# A name, a gap of two spaces or more, then the text about it.
_NAMED = re.compile(r"\s*\S+( \S+)*?\s{2,}(?=\S)")
_LONGEST_NAME = 32
_GAP = re.compile(r"\s{2,}")
_SINGLE = re.compile(r"(?<=\S) (?=\S)")
_STAND_IN = "\0"  # replaces a space at which a line must not be broken


def with_article(name: str) -> str:
    """A name after "a" or "an".

    Examples:
        >>> with_article("Linear"), with_article("AdamW")
        ('a Linear', 'an AdamW')
    """
    return f"an {name}" if name[:1].lower() in "aeio" else f"a {name}"


def kind_of(value: object) -> str:
    """The name of a value's class after "a" or "an": "a Linear"."""
    return with_article(type(value).__name__)


def install_extra(name: str) -> str:
    """The command that installs an optional part of this package, which no index of packages has."""
    return f"`pip install -c constraints.txt '.[{name}]'` in the clone of tensorshard"


def format_count(number: float) -> str:
    """Three or four digits and a unit: ``format_count(12345)`` is "12.3k"."""
    for unit in ("", "k", "M"):
        if abs(number) < 1000:
            return f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:.1f}G"


def seconds_words(seconds: float) -> str:
    """``seconds_words(0.0021)`` is "2.10 ms"."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


def span_words(seconds: float, span: Sequence[float] | None) -> str:
    """Seconds with the low and the high bound that they are known within, if there are any:
    ``span_words(0.031, (0.024, 0.0422))`` is "31.0 ms (24.0 to 42.2 ms)"."""
    if span is None:
        return seconds_words(seconds)
    unit, factor = ("s", 1.0) if seconds >= 1 else ("ms", 1e3)
    middle, low, high = (_three_digits(value * factor) for value in (seconds, *span))
    return f"{middle} {unit} ({low} to {high} {unit})"


def flops_words(flops: float) -> str:
    """Floating-point operations with a unit: ``flops_words(3.1e13)`` is "31.0 TFLOP"."""
    unit = 0
    while flops >= 1000 and unit < len(_FLOPS) - 1:
        flops, unit = flops / 1000, unit + 1
    return f"{_three_digits(flops)} {_FLOPS[unit]}"


def speed_words(flops_per_second: float, mfu: float | None = None) -> str:
    """``speed_words(4.52e10, 0.41)`` is "45.2 GFLOP/s, 41.0% MFU"."""
    return f"{flops_words(flops_per_second)}/s" + ("" if mfu is None else f", {mfu:.1%} MFU")


_FLOPS = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP")


def _three_digits(value: float) -> str:
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size_text(nbytes: float) -> str:
    """`nbytes` in the unit that leaves few digits: ``size_text(3 * 2**29)`` is "1.50 GiB"."""
    size, unit = float(nbytes), 0
    while abs(size) >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    digits = 0 if unit == 0 or abs(size) >= 100 else 1 if abs(size) >= 10 else 2
    return f"{size:.{digits}f} {_UNITS[unit]}"


def first_line(error: Exception) -> str:
    """The first line of what `error` says, or its class if it says nothing."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0]


def terminal_width(stream: TextIO) -> int | None:
    """Columns of the terminal that `stream` writes to; None if it is a file or a pipe, for lines of any length."""
    import shutil  # imported when used: `import tensorshard` stays quick

    return shutil.get_terminal_size().columns if stream.isatty() else None


def fit(text: str, width: int | None) -> str:
    """`text`, its lines broken at words to at most `width` columns. Longer words, such as paths, stay whole.

    The rest of a line that begins with a name and a gap of two spaces or more (``optimizer      AdamW``) goes under the
    text after the gap. The rest of any other line is indented by two columns more than its beginning. If there are more
    gaps (``rank 0: 3 GiB  rank 1: 4 GiB``), lines are broken at these, unless the pieces are too long.
    """
    if width is None:
        return text
    return "\n".join(_fit_line(line, width) for line in text.split("\n"))


def _fit_line(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    named = _NAMED.match(line)
    indent = len(line) - len(line.lstrip()) + 2
    if named is not None and named.end() <= min(_LONGEST_NAME, width // 2):
        indent = named.end()
    parts = _GAP.split(line[indent:].strip())
    if len(parts) > 1 and max(map(len, parts)) <= width - indent:
        line = line[:indent] + _SINGLE.sub(_STAND_IN, line[indent:])
    import textwrap  # imported when used: `import tensorshard` stays quick

    filled = textwrap.fill(
        line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False, tabsize=4
    )
    return filled.replace(_STAND_IN, " ")


def join_names(outer: str, inner: str) -> str:
    """The name in a model of what the module `outer` calls `inner`; "" is the model, or the module, itself."""
    return f"{outer}.{inner}" if outer and inner else outer or inner


def is_inside(name: str, modules: Iterable[str]) -> bool:
    """Whether `name` is that of one of `modules`, or of something in it."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def flat_items(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The values of a nested `config` as text, by keys such as ``train.steps``."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flat_items(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)
