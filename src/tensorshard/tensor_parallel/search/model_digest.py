"""A digest of everything that the search for a table depends on. Processes that would find the same table agree."""

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import nn

import tensorshard
from tensorshard.model.tensors import tensor_leaves
from tensorshard.tensor_parallel.search.published_tables import published_plan
from tensorshard.tensor_parallel.verify.block_kinds import describe_module

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
        tuple(published_plan(model).plan.to_dict().items()),
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
