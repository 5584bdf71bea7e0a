"""One line on the terminal that says what a search is doing."""

import sys


class Progress:
    """Writes over its own line on stderr. It writes nothing if stderr is not a terminal."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()

    def say(self, text: str) -> None:
        """Shows `text` in place of what was shown before."""
        if self._shown:
            sys.stderr.write(f"\r\x1b[K{f'looking for plans: {text}'[:79]}")
            sys.stderr.flush()

    def end(self) -> None:
        """Clears the line."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
