"""Caches the tables of searches on disk, for the next time that the same model is split.

Each table is a file in the user's cache folder. A table that is read is checked by numbers like any other. So a
file can cost time, but it cannot make a model wrong.
"""

import hashlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import nn

import tensorshard
from tensorshard.model.tensors import tensor_leaves
from tensorshard.tensor_parallel.search.published_tables import published_table
from tensorshard.tensor_parallel.table.table import TensorTable
from tensorshard.tensor_parallel.verify.block_kinds import describe_module

CACHE_VARIABLE = "TENSORSHARD_CACHE"
"""The environment variable that names the folder, or says ``off``."""

logger = logging.getLogger("tensorshard")


def cache_folder() -> Path | None:
    """The folder of the tables; None if tables are not cached.

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
class CachedTable:
    """What is cached of a search.

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

    def read(self) -> CachedTable | None:
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
        return CachedTable(plan, whole, alone)

    def write(self, kept: CachedTable) -> None:
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
            logger.debug("the tensor-parallel table is not cached in %s: %s", self.path, error)
            Path(temporary).unlink(missing_ok=True) if temporary else None


# -- a digest of everything that the search for a table depends on --


_SEARCH = Path(__file__).parents[1]


def model_digest(model: nn.Module, size: int, inputs: Any, sequence_parallel: bool) -> str:
    """32 hexadecimal digits that identify the input and the code of a search.

    They cover: the classes of the model's modules, their source files and the versions of their libraries; the shapes
    of parameters and buffers, which of them are tied, and the attributes of the modules; the published table; the
    shapes and types of `inputs`; the number of ranks; the versions of Python, torch and tensorshard, and the source of
    the search itself. Values of weights and the number of devices do not count.
    """
    digest = hashlib.blake2b(digest_size=16)
    for fact in (
        (sys.version_info[:2], torch.__version__, tensorshard.__version__, size, sequence_parallel),
        tuple(_digest_of_file(path) for path in sorted(_SEARCH.rglob("*.py"))),
        tuple(_code_of(model)),
        describe_module(model),
        tuple((name, str(p.dtype), p.requires_grad) for name, p in model.named_parameters()),
        _ties(model),
        tuple(published_table(model)[0].to_dict().items()),
        None if inputs is None else tuple((tuple(t.shape), str(t.dtype)) for t in tensor_leaves(inputs)),
    ):
        _add(digest, fact)
    return digest.hexdigest()


def _code_of(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Name and code of each class of `model`'s modules, and of each base class, except for torch's."""
    classes = {kind: None for module in model.modules() for kind in type(module).__mro__}
    for kind in classes:
        library = kind.__module__.partition(".")[0]
        if library in ("torch", "builtins", "typing", "abc"):
            continue
        file = getattr(sys.modules.get(kind.__module__), "__file__", None)
        yield f"{kind.__module__}.{kind.__qualname__}", str(getattr(sys.modules.get(library), "__version__", ""))
        if file is not None and Path(file).is_file():
            yield "in", _digest_of_file(Path(file))
        else:  # typed in, at a prompt or in a notebook
            for name, value in vars(kind).items():
                code = getattr(value, "__code__", None)
                if code is not None:
                    yield name, "".join(_canonical(code))


def _ties(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(tied) for tied in names.values() if len(tied) > 1)


def _digest_of_file(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def _add(digest: Any, fact: Any) -> None:
    for text in _canonical(fact):
        digest.update(text.encode(errors="surrogatepass"))
        digest.update(b"\0")


def _canonical(value: Any) -> Iterator[str]:
    """`value`, a nest of tuples and sets, as words that are the same in every process: no addresses, sets in order."""
    if isinstance(value, tuple):
        yield "("
        for item in value:
            yield from _canonical(item)
        yield ")"
    elif isinstance(value, frozenset):
        yield "{"
        for words in sorted(tuple(_canonical(item)) for item in value):
            yield from words
        yield "}"
    elif isinstance(value, CodeType):
        yield value.co_code.hex()
        yield from _canonical((value.co_names, value.co_varnames, value.co_freevars, value.co_consts))
    elif isinstance(value, type):
        yield f"{value.__module__}.{value.__qualname__}"
    else:
        yield repr(value)
