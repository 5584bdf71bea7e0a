"""The code in docs/custom-parallel-layer.md runs, and does what it says."""

import contextlib
import re
import types
from pathlib import Path

import torch

PAGE = Path(__file__).parents[2] / "docs" / "custom-parallel-layer.md"


def _blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def _template() -> types.ModuleType:
    """The page's classes and its check, as a module."""
    source = "\n".join(block for block in _blocks() if block.startswith(("import", "class", "def")))
    module = types.ModuleType("custom_parallel_layer")
    exec(source, module.__dict__)
    return module


def _check() -> None:
    _template().check()


def test_the_template(ranks):
    ranks(2, _check)
    ranks(4, _check)


def _save_and_load(folder: str) -> None:
    page = _template()
    (saving,) = (block for block in _blocks() if "collect_state_dict(model)" in block)
    names = dict(page.__dict__)
    with contextlib.chdir(folder):
        torch.manual_seed(1)
        exec(saving, names)
        model, before = names["model"], names["state"]
        names["state"] = torch.load("model.pt")
        loaded = page.nn.Sequential(page.nn.Conv2d(3, 8, 3, padding=1), page.Block())
        loaded.load_state_dict(page.ts.relocate_state_dict(loaded, names["state"]))
    x = torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(loaded(x), model(x))
    assert bool(before) == (torch.distributed.get_rank() == 0)


def test_saving_and_loading(ranks, tmp_path):
    ranks(2, _save_and_load, str(tmp_path))
