"""Checks of what user code does: an error in place of a wrong result."""
