"""Traces of some training steps."""

import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from log_lines import logged
from tensorshard.config import ConfigError, load_config
from tensorshard.trainer import ProfileHook, Trainer
from tensorshard.trainer.hooks.profiling import profiled_steps
from tensorshard.trainer.settings import TrainSettings
from trainer_doubles import CountingEngine, regression_batches


def _train(directory: Path, steps: range, max_steps: int, begin: int = 0) -> str:
    printed = io.StringIO()
    hook = ProfileHook(steps, directory, Console(file=printed, width=60))
    engine = CountingEngine()
    engine.step_count = begin
    trainer = Trainer(engine, regression_batches(), max_steps=max_steps, hooks=[hook])  # type: ignore[arg-type]
    trainer.fit()
    return printed.getvalue()


def test_a_trace_holds_the_chosen_steps_and_the_largest_operators_are_printed(tmp_path: Path) -> None:
    printed = _train(tmp_path / "profile", range(2, 4), max_steps=5)
    (file,) = (tmp_path / "profile").iterdir()
    assert file.name == "rank0-steps-2-3.json"
    names = {event["name"] for event in json.loads(file.read_text())["traceEvents"]}
    assert {"step 2", "step 3", "aten::addmm"} <= names and not {"step 1", "step 4"} & names
    assert "aten::" in printed and "step 2" not in printed and "%" in printed
    assert max(map(len, printed.splitlines())) <= 60


def test_a_run_that_ends_early_or_begins_within_the_steps_has_a_trace_of_the_rest(tmp_path: Path) -> None:
    _train(tmp_path, range(2, 9), max_steps=3)
    _train(tmp_path, range(2, 5), max_steps=4, begin=2)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rank0-steps-2-3.json", "rank0-steps-3-4.json"]
    with logged(logging.INFO) as messages:
        assert not _train(tmp_path / "none", range(2, 4), max_steps=6, begin=4)
    assert messages == ["train.profile names steps that were taken before step 5; nothing is profiled"]


@pytest.mark.parametrize(
    ("value", "steps"),
    [(10, [10]), ("10-12", [10, 11, 12]), ({"first": 10, "steps": 3}, [10, 11, 12])],
)
def test_steps_are_named_in_three_ways(value: Any, steps: list[int]) -> None:
    assert list(profiled_steps(value)) == steps


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("12-10", "it is '12-10'; expected the steps to profile, counted from 1, such as 10-12"),
        ("0-3", "expected the steps"),
        ("yes", "expected the steps"),
        ("true", "it is True; expected the steps"),
        ("{first: 3}", "expected the steps"),
        ("{first: 3, steps: 0}", "expected the steps"),
        ("[1, 2]", "expected the steps"),
        ("499-501", "train.profile names step 501, and train.steps=500 ends before it"),
    ],
)
def test_what_names_no_steps_is_refused_before_training(value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"train\.profile") as caught:
        TrainSettings.from_config(load_config("quickstart", [f"train.profile={value}"]))
    assert message in str(caught.value)
