"""One way to do a benchmark's work: ours or a peer's."""

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any


@dataclass(frozen=True)
class Contender:
    """One way to do a benchmark's work.

    Args:
        builder: its module in :mod:`benchmarks.peers`.
        requires: a module that has to be installed.
        options: arguments of the module's ``build``.
        environment: environment variables of its ranks, if nothing else runs in them.
    """

    name: str
    builder: str
    requires: str
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def ours(self) -> bool:
        return self.requires.partition(".")[0] == "tensorshard"

    @property
    def installed(self) -> bool:
        try:
            return find_spec(self.requires) is not None
        except ModuleNotFoundError:  # the package around the module is not installed
            return False
