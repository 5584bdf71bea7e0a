"""Imports what is installed of the libraries that cases are from, for processes to be forked from this one."""

from contextlib import suppress
from importlib import import_module

from benchmarks.models.registry import FAMILIES, find_cases, is_installed

_ALSO = ("transformers.modeling_utils", "transformers.modeling_outputs", "timm.models", "torchvision.models")

for _name in (*(family for family in FAMILIES if family != "plain" and is_installed(family)), *_ALSO):
    with suppress(ImportError):
        import_module(_name)
find_cases()
