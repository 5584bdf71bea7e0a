"""Imports what is installed of the libraries that cases are from, for processes to be forked from this one."""

from contextlib import suppress
from importlib import import_module

from benchmarks.models.registry import STOCK, find_cases

# Other people's packages are imported by the processes that need them: together they would take too long.
_ALSO = ("transformers.modeling_utils", "transformers.modeling_outputs", "timm.models", "torchvision.models")

for _name in (*(family for family in STOCK if family != "plain"), *_ALSO):
    with suppress(ImportError):
        import_module(_name)
find_cases()
