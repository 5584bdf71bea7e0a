"""Chooses the table of a plan: the one given, checked; or one from the cache on disk; or one that is searched."""

import hashlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import nn

from tensorshard.common import __version__
from tensorshard.common.paths import cache_folder
from tensorshard.model.tensors import tensor_leaves
from tensorshard.tensor_parallel.apply.apply_table import split_shares
from tensorshard.tensor_parallel.search.check_table import check_tensor_table
from tensorshard.tensor_parallel.search.find_table import find_tensor_plan, published_table
from tensorshard.tensor_parallel.table.table import TensorTable, VerifiedTable
from tensorshard.tensor_parallel.verify.block_kinds import describe_module

logger = logging.getLogger("tensorshard")


def choose_tensor_table(
    model: nn.Module,
    size: int,
    table: Mapping[str, str] | None = None,
    *,
    inputs: Any = None,
    check: bool = True,
    sequence_parallel: bool = False,
) -> VerifiedTable:
    """The table for `model` on `size` ranks: `table` if given, else the result of the search.

    A result is cached on disk. The next time it is taken from there if it still passes the check by numbers. If it does
    not, the search runs again. So a cached file can cost time, but it cannot make a model wrong.

    Args:
        model: on any device, the meta device included; left as it is.
        table: as ``Plan(tp_plan=...)`` takes it.
        inputs: as for ``Engine.step``; None to guess from the model.
        check: whether a given table is checked by numbers. If False, only names, styles and sizes are checked.
        sequence_parallel: whether the model's blocks are to compute on parts of a sequence.

    Raises:
        ValueError: the table given is wrong for this model, or none can be found.
    """
    if table is None:
        return _cached_or_found(model, size, inputs, sequence_parallel)
    given = TensorTable.from_dict(table)
    split, gathered = split_shares(model, given, size)
    if not check:
        if sequence_parallel:
            raise ValueError(
                "sequence_parallel=True needs the check of the table, which finds out where a sequence can be split; "
                "set tp_check=True"
            )
        return VerifiedTable(given, {}, split, size, [], checked=False, kept_share=gathered)
    return check_tensor_table(model, given, size, inputs=inputs, sequence_parallel=sequence_parallel)


# -- the cache --

_Reasons = dict[str, str]


def _cached_or_found(model: nn.Module, size: int, inputs: Any, sequence_parallel: bool) -> VerifiedTable:
    file = _file_of(model, size, inputs, sequence_parallel)
    cached = None if file is None else _read(file)
    if cached is not None:
        table, whole, alone = cached
        try:
            verified = check_tensor_table(model, table, size, inputs=inputs, sequence_parallel=sequence_parallel)
        except ValueError as error:  # the cached table is wrong for this model now: search again
            logger.info("the tensor-parallel table in %s does not fit any more, and is searched again: %s", file, error)
        else:
            logger.info("the tensor-parallel table is from %s, and passed its check again", file)
            return replace(verified, whole={**whole, **verified.whole}, alone=alone)
    searched = find_tensor_plan(model, size, inputs=inputs, sequence_parallel=sequence_parallel)
    if file is not None:
        _write(file, searched)
    return searched


def _file_of(model: nn.Module, size: int, inputs: Any, sequence_parallel: bool) -> Path | None:
    """The file for a search with these arguments, which may not exist; None without a cache."""
    folder = cache_folder()
    if folder is None:
        return None
    digest = model_digest(model, size, inputs, sequence_parallel)
    return folder / "tensor_plans" / f"{type(model).__name__}-tp{size}-{digest}.yaml"


def _read(file: Path) -> tuple[TensorTable, _Reasons, _Reasons] | None:
    """A table, what it leaves whole, and what it splits alone; None if there is no valid file."""
    import yaml

    try:
        held = yaml.safe_load(file.read_text())
        table = TensorTable.from_dict(held["tp_plan"])
        whole, alone = ({str(name): str(reason) for name, reason in held[key].items()} for key in ("whole", "alone"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
        logger.info("the tensor-parallel table in %s is not used: %s", file, error)
        return None
    return table, whole, alone


def _write(file: Path, table: VerifiedTable) -> None:
    """Writes a table to `file` in one atomic step. It is no error if the folder cannot be written."""
    import yaml

    text = yaml.safe_dump(
        {"tp_plan": table.plan.to_dict(), "whole": table.whole, "alone": table.alone}, sort_keys=False
    )
    temporary = ""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=".", suffix=".tmp")
        with os.fdopen(handle, "w") as opened:
            opened.write(text)
        os.replace(temporary, file)
    except OSError as error:
        logger.debug("the tensor-parallel table is not cached in %s: %s", file, error)
        Path(temporary).unlink(missing_ok=True) if temporary else None


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
        (sys.version_info[:2], torch.__version__, __version__, size, sequence_parallel),
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
