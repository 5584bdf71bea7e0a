"""Modules of the user's own, which configs may name."""

import os
import sys


def find_own_modules() -> None:
    """Has imports find what lies in the working directory, as ``python -m`` does."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
