"""Keeps found tables on disk, for the next time that the same model is split.

Each table is a file in the user's cache folder. A table that is read is checked by numbers like any other. So a
file can cost time, but it cannot make a model wrong.
"""

import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from tensorshard.tensor_parallel.search.model_digest import model_digest
from tensorshard.tensor_parallel.table.table import TensorTable

CACHE_VARIABLE = "TENSORSHARD_CACHE"
"""The environment variable that names the folder, or says ``off``."""

logger = logging.getLogger("tensorshard")


def cache_folder() -> Path | None:
    """The folder of the tables; None if tables are not kept.

    That is the folder that ``TENSORSHARD_CACHE`` names, else ``tensorshard`` in ``XDG_CACHE_HOME``, else
    ``~/.cache/tensorshard``. It is None if the variable is ``off``, or if there is no home directory.
    """
    named = os.environ.get(CACHE_VARIABLE, "")
    if named.lower() == "off":
        return None
    if named:
        return Path(named).expanduser()
    above = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(above) if Path(above).is_absolute() else Path.home() / ".cache") / "tensorshard"
    except RuntimeError:
        return None


@dataclass(frozen=True)
class KeptTable:
    """What is kept of a search.

    Args:
        plan: the table.
        whole: globs of what stays whole, and why.
        alone: what is split alone, and why it is in no pair.
    """

    plan: TensorTable
    whole: dict[str, str]
    alone: dict[str, str]


@dataclass(frozen=True)
class TableFile:
    """The file of one search. It may not exist."""

    path: Path

    @classmethod
    def of(cls, model: nn.Module, size: int, inputs: Any, sequence_parallel: bool) -> "TableFile | None":
        """The file for a search with these arguments; None without a cache."""
        folder = cache_folder()
        if folder is None:
            return None
        digest = model_digest(model, size, inputs, sequence_parallel)
        return cls(folder / "tensor_plans" / f"{type(model).__name__}-tp{size}-{digest}.yaml")

    def read(self) -> KeptTable | None:
        """The table in the file; None if there is no file, or if it cannot be read or is not valid."""
        import yaml

        try:
            held = yaml.safe_load(self.path.read_text())
            plan = TensorTable.from_dict(held["tp_plan"])
            whole, alone = (
                {str(name): str(reason) for name, reason in held[key].items()} for key in ("whole", "alone")
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
            logger.info("the tensor-parallel table in %s is not used: %s", self.path, error)
            return None
        return KeptTable(plan, whole, alone)

    def write(self, kept: KeptTable) -> None:
        """Writes a table to the file in one atomic step. It is no error if the folder cannot be written."""
        import yaml

        held = {"tp_plan": kept.plan.to_dict(), "whole": kept.whole, "alone": kept.alone}
        text = yaml.safe_dump(held, sort_keys=False)
        temporary = ""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=".", suffix=".tmp")
            with os.fdopen(handle, "w") as file:
                file.write(text)
            os.replace(temporary, self.path)
        except OSError as error:
            logger.debug("the tensor-parallel table is not kept in %s: %s", self.path, error)
            Path(temporary).unlink(missing_ok=True) if temporary else None
