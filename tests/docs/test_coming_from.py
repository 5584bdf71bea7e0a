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


_CONFIGS = ROOT / "examples" / "configs_of_others"


@pytest.mark.parametrize("ledger", sorted(path.name for path in _CONFIGS.glob("*.ledger")))
def test_ledgers_are_as_they_are_printed(
    ledger: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(_CONFIGS)
    command, printed = Path(ledger).read_text(encoding="utf-8").split("\n", 1)
    cli.main(command.removeprefix("$ tensorshard ").split())
    assert capsys.readouterr().out.startswith(printed)


def test_the_page_shows_a_ledger_that_is_kept() -> None:
    shown = next(block for block in blocks("docs/coming-from.md") if block.language == "text")
    kept = (_CONFIGS / "ds.json.ledger").read_text(encoding="utf-8")
    assert {*shown.code.splitlines()} <= {*kept.splitlines(), "  ..."}
    assert len(list(_CONFIGS.glob("*.ledger"))) == 8
