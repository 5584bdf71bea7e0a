"""The benchmark of heads: its contenders, what it compares with fp64, and its tables. Nothing here is timed."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import tables
from benchmarks.harness.heads import HeadJob, measure_head
from benchmarks.harness.heads_rank import measure
from benchmarks.harness.report import format_value
from benchmarks.harness.results import Group, Results, make_rows
from benchmarks.heads import Head, HeadWork
from benchmarks.suites import heads

WORK = HeadWork("small", samples=6, features=32, classes=101)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("work", heads.WORKS.values(), ids=list(heads.WORKS))
def test_every_head_has_peers_and_ours(work, world_size):
    lineup = heads.contenders(world_size, work.classes)
    assert [contender.ours for contender in lineup].count(False) >= 2
    assert [contender.ours for contender in lineup].count(True) == 7
    assert len({contender.name for contender in lineup}) == len(lineup)
    builders = Path(tables.__file__).parent / "peers"
    assert all((builders / f"{contender.builder}.py").exists() for contender in lineup)


def _measured(builder: str, options: dict[str, Any], rank: int, world_size: int) -> dict[str, Any]:
    job = HeadJob(WORK, builder, options, 1, exact=True, warmup_steps=1, measured_steps=2)
    return measure(job, rank, world_size)


def _on_ranks(builder: str, options: dict[str, Any]) -> dict[str, Any]:
    return _measured(builder, options, torch.distributed.get_rank(), torch.distributed.get_world_size())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("builder", "options", "world_size", "held", "error"),
    [
        pytest.param("head_plain", {}, 1, 8, 1e-5, marks=pytest.mark.slow),
        pytest.param("head_loss_parallel", {}, 2, 8, 1e-5, marks=pytest.mark.slow),
        ("head_ours", {"update": False}, 2, 8, 1e-5),
        ("head_ours", {"keep_logits": False}, 1, 8, 1e-5),
        pytest.param("head_ours", {"keep_logits": True}, 2, 8, 1e-2, marks=pytest.mark.slow),
        ("head_ours", {"dtype": "bfloat16", "momentum_dtype": "bf16"}, 1, 4, 10.0),
    ],
)
def test_a_first_step_is_that_of_fp64(ranks, builder, options, world_size, held, error):
    outcomes = ranks(world_size, _on_ranks, builder, options)
    assert sum(outcome["state_bytes"] for outcome in outcomes) == held * 32 * 101
    for outcome in outcomes:
        assert 0 < outcome["error"] < error
        assert len(outcome["step_seconds"]) == 2 and min(outcome["step_seconds"]) > 0


def _wrong(what: str) -> float:
    from benchmarks.harness import heads_rank

    class Builder:
        @staticmethod
        def build(work: HeadWork, rank: int, world_size: int) -> Head:
            from benchmarks.peers import head_plain

            head = head_plain.build(work, rank, world_size)

            def step(features: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
                loss = head.step(features, targets)
                if what == "gradient":
                    features.grad.mul_(1.01)
                elif what == "weight":
                    head.weight[7] += 0.01
                return loss * 1.01 if what == "loss" else loss

            return replace(head, step=step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads_rank, "import_module", lambda _: Builder)
        return _measured("wrong", {}, 0, 1)["error"]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["loss", "gradient", "weight"])
def test_errors_are_seen(ranks, what):
    assert ranks(1, _wrong, what)[0] > 5e-3


@pytest.mark.slow
def test_heads_are_measured_on_ranks():
    job = HeadJob(WORK, "head_ours", {}, 1, exact=True, warmup_steps=1, measured_steps=1)
    found = measure_head(job, 2, environment=heads.NO_GPU, timeout=300)
    assert found.bytes_per_class == 8 * 32 and 0 < found.error < 1e-5
    assert min(found.step_seconds, found.cpu_seconds) > 0


def test_what_fits(monkeypatch):
    bytes_held = {"plain": 8.0, "fp32": 8.0, "bf16": 4.0, "int8": 3.0}

    def measured(job: HeadJob, *_: Any, **__: Any) -> Any:
        form = "plain" if job.builder == "head_plain" else job.options.get("momentum_dtype", "fp32")
        return type("Measured", (), {"bytes_per_class": bytes_held[form] * job.work.features})

    monkeypatch.setattr(heads, "measure_head", measured)
    rows = {row.contender: row.values["8 x 12 GB"].median for row in heads.measure_fit(2048).rows}
    expected = [0.9 * 96e9 / (2048 * size) for size in (12, 8, 4, 3)]
    assert list(rows.values()) == pytest.approx(expected)


def test_errors_and_counts_are_not_compared():
    quantities = heads.QUANTITIES[2:]
    samples = {q.key: {"peer": [2.0], "ours": [1.0]} for q in quantities}
    group = Group("work", "2026-01-02", {}, asdict(WORK), make_rows(samples, ours=["ours"]))
    table = tables.markdown_table(Results("heads", "cpu-2core", "cpu", quantities, (group,))).splitlines()
    assert table[0].count("x best peer") == 2
    assert table[3] == "|  | **ours** | 0 MB | 0.50 | 1 B | 0.50 | 1.0e+00 |"
    assert [format_value(v, u) for v, u in [(2099.2, "B"), (1.2e-7, "error"), (9.41e6, "classes")]] == [
        "2099 B",
        "1.2e-07",
        "9.4 million",
    ]
