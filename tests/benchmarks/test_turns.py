"""Contenders that compute in turn. Nothing here is timed."""

import os
import subprocess
import sys

import pytest
from benchmarks.harness.contender import Contender
from benchmarks.harness.ranks import RankError
from benchmarks.harness.training_group import Steps, measure_training_group
from benchmarks.harness.turns import TurnsEndedError, in_rotation, my_turn, turns
from benchmarks.workload import Workload
from rich.console import Console

TINY = Workload("tiny", num_layers=1, num_heads=1, width=8, vocab_size=32, context_length=4, batch_size=2)
ONE_RANK = [
    Contender("DDP", "ddp", "torch.nn.parallel.distributed"),
    Contender("tensorshard", "ours", "tensorshard.engine", {"zero": 0}),
]
WRITER = """
import sys
from pathlib import Path
from benchmarks.harness.turns import my_turn
turn = my_turn()
for _ in range(int(sys.argv[2])):
    with turn(), open(sys.argv[3], "a") as file:
        file.write(sys.argv[1])
"""


def start(name, count, file, variables):
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, name, str(count), str(file)], env={**os.environ, **variables}
    )


def test_each_waits_for_its_turn(tmp_path):
    file = tmp_path / "order"
    with turns({"a": 2, "b": 1}) as opened:
        processes = [start(name, 2, file, opened.environment(name)) for name in "baa"]
        opened.connect(lambda name: False)
        for name in ["a", "b", "b", "a"]:
            opened.give(name)
            assert len(file.read_text()) % 3 in (0, 2) or name == "b"
        assert file.read_text() == "aabbaa"
        assert [process.wait() for process in processes] == [0, 0, 0]


def test_a_process_that_ends_early_is_named(tmp_path):
    with turns({"a": 1, "b": 1}) as opened:
        processes = {name: start(name, 1, tmp_path / "order", opened.environment(name)) for name in "ab"}
        opened.connect(lambda name: False)
        opened.give("a")
        processes["a"].wait()
        with pytest.raises(TurnsEndedError, match="a process of a ended before its last turn"):
            opened.give("a")
        opened.give("b")
        assert processes["b"].wait() == 0


def test_a_process_that_never_asks_for_a_turn_is_named():
    with turns({"a": 1}) as opened, pytest.raises(TurnsEndedError, match="a process of a "):
        opened.connect(lambda name: True)


def test_without_an_address_nothing_waits(monkeypatch):
    monkeypatch.delenv("BENCHMARK_TURNS", raising=False)
    turn = my_turn()
    for _ in range(2):
        with turn():
            pass


def test_the_first_of_a_round_is_the_last_of_the_next():
    assert list(in_rotation("abc", 3)) == [*"abc", *"bca", *"cab"]


@pytest.mark.slow
def test_contenders_train_the_same_in_turn():
    group = measure_training_group(
        ONE_RANK,
        TINY,
        1,
        Steps(1, 1, 2, in_turn=True),
        title="tiny",
        packages=["torch"],
        obstacles={},
        console=Console(quiet=True),
    )
    first, second = group.rows
    assert first.loss == pytest.approx(second.loss, rel=2e-5)
    assert second.ours and not first.ours
    assert all(value.median > 0 for row in group.rows for value in row.values.values())


@pytest.mark.slow
def test_the_reason_of_a_contender_that_fails_is_told():
    broken = Contender("broken", "ours", "tensorshard.engine", {"zero": 7})
    with pytest.raises(RankError, match="zero"):
        measure_training_group(
            [*ONE_RANK, broken],
            TINY,
            1,
            Steps(1, 1, 2, in_turn=True),
            title="tiny",
            packages=[],
            obstacles={},
            console=Console(quiet=True),
        )
