"""How the commands print their help."""

import argparse

from tensorshard.terminal import fit


class HelpFormat(argparse.HelpFormatter):
    """Keeps the lines of descriptions and examples; breaks those at words that are longer than the terminal is wide."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(f"{indent}{line}" for line in fit(text, width - len(indent)).splitlines())
