"""Names of a package that are imported on first use, so that importing the package costs next to nothing."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any


def lazy_imports(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """What a package takes as its ``__getattr__`` to import each of its names on first use.

    A name that a module of the package has, too, as in ``tensorshard.estimate.estimate``, means what `modules` say: the
    import system would put the module in its place.

    Args:
        package: its ``__name__``.
        modules: the module that each name is imported from, in full.
    """

    class Package(ModuleType):
        def __setattr__(self, name: str, value: Any) -> None:
            if not isinstance(value, ModuleType) or name not in modules:  # else __getattr__ finds it
                super().__setattr__(name, value)

    def import_name(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    sys.modules[package].__class__ = Package
    return import_name
