"""Configs of other programs, read with an account of every key, and written for three of them.

One engine (``ledger``) follows a table of rules a source; ``outcome`` settles what several keys say together. All here
is plain data: no torch, no Plan.
"""

from tensorshard.foreign_configs.export import PROGRAMS, export
from tensorshard.foreign_configs.sources import SOURCES, Ledger, read_config, read_file

__all__ = ["PROGRAMS", "SOURCES", "Ledger", "export", "read_config", "read_file"]
