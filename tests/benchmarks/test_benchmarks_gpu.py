"""The benchmark of heads on a GPU, without one: its contenders, its search, and its refusals. Nothing here is timed."""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import tables
from benchmarks.harness import heads_fit_rank, heads_group, report, results
from benchmarks.harness.contender import Contender
from benchmarks.harness.heads import HeadMeasurement, OutOfMemoryError
from benchmarks.harness.heads_fit import Fit, FitJob, measure_fit, most_that_fit
from benchmarks.harness.meters import make_meter
from benchmarks.harness.ranks import RankError
from benchmarks.harness.results import load_results
from benchmarks.heads import HeadWork
from benchmarks.suites import gpu


def _arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    gpu.add_arguments(parser)
    return parser.parse_args(given)


@pytest.mark.parametrize("states", gpu.STATES)
def test_every_head_has_peers_and_ours(states):
    lineup = gpu.contenders(states)
    names = [contender.name for contender in lineup]
    assert [contender.ours for contender in lineup].count(False) >= 3
    assert {"tensorshard, update", "tensorshard, update, logits kept"} <= set(names)
    assert len(set(names)) == len(names)
    builders = Path(tables.__file__).parent / "peers"
    assert all((builders / f"{contender.builder}.py").exists() for contender in (*lineup, *gpu.designs()))


def test_unknown_states_are_refused():
    with pytest.raises(ValueError, match="no states of 'fp8'; there are fp32 and bf16"):
        gpu.contenders("fp8")


def test_what_needs_a_gpu_is_left_out_by_name_elsewhere():
    left_out = {c.name for states in gpu.STATES for c in gpu.contenders(states) if gpu.obstacle_on(c, "cpu")}
    assert left_out == {"Liger fused linear cross entropy", "cut cross entropy, Triton"}


def test_without_a_gpu_it_says_how_to_try_it(monkeypatch, capsys):
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    assert gpu.run(_arguments()) == 1
    assert "needs a GPU, and PyTorch sees none here. With --device cpu it runs" in capsys.readouterr().err


def test_on_the_processor_nothing_is_written(monkeypatch, tmp_path):
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(gpu, "measure_fit", lambda job, **_: Fit(512.0, [job.ranks for _ in job.budgets]))
    measured = HeadMeasurement(0.1, 0.1, 1e6, 8.0, 1e-3)
    jobs = []
    monkeypatch.setattr(heads_group, "measure_head", lambda job, *_, **__: jobs.append(job) or measured)
    assert gpu.run(_arguments("--device", "cpu")) == 0
    assert not list(tmp_path.iterdir())
    assert {(job.work.device, job.work.classes) for job in jobs} == {("cpu", 4_000)}


def test_a_gpus_results_have_its_name_and_tables(monkeypatch, tmp_path):
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "hardware_name", lambda device: {"cuda": "nvidia-h200"}[device])
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "usable_cards", lambda: {"8 x 12 GB": 11 * 10**9})
    jobs: list[FitJob] = []
    monkeypatch.setattr(gpu, "measure_fit", lambda job, **_: jobs.append(job) or Fit(4096.0, [20_000_000]))

    def measured(job: Any, *_: Any, **__: Any) -> HeadMeasurement:
        if job.options.get("compiled"):
            raise OutOfMemoryError("too large")
        return HeadMeasurement(2.0, 0.1, 1e6, 8.0, 1e-3)

    monkeypatch.setattr(heads_group, "measure_head", measured)
    assert gpu.run(_arguments("--work", "1 million classes", "--states", "fp32", "--features", "512")) == 0
    found = load_results(tmp_path / "gpu-nvidia-h200.json")
    assert found.device == "cuda" and found.groups[0].title == "1 million classes, fp32 states"
    rows = {row.contender: row for row in found.groups[0].rows}
    assert rows["plain PyTorch, torch.compile"].note == "out of memory"
    assert rows["tensorshard, update"].values["step_seconds"].median == 2.0
    assert jobs[0].budgets == [11 * 10**9] and jobs[0].ranks == 8 and jobs[0].work.device == "cuda"
    text = "".join(f"<!-- benchmark:{name} -->\n<!-- /benchmark -->\n" for name in ("gpu", "gpu-fit"))
    fits = load_results(tmp_path / "gpu-fit-nvidia-h200.json")
    table = tables.replace_tables(text, [found, fits])
    assert "| **tensorshard, update** | 2.00 s |" in table and "20.0 million" in table


def test_a_peer_that_fails_is_named_and_the_others_go_on(monkeypatch, capsys):
    failing = {"head_liger"}

    def measured(job: Any, *_: Any, **__: Any) -> HeadMeasurement:
        if job.builder in failing:
            raise RankError("rank 0 ended with [exit] status 1")
        return HeadMeasurement(1.0, 0.1, 1e6, 8.0, 1e-3)

    monkeypatch.setattr(heads_group, "measure_head", measured)
    monkeypatch.setattr(gpu, "obstacle_on", lambda *_: "")
    measure = partial(gpu.measure_steps, gpu.WORKS["1 million classes"], "fp32", rounds=2, measured_steps=1)
    rows = {row.contender: row for row in measure(console=report.make_console()).rows}
    assert rows["Liger fused linear cross entropy"].note == "failed"
    assert len(rows["plain PyTorch"].values["step_seconds"].rounds) == 2
    assert "Liger fused linear cross entropy: rank 0 ended with [exit] status 1" in capsys.readouterr().out
    failing.add("head_ours")
    with pytest.raises(RankError, match="status 1"):
        measure(console=report.make_console())


def test_the_pages_show_what_was_measured():
    written = [load_results(path) for path in sorted(results.RESULTS.glob("*.json"))]
    for page in tables.PAGES:
        assert tables.replace_tables(page.read_text(), written) == page.read_text(), page
    assert tables.replace_figures(tables.README.read_text(), written) == tables.README.read_text()
    with pytest.raises(tables.MarkerError, match="the page needs the lines '<!-- figures -->'"):
        tables.replace_figures("", written)


@pytest.mark.parametrize("most", [0, 1, 15, 999, 10_000])
def test_the_search_finds_the_most_that_fit(most):
    tried = []

    def fits(classes: int) -> bool:
        tried.append(classes)
        return classes <= most

    found = most_that_fit(fits, 1000)
    assert found <= most < found + 1 + 1000 / 64 or (most > 1000 and found == 1000 * 63 // 64)
    assert found == 0 or found in tried
    assert len(tried) <= 6


@pytest.mark.slow
@pytest.mark.parametrize("contender", [gpu.designs()[0], gpu.designs()[2]], ids=lambda contender: contender.builder)
def test_a_rank_of_eight_is_trained_alone(contender: Contender):
    work = HeadWork("", samples=4, features=64, classes=8 * 512, dtype="bfloat16")
    job = FitJob(work, contender.builder, contender.options, 8, [10**5, 64 * 10**6])
    found = measure_fit(job, environment=gpu.NO_GPU, timeout=300)
    assert found.bytes_per_class == 8 * 64
    assert found.classes[0] < found.classes[1] < 8 * 64 * 10**6 / (8 * 64)
    assert found.classes[1] > 100_000


@pytest.mark.slow
def test_a_gpus_memory_is_limited_to_the_budget(monkeypatch):
    """With an allocator that has only the limit which PyTorch was given, of a GPU of 100 GB."""
    limit = 0.0
    calls: list[int] = []

    def set_limit(fraction: float) -> None:
        nonlocal limit
        limit = fraction * 100e9

    def train(job: FitJob, work: HeadWork) -> int:
        states = work.classes // job.ranks * 1000
        calls.append(work.classes)
        if limit and states + 2e9 > limit:  # and what a step takes beside them
            raise torch.OutOfMemoryError(f"{states} bytes and those of a step, of {limit}")
        return states

    monkeypatch.setattr(heads_fit_rank, "_train", train)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: type("Card", (), {"total_memory": 100 * 10**9}))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", set_limit)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    work = HeadWork("", samples=4, features=64, classes=8 * 512, device="cuda", dtype="bfloat16")
    found = heads_fit_rank.measure(FitJob(work, "head_ours", {}, 8, [11 * 10**9, 31 * 10**9]))
    assert found == Fit(1000.0, [8 * 11 * 10**6 * 52 // 64, 8 * 31 * 10**6 * 59 // 64])
    assert len(calls) == 1 + 2 * 6 and max(calls) > found.classes[0]


def test_memory_above_what_was_held():
    meter = make_meter("cpu")
    held = bytearray(32 << 20)
    meter.start()
    more = bytearray(48 << 20)
    del more
    assert 40 << 20 < meter.peak_bytes() < 64 << 20
    assert held
