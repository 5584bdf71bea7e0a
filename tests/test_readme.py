"""The README's first block of code runs as it is printed."""

import contextlib
import re
from pathlib import Path
from typing import Any
from unittest import mock

from tensorshard.data import StdlibText

_README = Path(__file__).parents[1] / "README.md"


def _run(code: str, folder: Path) -> tuple[int, float]:
    names: dict[str, Any] = {}
    short = mock.patch.object(StdlibText, "__len__", lambda self: 40)  # an epoch of 3 batches, the last of 8 samples
    with contextlib.chdir(folder), short:
        exec(compile(code, str(_README), "exec"), names)
    return names["engine"].step_count, names["loss"].item()


def test_the_first_block_runs(ranks, tmp_path):
    code = re.findall(r"```python\n(.*?)```", _README.read_text(), flags=re.DOTALL)[0]
    found = ranks(2, _run, code, tmp_path)
    assert found[0] == found[1] and found[0][0] == 3 and 4 < found[0][1] < 6
    assert (tmp_path / "checkpoints" / "first-epoch" / "engine.json").is_file()
    assert len(_README.read_text().splitlines()) < 200
