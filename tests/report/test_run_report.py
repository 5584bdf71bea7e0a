"""Reports of runs: what is read, what is said of it, and the page."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from browser import find_browser, look_at_pages
from tensorshard import Plan, cli
from tensorshard.config import ConfigError
from tensorshard.report.describe import describe
from tensorshard.report.figures import differences
from tensorshard.report.read_run import Run, Series, columns, read_run, read_runs
from tensorshard.report.run_page import HIGH, TOP, Line, line_chart, rank_chart, round_values, run_page, scale_of
from tensorshard.trainer.run_directory import Session, write_session

MIB = 1 << 20


def _line(step: int, **metrics: Any) -> dict[str, Any]:
    return {"step": step, "loss": 4.0 / step, "lr": 1e-3, "grad_norm": 2.0, "step_seconds": 0.5, **metrics}


def _session(first_step: int, world_size: int = 2, **fields: Any) -> Session:
    plan = Plan(zero=2).resolve(world_size)
    held = [100 * MIB] * world_size
    return Session(first_step, 40, world_size, "cpu", plan.to_dict(), held, **fields)


def _write(path: Path, lines: list[dict[str, Any]], sessions: tuple[Session, ...] = (), **train: Any) -> Path:
    """A run's folder."""
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {"train": {"steps": 40, "log_every": 10, "name": path.name, **train}, "optimizer": {"lr": 1e-3}}
    (path / "config.yaml").write_text(json.dumps(settings))  # which is YAML, too
    for session in sessions:
        write_session(path / "sessions.jsonl", session)
    return path


@pytest.fixture
def two(tmp_path: Path) -> list[Run]:
    """A run of text on two ranks that was estimated, and one of images that went on from step 20 on four."""
    memory = {f"peak_memory_bytes/rank{rank}": (300 + 50 * rank) * MIB for rank in range(2)}
    lines = [_line(step, tokens_per_second=1000.0, peak_memory_bytes=300 * MIB) for step in range(1, 41)]
    lines[0] |= memory
    lines[9]["val_loss"], lines[39]["val_loss"] = 0.7, 0.9
    estimated = _session(1, estimated_bytes=[300 * MIB, 320 * MIB], estimated_step_seconds=0.4)
    _write(tmp_path / "text", lines, (estimated,))
    lines = [_line(step, samples_per_second=50.0, val_error=0.25) for step in (10, 20, 30)]
    _write(tmp_path / "images", lines, (_session(1), _session(21, 4)), seed=1)
    return read_runs([str(tmp_path / "text"), str(tmp_path / "images")])


# -- reading --


def test_of_steps_that_were_done_twice_the_last_ones_count(tmp_path: Path) -> None:
    path = _write(tmp_path / "run", [{"step": step, "loss": 1.0} for step in (10, 20, 30, 40)])
    with (path / "metrics.jsonl").open("a") as file:
        file.write('no json\n{"loss": 3}\n{"step": 20, "loss": 2.0, "grad_norm": null}\n{"step": 30, "lo')
    run = read_run(path)
    assert run.metrics["loss"].steps.tolist() == [10, 20] and run.metrics["loss"].values.tolist() == [1.0, 2.0]
    assert (run.last_step, run.unread, "grad_norm" in run.metrics) == (20, 2, False)
    said = describe([run], 80)
    assert "20 of 40, last written 0 s ago" in said and "2 lines of metrics.jsonl could not be read" in said


def test_the_config_and_the_steps_are_those_of_the_last_start(tmp_path: Path) -> None:
    path = _write(tmp_path / "run", [_line(10)])
    (path / "config-from-step-5.yaml").write_text("train: {steps: 50}")
    (path / "config-from-step-10.yaml").write_text("train: {steps: 60}")
    assert read_run(path).steps == 60
    write_session(path / "sessions.jsonl", _session(11, 4))
    run = read_run(path)
    assert run.steps == 40 and run.plan is not None and run.plan.dp_shard == 4


def test_memory_is_that_of_the_ranks_since_the_last_start(tmp_path: Path) -> None:
    memory = {f"peak_memory_bytes/rank{rank}": 300 * MIB for rank in range(2)}
    lines = [_line(1, peak_memory_bytes=300 * MIB, **memory), _line(2, peak_memory_bytes=400 * MIB)]
    path = _write(tmp_path / "run", lines, (_session(1), _session(2, 1)))
    assert read_run(path).peaks == [400 * MIB]


def test_a_run_of_another_version_is_shown_without_its_plan(tmp_path: Path) -> None:
    path = _write(tmp_path / "run", [_line(10)])
    session = json.loads(json.dumps(_session(1).__dict__)) | {"plan": {"a_field_to_come": 1}}
    (path / "sessions.jsonl").write_text(json.dumps(session) + "\n")
    run = read_run(path)
    assert run.plan is None and "2 x cpu" in describe([run], 80) and "<h2>The mesh" not in run_page([run])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "was given none; those here: runs/a"),
        (["runs/none"], "there is no folder runs/none; report takes the folder of a run; those here: runs/a"),
        (["runs"], "runs is no run, but holds some; give one or several of them: runs/a"),
        (["runs/a/config.yaml"], "is a part of a run; give the run's folder, runs/a"),
        (["runs/a/checkpoints/step-1"], "is a part of a run; give the run's folder, runs/a"),
        (["other"], r"holds no run \(no metrics.jsonl and no config.yaml\)"),
        (["runs/a", "runs/../runs/a"], "is given twice"),
        (["runs/a"] * 9, "at most 8 runs side by side, and was given 9"),
        (["broken"], "broken cannot be read: .*sessions.jsonl was written by another version"),
    ],
)
def test_what_is_no_run_is_refused(
    given: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _write(Path("runs/a"), [])
    Path("runs/a/checkpoints/step-1").mkdir(parents=True)
    Path("other").mkdir()
    (_write(Path("broken"), []) / "sessions.jsonl").write_text('{"first": 1}\n')
    with pytest.raises(ConfigError, match=said):
        read_runs(given)


# -- what is drawn --


def test_no_extreme_is_lost_between_columns() -> None:
    values = np.sin(np.arange(100_000) / 5000.0) + 3.0
    values[[12_345, 54_321]] = 9.0, 0.5
    found = columns(Series(np.arange(1, 100_001), values), 600, 1, 100_000)
    assert len(found.places) == 600 and (found.lows.min(), found.highs.max()) == (0.5, 9.0)
    assert (found.lows <= found.means).all() and (found.means <= found.highs).all()


def test_columns_follow_the_steps_and_not_the_lines() -> None:
    found = columns(Series(np.array([1, 2, 90, 100]), np.array([1.0, 3.0, 5.0, 7.0])), 10, 1, 100)
    assert found.places.tolist() == [0, 8, 9] and found.means.tolist() == [2.0, 5.0, 7.0]


def _heights(picture: str, kind: str) -> list[float]:
    paths = re.findall(rf'<path d="([^"]+)" class="{kind} ', picture)
    return [float(y) for path in paths for _, y in re.findall(r"([\d.-]+) ([\d.-]+)", path)]


def test_a_long_line_has_its_extremes_at_both_ends_of_the_scale() -> None:
    values = np.full(50_000, 2.0)
    values[[777, 40_000]] = 1.0, 3.0
    drawn = line_chart([Line("loss", Series(np.arange(1, 50_001), values), 0)], (1, 50_000), "loss", "{:g}".format)
    heights = _heights(drawn, "spread")
    room = HIGH * 0.05 / 1.1
    assert [min(heights), max(heights)] == pytest.approx([TOP + room, TOP + HIGH - room], abs=0.1)
    assert len(drawn) < 50_000


@pytest.mark.parametrize("values", [[2.0], [2.0, 2.0], [0.0, 0.0], [1e-9, 1.0, 1e6], [-3.0, 5.0]])
def test_charts_of_few_values(values: list[float]) -> None:
    series = Series(np.arange(1, len(values) + 1), np.array(values))
    drawn = line_chart([Line("a & b", series, 0)], (1, len(values)), "a <title>", "{:g}".format)
    ElementTree.fromstring(drawn)
    assert "nan" not in drawn and all(TOP <= y <= TOP + HIGH for y in _heights(drawn, "line"))


def test_scales() -> None:
    assert round_values(1, 100_000) == [20_000, 40_000, 60_000, 80_000, 100_000]
    assert not scale_of(1.0, 10.0, 5.0).logarithmic and scale_of(1.0, 10.0, 5.0, from_zero=True).low == 0
    assert scale_of(0.1, 1000.0, 0.2).ticks() == [0.1, 1.0, 10.0, 100.0, 1000.0]


def test_a_thousand_ranks_share_bars() -> None:
    drawn = rank_chart([MIB * (1 + (rank == 500)) for rank in range(1024)], [MIB] * 1024, "memory")
    ElementTree.fromstring(drawn)
    assert drawn.count("<rect") < 150 and "2.00 MiB, estimated 1.00 MiB" in drawn


# -- what is said --


def test_one_run_in_a_terminal(two: list[Run]) -> None:
    said = describe(two[:1], 80)
    rows = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in said.splitlines() if re.search(r"\S\s{2,}\S", line))
    assert rows["steps"] == "40 of 40" and rows["ranks"] == "2 x cpu" and rows["plan"] == "dp_shard=2 zero=2"
    assert rows["loss"] == "4.0000 to 0.1000" and rows["val_loss"] == "0.9000, lowest 0.7000 (step 10)"
    assert rows["speed"] == "1.0k tokens/s" and (rows["time of a step"], rows["as estimated"]) == (
        "500.00 ms",
        "400.00 ms",
    )
    assert rows["beyond start"] == "200 MiB to 250 MiB (rank 1)" and rows["measured / estimated"] == "0.78"
    assert "   1       350 MiB       250 MiB       320 MiB" in said and "▁" in said
    assert max(map(len, said.splitlines())) <= 80 and "▁" not in describe(two[:1], 80, blocks=False)


def test_an_estimate_of_little_memory_is_explained(tmp_path: Path) -> None:
    small = _session(1, estimated_bytes=[40 * MIB, 40 * MIB])
    lines = [_line(10, peak_memory_bytes=400 * MIB)]
    said = describe([read_run(_write(tmp_path / "small", lines, (small,)))], 200)
    assert "estimated memory" in said and "measured / estimated" not in said
    assert "the estimate is of live tensors; of processes this small, libraries and connections hold most of" in said


def test_several_runs_in_a_terminal(two: list[Run]) -> None:
    said = describe(two, 100)
    assert "text" in said.splitlines()[0] and "images" in said.splitlines()[0]
    assert re.search(r"speed +1\.0k tokens/s +50\.0 samples/s", said)
    assert re.search(r"val_error +- +0\.2500", said) and "images: resumed at step 21, on 4 ranks." in said
    assert differences(two) == [("train.seed", ["-", "1"])] and "train.seed" in said
    narrow = describe(two, 50).splitlines()
    assert max(map(len, narrow)) <= 50 and sum(line.startswith("run ") for line in narrow) == 2


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    paths = [_write(tmp_path / folder / "run", [_line(1)]) for folder in ("a", "b")]
    assert [run.name for run in read_runs(list(map(str, paths)))] == ["a/run", "b/run"]


def test_a_run_that_has_not_logged_yet(tmp_path: Path) -> None:
    run = read_run(_write(tmp_path / "run", [], (_session(1),)))
    said = describe([run], 80)
    assert "0 of 40" in said and "no step is logged yet; every 10 steps a line is." in said
    page = run_page([run])
    assert "<svg" not in page and "<h2>The mesh" in page


# -- the page --


def _well_formed(page: str) -> None:
    assert not re.search(r"""(src|href|srcset)=|@import|url\(""", page)  # it needs no network
    for picture in page.split("<svg")[1:]:
        ElementTree.fromstring("<svg" + picture[: picture.index("</svg>")] + "</svg>")
    assert all(page.count(f"<{tag}") == page.count(f"</{tag}>") for tag in ("div", "figure", "svg", "table"))


def test_the_page_of_one_run(two: list[Run]) -> None:
    page = run_page(two[:1])
    _well_formed(page)
    titles = re.findall(r"<figcaption>([\w ]+)", page)
    assert [title.strip() for title in titles] == [
        "loss", "learning rate", "gradient norm", "tokens a second", "peak memory of rank 0",
        "each rank",
    ]  # fmt: skip
    assert "rank 1: 250 MiB, estimated 320 MiB" in page and "val_loss: 0.7" in page
    assert page.count('class="rank"') == 2 and "optimizer states and gradients are sharded" in page


def test_the_page_of_runs_of_different_metrics(two: list[Run]) -> None:
    page = run_page(two)
    _well_formed(page)
    assert 'validation loss <span class="name">not logged by images' in page
    assert 'val_error <span class="name">not logged by text' in page
    assert "tokens a second" in page and page.count("<h3>The mesh") == 2 and "What differs" in page


def test_names_are_not_taken_for_html(tmp_path: Path) -> None:
    run = read_run(_write(tmp_path / "<b>&", [_line(1, **{"val_<i>": 1.0})]))
    page = run_page([run])
    assert "<b>&" not in page and "val_<i>" not in page
    _well_formed(page)


def test_pages_of_long_runs_are_small(tmp_path: Path) -> None:
    lines = [
        _line(step, tokens_per_second=1e5 + step % 7, val_loss=3.0 + step % 5, peak_memory_bytes=MIB)
        for step in range(1, 20_001)
    ]
    run = read_run(_write(tmp_path / "run", lines))
    assert len(run.metrics["loss"]) == 20_000
    eight = [Run(f"run-{number}", run.path, run.metrics, config=run.config) for number in range(8)]
    assert len(run_page([run])) < 300_000 and len(run_page(eight)) < 1_000_000


@pytest.mark.skipif(find_browser() is None, reason="needs Chromium")
def test_a_browser_shows_it_wide_and_narrow(two: list[Run], tmp_path: Path) -> None:
    (tmp_path / "favicon.ico").touch()
    (tmp_path / "one.html").write_text(run_page(two[:1]))
    (tmp_path / "two.html").write_text(run_page(two))
    assert look_at_pages(str(find_browser()), tmp_path, ["one.html", "two.html"]) == []


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = _write(tmp_path / "run", [_line(step) for step in range(1, 41)])
    assert cli.main(["report", str(path), "--html", str(tmp_path / "page.html")]) == 0
    assert "40 of 40" in capsys.readouterr().out and "<svg" in (tmp_path / "page.html").read_text()
    assert cli.main(["report", str(path), "--html", str(tmp_path / "none" / "page.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert cli.main(["report", str(tmp_path / "none")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    with monkeypatch.context() as patched:
        patched.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
        assert cli.main(["report", str(path)]) == 0  # no character that the terminal lacks


def test_a_report_does_not_wait_for_torch(tmp_path: Path) -> None:
    path = _write(tmp_path / "run", [_line(10)], (_session(1),))
    words = ["report", str(path), "--html", str(tmp_path / "page.html")]
    code = f"import sys; from tensorshard.cli import main; main({words!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0
