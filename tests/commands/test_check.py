"""``tensorshard check``: what it prints, and what it keeps for estimates."""

import pytest

from tensorshard import cli
from tensorshard.predict.hardware import THIS_MACHINE, find_hardware


@pytest.mark.slow
def test_check_measures_what_estimates_need(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TENSORSHARD_CACHE", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cli.main(["check"]) == 0
    printed = capsys.readouterr().out
    for line in ("matmul float32", "memory (triad)", "operator", "collectives", "kept in "):
        assert line in printed
    rates = find_hardware(THIS_MACHINE).rates
    assert rates.flops["float32"] > 1e8 and rates.memory_bandwidth > 1e8
    assert 0 < rates.launch < 1e-3 and 0 < rates.within_node.latency < 1
