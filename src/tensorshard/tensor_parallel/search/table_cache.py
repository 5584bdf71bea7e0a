"""Tables that were found, kept on disk for the next time that the same model is split.

One file a table, under the user's cache folder. A table that is taken from it is checked by numbers like any other, so
that a file can cost time but cannot make a model wrong.
"""

import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from tensorshard.tensor_parallel.search.model_digest import model_digest
from tensorshard.tensor_parallel.table.table import TensorPlan

CACHE_VARIABLE = "TENSORSHARD_CACHE"
"""The environment variable that names the folder, or says ``off``."""

logger = logging.getLogger("tensorshard")


def cache_folder() -> Path | None:
    """Where tables are kept, None if they are not.

    The folder that ``TENSORSHARD_CACHE`` names, else ``tensorshard`` in ``XDG_CACHE_HOME``, else
    ``~/.cache/tensorshard``; none if the variable is ``off``, or there is no home.
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
        whole: what stays whole, as globs, and why.
        alone: what is split alone, and why it is in no pair.
    """

    plan: TensorPlan
    whole: dict[str, str]
    alone: dict[str, str]


@dataclass(frozen=True)
class TableFile:
    """The file of one search, which may be there or not."""

    path: Path

    @classmethod
    def of(cls, model: nn.Module, size: int, inputs: Any, sequence_parallel: bool) -> "TableFile | None":
        """The file for what :func:`find_tensor_plan` would be given; None without a cache."""
        folder = cache_folder()
        if folder is None:
            return None
        digest = model_digest(model, size, inputs, sequence_parallel)
        return cls(folder / "tensor_plans" / f"{type(model).__name__}-tp{size}-{digest}.yaml")

    def read(self) -> KeptTable | None:
        """What the file holds; None if it is not there, cannot be read or does not make sense."""
        import yaml

        try:
            held = yaml.safe_load(self.path.read_text())
            plan = TensorPlan.from_dict(held["tp_plan"])
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
        """Puts a table into the file, at once for whoever reads it; a folder that cannot be written is no error."""
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
