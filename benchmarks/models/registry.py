"""All cases, by their keys."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec

from benchmarks.models.case import Case

STOCK = ("plain", "transformers", "timm", "torchvision", "diffusers")
PACKAGES = "packages"
FAMILIES = (*STOCK, PACKAGES)

_MODULES = {
    "plain": ("plain_language", "plain_vision", "plain_other"),
    "transformers": ("transformers_text", "transformers_encoders", "transformers_vision", "transformers_other"),
    "timm": ("timm_",),
    "torchvision": ("torchvision_",),
    "diffusers": ("diffusers_",),
    PACKAGES: ("packages_language", "packages_vision", "packages_science", "packages_other"),
}


@cache
def find_cases() -> dict[str, Case]:
    """Every case by its key, family after family; none of their libraries is imported for it."""
    cases: dict[str, Case] = {}
    for family in FAMILIES:
        for name in _MODULES[family]:
            for case in import_module(f"benchmarks.models.{name}").CASES:
                if case.family != family or case.key in cases:
                    raise ValueError(f"{case.key!r}, in {name}.py, is there twice or of another family")
                cases[case.key] = case
    return cases


def is_installed(case: Case) -> bool:
    """Whether the library that the model is from is there."""
    return case.family == "plain" or find_spec(case.needs or case.family) is not None
