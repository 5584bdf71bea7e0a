"""Numbers of bytes, for people."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size_text(nbytes: float) -> str:
    """`nbytes` in the unit that leaves few digits: ``size_text(3 * 2**29)`` is "1.50 GiB"."""
    size, unit = float(nbytes), 0
    while abs(size) >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    digits = 0 if unit == 0 or abs(size) >= 100 else 1 if abs(size) >= 10 else 2
    return f"{size:.{digits}f} {_UNITS[unit]}"
