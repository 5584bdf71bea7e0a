"""Names of a package that are imported on first use, so that importing the package costs next to nothing."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any


def lazy_imports(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package that imports each of its names on first use.

    A name may also be the name of a module of the package, as in ``tensorshard.predict.estimate``. It then means what
    `modules` say, although the import system would set it to the module.

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
