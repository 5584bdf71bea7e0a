"""``tensorshard check``: what it prints, and what it keeps for estimates."""

from tensorshard import cli
from tensorshard.predict.hardware import THIS_MACHINE, find_hardware


def test_check_measures_what_estimates_need(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TENSORSHARD_CACHE", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cli.main(["check"]) == 0
    printed = capsys.readouterr().out
    for line in ("matmul float32", "memory (triad)", "messages (CPU time)", "Engine (shared cores)", "kept in "):
        assert line in printed
    rates = find_hardware(THIS_MACHINE).rates
    assert rates.operators.keys() == rates.crowded_operators.keys() >= {"aten.mm", "aten.convolution"}
    assert rates.convolutions is not None
    for host in (rates.host, rates.crowded):
        assert 1e-6 < host.message < 1e-2 and 1e-12 < host.byte < 1e-7 and host.step > 0
