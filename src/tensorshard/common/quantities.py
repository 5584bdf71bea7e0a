"""Numbers and times, for people."""


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
