"""The user's own modules, which configs may name."""

import os
import sys


def find_own_modules() -> None:
    """Makes modules in the working directory importable, as ``python -m`` does."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
