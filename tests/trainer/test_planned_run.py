"""Overrides that leave a run's plan open, or take it from a file."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import tensorshard as ts
from tensorshard import cli
from tensorshard.config import ConfigError, instantiate
from tensorshard.trainer.planned_run import read_config

SMALL = ["quickstart", "model.num_layers=2", "model.width=32", "model.context_length=16", "train.global_batch_size=4"]


def test_what_is_open_and_what_is_fixed():
    read = read_config("quickstart", ["train.plan=auto", "train.plan.tp=2", "train.plan.precision=bf16"])
    assert read.request.searches
    fixed = read.request.fixed(instantiate(read.config.train.plan))
    assert (fixed["tp"], fixed["precision"], fixed["clip_grad_norm"]) == (2, "bf16", 1.0)
    assert not {"zero", "pp", "dp_shard", "micro_batches"} & set(fixed)

    read = read_config("quickstart", ["train.plan.tp=auto", "train.plan.zero=2"])
    fixed = read.request.fixed(instantiate(read.config.train.plan))
    assert "tp" not in fixed and (fixed["zero"], fixed["pp"], fixed["micro_batches"]) == (2, 1, 1)
    assert read.config.asked.overrides == ["train.plan.tp=auto", "train.plan.zero=2"]

    assert not read_config("quickstart", ["train.plan.zero=2"]).request.searches
    with pytest.raises(ConfigError, match="precision is 'auto'; it must be one of"):
        try:
            instantiate(read_config("quickstart", ["train.plan.precision=auto"]).config.train.plan)
        except ValueError as error:
            raise ConfigError(str(error)) from error


def test_a_plan_of_a_file_is_the_runs_plan_and_later_overrides_change_it(tmp_path: Path):
    plan = ts.Plan(dp_shard=2, tp=2, zero=1, micro_batches=2, offload=ts.Offload(optimizer="disk"))
    plan.to_yaml(tmp_path / "plan.yaml")
    read = read_config("quickstart", [f"train.plan={tmp_path}/plan.yaml", "train.plan.zero=2"])
    assert instantiate(read.config.train.plan) == ts.Plan.from_dict(plan.to_dict() | {"zero": 2})
    assert not read.request.searches
    (tmp_path / "none.yaml").write_text("tpp: 2")
    for path, said in {"none.yaml": "Plan has no field 'tpp'", "away.yaml": "there is no file of that name"}.items():
        with pytest.raises(ConfigError, match=said):
            read_config("quickstart", [f"train.plan={tmp_path}/{path}"])


@pytest.mark.slow
def test_the_command_finds_plans_saves_the_best_and_says_how_to_run_it(tmp_path: Path, capsys):
    fixed = {"pp": 1, "tp": 1, "recompute": "none", "offload": "null", "micro_batches": 1}
    words = [*SMALL, *(f"train.plan.{name}={value}" for name, value in fixed.items())]
    saved, page = tmp_path / "plan.yaml", tmp_path / "page.html"
    options = ["--world-size", "2", "--top", "1", "--save", str(saved), "--html", str(page)]
    assert cli.main(["plan", *words, *options]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.split("\npage")[0].splitlines())) <= 80
    assert f"tensorshard train quickstart train.plan={saved}" in printed
    plan = ts.Plan.from_yaml(saved)
    assert (plan.dp_size, plan.tp, plan.clip_grad_norm) == (2, 1, 1.0)
    assert "<svg" in page.read_text() and f"zero={plan.zero}" in page.read_text()
    assert cli.main(["plan", *words, "--world-size", "2", "--memory", "1MiB", "--top", "1"]) == 1
    printed = capsys.readouterr().out
    assert "no plan of 2 ranks fits 1.00 MiB each" in printed and "zero=3 does not fit by" in printed


def test_files_are_written_even_if_the_reader_of_the_output_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As in ``tensorshard plan ... | head``."""
    saved, page = tmp_path / "plan.yaml", tmp_path / "page.html"
    options = ["--world-size", "1", "--top", "1", "--save", str(saved), "--html", str(page)]

    def gone(*_: object, file: Any = None, **__: object) -> None:
        if file is None:
            raise BrokenPipeError

    monkeypatch.setattr("builtins.print", gone)
    with suppress(BrokenPipeError):
        cli.main(["plan", *SMALL, *options])
    assert saved.is_file() and page.is_file()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--world-size", "0"], "--world-size is 0"),
        ([], "--world-size was not given"),
        (["--world-size", "2", "--gpu", "h1000"], "'h1000' is not known"),
        (["--world-size", "2", "--save", "nowhere/plan.yaml"], "there is no folder nowhere"),
        (["--world-size", "2", "--memory", "much"], "memory='much' was given"),
        (["--world-size", "2", "--global-batch", "0"], "global_batch is 0"),
        (["--world-size", "2", "train.plan.pp=3"], "pp=3 does not divide the 2 ranks"),
    ],
)
def test_what_the_command_refuses(words, said, capsys):
    assert cli.main(["plan", *SMALL, *words]) == 2
    assert said in capsys.readouterr().err
