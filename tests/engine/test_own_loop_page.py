"""The code of docs/your-own-loop.md runs, in its order, on two ranks."""

import re
from pathlib import Path
from typing import Any

_PAGE = Path(__file__).parents[2] / "docs" / "your-own-loop.md"


def _run(code: str, folder: Path) -> tuple[int, float, list[str]]:
    names: dict[str, Any] = {"folder": folder}
    exec(compile(code, str(_PAGE), "exec"), names)
    return names["engine"].step_count, float(names["norm"]), sorted(names["seen"])


def test_the_page_runs(ranks, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", _PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) == 8
    steps, norm, hooked = ranks(2, _run, "\n".join(blocks), tmp_path)[0]
    assert steps == 8 + 3 and norm > 0  # 16 batches of two epochs are 8 steps
    assert hooked == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert (tmp_path / "weights.pt").is_file()
