"""The code in docs/custom-parallel-layer.md runs, and does what it says."""

import re
import types
from pathlib import Path

import torch

import tensorshard.distributed as tsd

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
    tsd.init_process_group()
    page = _template()
    torch.manual_seed(1)
    model = page.Block()
    x = torch.randn(2, 8, 4, 4)
    before = model(x)
    (saving,) = (block for block in _blocks() if "collect_state_dict(model" in block)
    source = saving.replace("model.pt", f"{folder}/model.pt")
    _, save, load = source.split("\n\n")
    exec(save, {**page.__dict__, "model": model})
    other = page.Block()
    exec(load, {**page.__dict__, "model": other})
    torch.testing.assert_close(other(x), before)


def test_saving_and_loading(ranks, tmp_path):
    ranks(2, _save_and_load, str(tmp_path))
