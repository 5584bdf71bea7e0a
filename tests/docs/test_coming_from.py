"""The peers' lines on docs/coming-from.md run as well, each where the peer is installed."""

import os
import re
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest

from pages import blocks

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
