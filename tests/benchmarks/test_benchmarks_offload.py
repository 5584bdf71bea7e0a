"""The offload benchmark's arithmetic, its limit on memory, and one run of the smallest size."""

import time

import pytest
import torch
from benchmarks.harness import memory, memory_group, offload_needs
from benchmarks.harness.memory_group import join, limited_memory
from benchmarks.harness.offload_needs import describe_needs, reason_to_leave_out
from benchmarks.harness.offloaded_training import RankMeasurement, summarize
from benchmarks.harness.updates import BYTES_PER_PARAMETER, CONTENDERS, UpdateMeasurement
from benchmarks.offloads import SMOKE, WORKS
from benchmarks.suites import offload
from rich.console import Console


def test_a_run_is_judged_by_what_bounds_it():
    ranks = [
        RankMeasurement([2.0, 4.0, 3.0], 1.0, 600.0, 200.0, 500.0, 10, [9.0, 8.0], {"gradients": 5}),
        RankMeasurement([5.0, 1.0, 2.0], 2.0, 600.0, 600.0, 500.0, 20, [9.0, 6.0], {"gradients": 7}),
    ]
    found = summarize(ranks, 100, peak_bytes=30, limited=True)
    assert found.step_seconds == 4.0  # the median of 5, 4, 3
    assert (found.read_per_parameter, found.written_per_parameter) == (12.0, 8.0)
    assert found.raw_share == pytest.approx(2000 / 4 / 1000)
    assert found.bound_ratio == pytest.approx(
        4.0 / 2.0
    )  # the disk alone would take two seconds, and so would computing
    assert (found.loss, found.on_disk) == (7.0, {"gradients": 12})


def test_the_share_of_bandwidth_counts_what_one_pass_moves():
    assert UpdateMeasurement(2.0, 30e9).bandwidth_share(10**9) == pytest.approx(BYTES_PER_PARAMETER / 60)


@pytest.mark.parametrize("factor", [None, 0.25])
def test_kernels_compute_the_same(factor):
    plain, ours = (CONTENDERS[name](70_001) for name in ("torch's fused AdamW, and casts", "tensorshard"))
    given = None if factor is None else torch.tensor(factor, dtype=torch.float64)
    before = torch.linspace(-1e-3, 1e-3, 70_001).bfloat16()
    assert torch.equal(found := ours(given), plain(given))
    assert found.ne(before).float().mean() > 0.9


def test_without_rights_memory_is_not_limited_and_the_page_cache_is_sampled(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_group, "_ROOT", tmp_path / "nothing")
    monkeypatch.delenv(memory_group.JOIN, raising=False)
    with limited_memory(1000) as (variables, use):
        join()
        (tmp_path / "file").write_bytes(b"1" * 50_000_000)
        time.sleep(0.2)
    assert variables == {} and not use.limited and not use.killed
    assert use.peak_bytes > 0


def test_models_are_gpt_2s_and_their_states_larger_than_their_limits():
    assert WORKS["GPT-2 XL"].parameters == pytest.approx(1.557e9, rel=0.01)
    for work in WORKS.values():
        assert 16 * work.parameters > work.memory_bytes


def test_what_is_needed_is_said_before_a_run_and_too_little_is_refused(tmp_path, monkeypatch):
    said = describe_needs(WORKS["GPT-2 small"], 2, str(tmp_path))
    assert "GPT-2 small, 123.8 million parameters, 2 rank(s). Memory: 1.5 GB" in said
    assert "up to 2.3 GB in" in said and "a step reads and writes up to 4.0 GB" in said
    for module, name, message in (
        (offload_needs, "free_bytes", "needs 2.3 GB of disk in .* has 1.0 GB left; give --folder"),
        (memory, "available_bytes", "may take 1.5 GB of memory, and 1.0 GB are available"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, lambda *_: 10**9)
            with pytest.raises(ValueError, match=message):
                describe_needs(WORKS["GPT-2 small"], 2, str(tmp_path))


def test_what_nothing_would_end_in_time_is_left_out(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 20 * 10**9)
    for limited, offloads, left_out in ((False, False, True), (False, True, False), (True, False, False)):
        monkeypatch.setattr(offload_needs, "can_limit", lambda limited=limited: limited)
        assert bool(reason_to_leave_out(WORKS["GPT-2 XL"], 1, offloads=offloads)) == left_out


def test_the_peer_runs_in_one_process():
    assert [c.name for c in offload.contenders(1) if not c.ours] == ["tensors mapped to a file, fused AdamW"]
    assert all(c.ours for c in offload.contenders(2))


@pytest.mark.slow
def test_the_smallest_size_is_trained_the_same_wherever_states_are(tmp_path):
    names = ["tensorshard, all in memory", "tensorshard, states, gradients, activations"]
    group = offload.measure_training(SMOKE, 1, str(tmp_path), steps=1, only=names, console=Console(quiet=True))
    plain, ours = group.rows
    assert ours.loss == plain.loss
    assert plain.values["read_per_parameter"].median == 0
    assert 16 <= ours.values["read_per_parameter"].median < 30  # small parameters are rounded up to whole blocks
    assert set(group.settings["on_disk"][names[1]]) >= {"optimizer states", "master weights", "gradients"}
