"""Dotted names: of modules in a model, of Python modules in packages, of values in nested configs."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def join_names(outer: str, inner: str) -> str:
    """The name in a model of what the module `outer` calls `inner`; "" is the model, or the module, itself."""
    return f"{outer}.{inner}" if outer and inner else outer or inner


def is_inside(name: str, modules: Iterable[str]) -> bool:
    """Whether `name` is that of one of `modules`, or of something in it."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def flat_items(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The values of a nested `config` as text, by keys such as ``train.steps``."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flat_items(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)
