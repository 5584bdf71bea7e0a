"""The peers' lines on docs/coming-from.md run as well, each where the peer is installed."""

import os
import re
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest

from pages import ROOT, blocks
from tensorshard import cli

_SECONDS = 300  # DeepSpeed compiles an operator when it is first used


@pytest.mark.parametrize("peer", [pytest.param("accelerate", marks=pytest.mark.slow), "deepspeed"])
def test_a_peers_lines_run(peer: str, tmp_path: Path) -> None:
    if util.find_spec(peer) is None:
        pytest.skip(f"needs {peer}")
    first, *others = (block for block in blocks("docs/coming-from.md") if block.language == "python")
    (theirs,) = (block for block in others if f"needs {peer};" in (block.reason or ""))
    script = tmp_path / "train.py"
    script.write_text(f"{first.code}\n{theirs.code}\nprint(f'loss {{loss.item():.3f}}')\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    environment = {"DS_ACCELERATOR": "cpu", **os.environ}
    ran = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", ran.stdout)]
    assert len(losses) == 2 and all(0.5 < loss < 3 for loss in losses), ran.stdout + ran.stderr


def _ledgers() -> list[tuple[str, int, str, str]]:
    """The files on the page, for how many ranks, their lines and the ledger below them."""
    text = (ROOT / "docs/coming-from.md").read_text(encoding="utf-8")
    fence = r"```text\n(.*?)```\s+"
    found = re.findall(rf"<!-- ledger: (\S+) (\d+) -->\s+{fence}{fence}", text, re.DOTALL)
    return [(name, int(ranks), lines, ledger) for name, ranks, lines, ledger in found]


def test_ledgers_are_as_they_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(_ledgers()) == 8
    text = (ROOT / "docs/coming-from.md").read_text(encoding="utf-8")
    for name, content in re.findall(r"With `(\S+)` beside it,\s+which is `(.*?)`", text):
        Path(name).write_text(content)
    for name, ranks, lines, ledger in _ledgers():
        Path(name).write_text(lines)
        cli.main(["import", name, "--world-size", str(ranks)])
        assert capsys.readouterr().out.startswith(ledger), name
