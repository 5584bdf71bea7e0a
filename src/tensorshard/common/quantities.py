"""Numbers, times and errors, for people."""


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
