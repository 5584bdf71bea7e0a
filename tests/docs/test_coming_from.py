"""The peers' lines on docs/coming-from.md run as well, each where the peer is installed."""

from importlib import util
from pathlib import Path

import pytest
import torch

from pages import ROOT, blocks

_PAGE = "docs/coming-from.md"


def _run(peer: str) -> float:
    """Runs the page's model and data, then the peer's lines; returns their last loss."""
    torch.manual_seed(0)
    first, *others = (block for block in blocks(_PAGE) if block.language == "python")
    (theirs,) = (block for block in others if f"needs {peer};" in (block.reason or ""))
    names: dict[str, object] = {}
    for block in (first, theirs):
        exec(compile("\n" * block.line + block.code, str(ROOT / _PAGE), "exec"), names)
    loss = names["loss"]
    assert isinstance(loss, torch.Tensor)
    return float(loss)


@pytest.mark.parametrize("peer", ["accelerate", "deepspeed"])
def test_a_peers_lines_run(ranks, peer, tmp_path: Path, monkeypatch):
    if util.find_spec(peer) is None:
        pytest.skip(f"needs {peer}")
    monkeypatch.chdir(tmp_path)
    assert all(0.5 < loss < 3 for loss in ranks(2, _run, peer))
