"""Where measurements are written."""

import io
import json
import logging
from pathlib import Path

import pytest
from rich.console import Console

from tensorshard.common.words import format_count
from tensorshard.trainer.loggers import (
    AS_IT_IS,
    ConsoleHandler,
    JsonLinesLogger,
    PlainLogger,
    ProgressBarLogger,
    RankLog,
    TensorBoardLogger,
    console_logger,
    read_metrics,
)
from tensorshard.trainer.loggers.console import format_figures, format_seconds


def _console(terminal: bool, width: int = 100) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, force_terminal=terminal, width=width, color_system=None, _environ={}), text


def test_metrics_file_holds_one_object_a_line_with_the_step_first(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    logger = JsonLinesLogger(path)
    logger.start(0, 2)
    logger.log(1, {"loss": 2.5, "tokens_per_second": 10.0})
    on_disk_before_close = path.read_text()
    logger.log(2, {"loss": float("inf")})
    logger.close()
    assert on_disk_before_close == '{"step": 1, "loss": 2.5, "tokens_per_second": 10.0}\n'
    assert read_metrics(path)[1] == {"step": 2, "loss": None}


def test_a_resumed_metrics_file_has_each_step_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in (1, 2, 3, 4)]
    path.write_text("\n".join(lines) + '\n{"step": 5, "lo')  # a crash cut the last line short
    logger = JsonLinesLogger(path)
    logger.start(2, 6)
    logger.log(3, {"loss": 0.5})
    logger.close()
    assert [(line["step"], line["loss"]) for line in read_metrics(path)] == [(1, 1.0), (2, 1.0), (3, 0.5)]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_metrics_file_must_be_opened_first(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="before start"):
        JsonLinesLogger(tmp_path / "metrics.jsonl").log(1, {})


def test_plain_lines_are_sparse_but_never_miss_an_evaluation_or_the_end() -> None:
    console, text = _console(terminal=False)
    now = 0.0
    logger = PlainLogger(console, seconds=10.0, clock=lambda: now)
    logger.start(0, 100)
    for step in range(10, 101, 10):
        now += 4.0
        metrics = {"loss": 2.0, "tokens_per_second": 12345.0, "peak_memory_bytes": 3 * 2**20}
        logger.log(step, metrics | ({"val_loss": 2.5} if step == 50 else {}))
    assert text.getvalue().splitlines() == [
        "step  10/100  loss 2.0000  12.3k tokens/s  3.00 MiB  eta 0:36",
        "step  40/100  loss 2.0000  12.3k tokens/s  3.00 MiB  eta 0:24",
        "step  50/100  loss 2.0000  val_loss 2.5000  12.3k tokens/s  3.00 MiB  eta 0:20",
        "step  80/100  loss 2.0000  12.3k tokens/s  3.00 MiB  eta 0:08",
        "step 100/100  loss 2.0000  12.3k tokens/s  3.00 MiB",
    ]


def test_plain_lines_count_the_time_left_from_where_a_resumed_run_began() -> None:
    console, text = _console(terminal=False)
    now = 0.0
    logger = PlainLogger(console, clock=lambda: now)
    logger.start(90, 100)
    now = 5.0
    logger.log(95, {"loss": 1.0})
    assert text.getvalue() == "step  95/100  loss 1.0000  eta 0:05\n"


def test_the_progress_bar_shows_figures_and_leaves_evaluations_above_it() -> None:
    console, text = _console(terminal=True)
    logger = console_logger(console)
    assert isinstance(logger, ProgressBarLogger)
    logger.start(0, 4)
    logger.step_done(2)
    logger.log(2, {"loss": 1.5, "samples_per_second": 7.0})
    logger.log(2, {"loss": 1.5, "val_loss": 1.25})
    logger.close()
    shown = text.getvalue()
    assert "step 2/4  loss 1.5000  val_loss 1.2500" in shown
    last_bar = shown.rpartition("step")[2]
    assert " 2/4 " in last_bar and "loss 1.5000" in last_bar and "val_loss" not in last_bar


@pytest.mark.parametrize(("width", "kept"), [(50, 4), (60, 4), (80, 5), (120, 6)])
def test_a_narrow_terminal_keeps_step_loss_rate_and_time_left(width: int, kept: int) -> None:
    console, text = _console(terminal=True, width=width)
    logger = console_logger(console)
    logger.start(0, 100_000)
    logger.step_done(50_000)
    logger.log(50_000, {"loss": 10.5, "tokens_per_second": 123_400.0, "peak_memory_bytes": 3 * 2**30})
    logger.close()
    line = text.getvalue().rpartition("\r")[2].replace("\x1b[2K", "").splitlines()[0]
    shown = ["50000/100000", "loss 10.5000", "123.4k tok", "eta ", "3.00 GiB", "━"]
    assert [part in line for part in shown] == [number < kept for number in range(6)]
    assert len(line) <= width


def test_files_get_lines_of_any_length_and_terminals_lines_broken_at_words() -> None:
    sentence = "with tp, blocks under recompute='full' are not compiled: torch.compile does not look into them"
    for terminal, lines in ((False, 1), (True, 2)):
        console, text = _console(terminal, width=60)
        handler = ConsoleHandler(console)
        handler.emit(logging.makeLogRecord({"msg": sentence, "levelno": logging.INFO}))
        assert len(text.getvalue().splitlines()) == lines and text.getvalue().split() == sentence.split()
        handler.emit(logging.makeLogRecord({"msg": sentence, "levelno": logging.INFO, **AS_IT_IS}))
        assert text.getvalue().splitlines()[lines:] == [sentence]


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    assert isinstance(console_logger(console), PlainLogger)


def test_what_is_no_terminal_gets_plain_lines() -> None:
    assert isinstance(console_logger(_console(terminal=False)[0]), PlainLogger)


def test_figures_fall_back_to_samples() -> None:
    assert format_figures({"loss": 1.0, "samples_per_second": 1500.0, "lr": 0.1}) == "loss 1.0000  1.5k samples/s"


def test_counts_and_times_for_people() -> None:
    assert [format_count(n) for n in (0.5, 999, 12_345, 2_500_000, 3e9)] == [
        "0.5",
        "999.0",
        "12.3k",
        "2.5M",
        "3.0G",
    ]
    assert [format_seconds(s) for s in (4.4, 75, 3661)] == ["0:04", "1:15", "1:01:01"]


def test_tensorboard_gets_every_measurement(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path)
    logger.start(0, 2)
    logger.log(1, {"loss": 2.0, "lr": 0.5})
    logger.log(2, {"loss": 1.0, "lr": 0.25})
    logger.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 2.0), (2, 1.0)]
    assert [event.value for event in events.Scalars("lr")] == [0.5, 0.25]


def test_each_rank_logs_to_its_own_file_and_leaves_the_logger_as_it_was(tmp_path: Path) -> None:
    logger = logging.getLogger("tensorshard")
    before = (logger.level, logger.propagate, list(logger.handlers))
    with RankLog(tmp_path / "run", rank=3) as log:
        logging.getLogger("tensorshard.anything").info("here is %s", "a line")
    logger.info("not this one")
    text = (tmp_path / "run" / "rank3.log").read_text()
    assert log.path == tmp_path / "run" / "rank3.log"
    assert "INFO" in text and "here is a line" in text and "not this one" not in text
    assert (logger.level, logger.propagate, list(logger.handlers)) == before


def test_the_rank_log_keeps_the_traceback_of_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), RankLog(tmp_path, rank=0):
        1 / 0  # noqa: B018
    assert "ZeroDivisionError" in (tmp_path / "rank0.log").read_text()
