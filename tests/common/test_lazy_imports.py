"""Names of packages that are imported on first use: all are there, and importing the packages does not import torch."""

import subprocess
import sys
from importlib import import_module

import pytest

PACKAGES = ("tensorshard.predict", "tensorshard.pipeline", "tensorshard.tensor_parallel", "tensorshard.trainer")


@pytest.mark.parametrize("package", ["tensorshard", *PACKAGES])
def test_every_public_name_is_found(package):
    module = import_module(package)
    assert all(getattr(module, name) is not None for name in module.__all__)


@pytest.mark.parametrize("package", PACKAGES)
def test_another_name_is_not(package):
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nowhere'"):
        _ = import_module(package).nowhere


def test_a_name_means_the_same_after_the_module_of_that_name_is_imported(tmp_path, monkeypatch):
    package = tmp_path / "shapes_on_first_use"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from tensorshard.common.lazy_imports import lazy_imports\n"
        "__getattr__ = lazy_imports(__name__, {'area': 'shapes_on_first_use.area'})\n"
    )
    (package / "area.py").write_text("def area(side):\n    return side * side\n")
    (package / "volume.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    shapes = import_module("shapes_on_first_use")
    import_module("shapes_on_first_use.area")
    volume = import_module("shapes_on_first_use.volume")
    assert shapes.area(3) == 9 and shapes.volume is volume


def test_importing_the_packages_imports_no_torch():
    code = f"import sys; import {', '.join(PACKAGES)}; print('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "False\n"
