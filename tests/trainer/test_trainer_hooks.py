"""The training loop and its hooks, each by itself."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rank_pool import RankPool
from tensorshard import Plan, parallelize
from tensorshard.config import ConfigError
from tensorshard.engine.engine import NonFiniteLossError
from tensorshard.trainer import (
    CheckpointHook,
    EvaluationHook,
    Hook,
    LoggingHook,
    MemoryHook,
    OptimizerOptionsHook,
    PeakMemory,
    RunDirectory,
    ScheduleHook,
    TimerHook,
    Trainer,
    warmup_linear,
)
from tensorshard.trainer.hooks import OutOfMemoryHook
from tensorshard.trainer.loggers import Logger
from tensorshard.trainer.trainer import BatchSize
from trainer_doubles import CountingEngine, regression_batches


class Diary(Hook):
    """Writes down each moment."""

    def __init__(self, name: str, entries: list[str]) -> None:
        self._name = name
        self.entries = entries

    @property
    def name(self) -> str:
        return self._name

    def _write(self, moment: str) -> None:
        self.entries.append(f"{self._name}.{moment}")

    def before_train(self, trainer: Trainer) -> None:
        self._write("before_train")

    def before_step(self, trainer: Trainer) -> None:
        self._write("before_step")

    def after_step(self, trainer: Trainer, record: Any) -> None:
        self._write(f"after_step {record.step}")

    def after_train(self, trainer: Trainer) -> None:
        self._write("after_train")

    def on_error(self, trainer: Trainer, error: Exception) -> None:
        self._write(f"on_error {type(error).__name__}")

    def close(self) -> None:
        self._write("close")


class Notebook(Logger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.lines: dict[int, dict[str, float]] = {}
        self.span = (-1, -1)
        self.steps_done: list[int] = []
        self.closed = False

    def start(self, step: int, max_steps: int) -> None:
        self.span = (step, max_steps)

    def step_done(self, step: int) -> None:
        self.steps_done.append(step)

    def log(self, step: int, metrics: Any) -> None:
        self.lines[step] = dict(metrics)

    def close(self) -> None:
        self.closed = True


class FixedEvaluator:
    def __init__(self) -> None:
        self.at: list[int] = []

    def evaluate(self, engine: Any) -> dict[str, float]:
        self.at.append(engine.step_count)
        return {"val_loss": 10.0 - engine.step_count}


class NanEngine(CountingEngine):
    """Its loss is NaN at one step, and its weights after another."""

    def __init__(self, nan_at: int, spoil_weights_at: int = -1) -> None:
        super().__init__()
        self.nan_at = nan_at
        self.spoil_weights_at = spoil_weights_at

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        if self.step_count + 1 == self.nan_at:
            raise NonFiniteLossError(f"the loss is nan at step {self.nan_at}")
        loss = super().step(inputs, targets)
        if self.step_count == self.spoil_weights_at:
            self.model.weight.data.fill_(float("nan"))
        return loss


def _trainer(hooks: list[Hook], max_steps: int = 4, engine: CountingEngine | None = None, **more: Any) -> Trainer:
    return Trainer(
        engine or CountingEngine(),  # type: ignore[arg-type]
        more.pop("loader", regression_batches()),
        max_steps=max_steps,
        hooks=hooks,
        **more,
    )


def test_hooks_are_called_in_their_order_at_every_moment() -> None:
    entries: list[str] = []
    _trainer([Diary("a", entries), Diary("b", entries)], max_steps=1).fit()
    moments = ["before_train", "before_step", "after_step 1", "after_train", "close"]
    assert entries == [f"{name}.{moment}" for moment in moments for name in "ab"]


def test_an_error_reaches_the_hooks_and_the_caller() -> None:
    entries: list[str] = []
    with pytest.raises(NonFiniteLossError):
        _trainer([Diary("a", entries)], engine=NanEngine(nan_at=1)).fit()
    assert entries == ["a.before_train", "a.before_step", "a.on_error NonFiniteLossError", "a.close"]


def test_the_trainer_trains_as_a_plain_loop_does() -> None:
    trainer = _trainer([], max_steps=6)
    trainer.fit()
    plain = CountingEngine()
    for inputs, targets in (regression_batches() * 2)[:6]:
        loss = plain.step(inputs, targets)
    assert trainer.last_record is not None
    assert torch.equal(trainer.last_record.loss, loss)
    assert torch.equal(trainer.engine.model.weight, plain.model.weight)  # type: ignore[arg-type]
    assert trainer.samples_consumed == 6 * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_steps": 0}, "max_steps is 0"),
        ({"hooks": [Hook(), Hook()]}, "several hooks named Hook"),
    ],
)
def test_a_trainer_that_cannot_work_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _trainer(**{"hooks": [], **arguments})


def test_an_empty_loader_is_an_error_and_no_endless_loop() -> None:
    with pytest.raises(ValueError, match="gave no batch"):
        _trainer([], loader=[]).fit()


def test_batches_are_counted_in_samples_and_in_tokens_of_text() -> None:
    text = torch.zeros(4, 16, dtype=torch.int64)
    assert BatchSize.of(text) == BatchSize(4, 64)
    assert BatchSize.of({"tokens": text, "mask": text.float()}).times(2) == BatchSize(8, 128)
    assert BatchSize.of((torch.zeros(4, 3, 8, 8), text)) == BatchSize(4, None)
    with pytest.raises(ValueError, match="every tensor must have the samples as its first dimension"):
        BatchSize.of({"tokens": text, "mask": text[:1]})


def test_the_timer_excludes_what_other_hooks_do_and_averages_since_the_last_report() -> None:
    now = 0.0

    class Pause(Hook):
        def __init__(self, seconds: float) -> None:
            self.seconds = seconds

        def after_step(self, trainer: Trainer, record: Any) -> None:
            nonlocal now
            now += self.seconds

    class SlowEngine(CountingEngine):
        def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
            nonlocal now
            now += float(self.step_count + 1)
            return super().step(inputs, targets)

    notebook = Notebook()
    timer = TimerHook(every=2, clock=lambda: now)
    _trainer([timer, Pause(100.0), LoggingHook([notebook], every=2)], engine=SlowEngine()).fit()
    assert notebook.lines[2]["step_seconds"] == pytest.approx(1.5)
    assert notebook.lines[4]["step_seconds"] == pytest.approx(3.5)
    assert notebook.lines[4]["samples_per_second"] == pytest.approx(6 / 7)
    assert "tokens_per_second" not in notebook.lines[4]
    assert timer.overall()["step_seconds"] == pytest.approx(3.0)  # of steps 2, 3 and 4


def test_logged_are_the_first_step_every_few_the_last_and_evaluations() -> None:
    notebook = Notebook()
    evaluator = FixedEvaluator()
    _trainer([EvaluationHook([evaluator], every=5), LoggingHook([notebook], every=3)], max_steps=7).fit()
    assert evaluator.at == [5, 7]
    assert sorted(notebook.lines) == [1, 3, 5, 6, 7]
    assert [step for step, line in notebook.lines.items() if "val_loss" in line] == [5, 7]
    assert notebook.lines[5]["val_loss"] == 5.0
    assert notebook.span == (0, 7) and notebook.steps_done == list(range(1, 8)) and notebook.closed


def test_evaluation_every_0_is_one_at_the_end() -> None:
    evaluator = FixedEvaluator()
    hook = EvaluationHook([evaluator], every=0)
    _trainer([hook]).fit()
    assert evaluator.at == [4]
    assert hook.latest == {"val_loss": 6.0}


def test_the_logged_rate_is_the_one_that_the_step_was_taken_with() -> None:
    engine = CountingEngine()
    notebook = Notebook()
    schedule = ScheduleHook(warmup_linear(engine.optimizer, warmup_steps=2, total_steps=4))
    _trainer([LoggingHook([notebook]), schedule], engine=engine).fit()
    assert [notebook.lines[step]["lr"] for step in (1, 2, 3, 4)] == pytest.approx([0.05, 0.1, 0.1, 0.05])


def test_the_gradient_norm_and_metrics_are_logged_where_there_are_any() -> None:
    engine = CountingEngine()
    notebook = Notebook()
    _trainer([LoggingHook([notebook])], engine=engine, max_steps=1).fit()
    assert "grad_norm" not in notebook.lines[1]
    engine.grad_norm, engine.metrics = 1.5, {"kl": torch.tensor(0.25)}
    _trainer([LoggingHook([notebook])], engine=engine, max_steps=2).fit()
    assert notebook.lines[2]["grad_norm"] == 1.5 and notebook.lines[2]["kl"] == 0.25


def test_peak_memory_is_recorded() -> None:
    notebook = Notebook()
    _trainer([MemoryHook(PeakMemory(torch.device("cpu"))), LoggingHook([notebook])], max_steps=1).fit()
    assert notebook.lines[1]["peak_memory_bytes"] > 10 * 2**20


def test_checkpoints_are_saved_now_and_then_and_at_the_end_and_the_newest_are_kept(tmp_path: Path) -> None:
    engine = CountingEngine()
    directory = RunDirectory(tmp_path)
    _trainer([CheckpointHook(directory, every=2, keep=2)], engine=engine, max_steps=7).fit()
    assert list(engine.saved) == ["step-2", "step-4", "step-6", "step-7"]
    assert directory.checkpoint_steps() == [6, 7]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith(".")] == []
    assert engine.saved["step-6"] == {"samples_consumed": 18, "hooks": {}}


def test_those_of_round_steps_are_kept_and_nothing_is_deleted_unless_a_whole_one_stays(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    _trainer([CheckpointHook(directory, every=1, keep=2, keep_every=3)], engine=CountingEngine(), max_steps=8).fit()
    assert directory.checkpoint_steps() == [3, 6, 7, 8]

    class Damages(CountingEngine):
        def save(self, path: Path, **options: Any) -> None:
            super().save(path, **options)
            if self.step_count > 2:
                (path / "manifest.json").unlink()

    directory = RunDirectory(tmp_path / "damaged")
    _trainer([CheckpointHook(directory, every=1, keep=1)], engine=Damages(), max_steps=4).fit()
    assert directory.checkpoint_steps() == [2, 3, 4]


def test_training_does_not_begin_before_later_checkpoints(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    _trainer([CheckpointHook(directory, every=2)], engine=CountingEngine(), max_steps=4).fit()
    other = CountingEngine()
    with pytest.raises(ConfigError, match=r"after step 0, but .* later checkpoints \(steps 2, 4\)"):
        _trainer([CheckpointHook(directory, every=2)], engine=other, max_steps=4).fit()
    assert not other.saved and other.step_count == 0


class _Scores(Hook):
    """Writes down a score at some steps, as evaluations do."""

    def __init__(self, scores: dict[int, float]) -> None:
        self.scores = scores

    def after_step(self, trainer: Trainer, record: Any) -> None:
        if record.step in self.scores:
            record.metrics["score"] = self.scores[record.step]


@pytest.mark.parametrize("best, kept", [("lowest score", 2), ("highest score", 5)])
def test_the_best_state_is_kept_beside_the_newest(tmp_path: Path, best: str, kept: int) -> None:
    engine = CountingEngine()
    directory = RunDirectory(tmp_path)
    scores = {1: 3.0, 2: 1.0, 4: float("nan"), 5: 4.0, 6: 2.0}
    hook = CheckpointHook(directory, every=4, keep=1, best=best)
    _trainer([_Scores(scores), hook], engine=engine, max_steps=6).fit()
    assert engine.saved["best"]["samples_consumed"] == 3 * kept
    assert hook.state_dict() == engine.saved["best"]["hooks"]["CheckpointHook"] == {"best": {"score": scores[kept]}}
    assert directory.checkpoint_steps() == [6] and directory.best_checkpoint.is_dir()
    resumed = CheckpointHook(directory, every=4, keep=1, best=best)
    resumed.load_state_dict(hook.state_dict())
    _trainer([_Scores({7: 3.0}), resumed], engine=engine, max_steps=7).fit()
    assert engine.saved["best"]["samples_consumed"] == 3 * kept  # 3.0 is neither


def test_a_last_step_that_is_saved_already_is_not_saved_again(tmp_path: Path) -> None:
    engine = CountingEngine()
    _trainer([CheckpointHook(RunDirectory(tmp_path), every=2, keep=0)], engine=engine, max_steps=4).fit()
    assert list(engine.saved) == ["step-2", "step-4"]


def test_a_nan_loss_keeps_the_state_from_before_it_and_says_where(tmp_path: Path) -> None:
    engine = NanEngine(nan_at=6)
    directory = RunDirectory(tmp_path)
    with pytest.raises(NonFiniteLossError, match="step 6") as caught:
        _trainer([CheckpointHook(directory, every=2, keep=1)], engine=engine, max_steps=9).fit()
    assert directory.checkpoint_steps() == [4, 5]
    assert any(f"last good checkpoint is {directory.checkpoint(5)}" in note for note in caught.value.__notes__)


def test_weights_that_are_nan_are_not_saved(tmp_path: Path) -> None:
    engine = NanEngine(nan_at=6, spoil_weights_at=5)
    directory = RunDirectory(tmp_path)
    with pytest.raises(NonFiniteLossError) as caught:
        _trainer([CheckpointHook(directory, every=2, keep=2)], engine=engine, max_steps=9).fit()
    assert directory.checkpoint_steps() == [2, 4]
    assert any(str(directory.checkpoint(4)) in note for note in caught.value.__notes__)


def test_a_nan_loss_at_the_first_step_has_nothing_to_go_back_to(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteLossError) as caught:
        _trainer([CheckpointHook(RunDirectory(tmp_path), every=2)], engine=NanEngine(nan_at=1)).fit()
    assert any("nothing to go back to" in note for note in caught.value.__notes__)


def test_the_state_of_hooks_survives_a_resume() -> None:
    engine = CountingEngine()
    first = _trainer([ScheduleHook(warmup_linear(engine.optimizer, warmup_steps=2, total_steps=8))], engine=engine)
    first.fit()
    again = CountingEngine()
    schedule = ScheduleHook(warmup_linear(again.optimizer, warmup_steps=2, total_steps=8))
    second = _trainer([schedule, Diary("new", [])], engine=again)
    second.load_state_dict(first.state_dict())
    assert second.samples_consumed == 12
    assert schedule.scheduler.get_last_lr() == pytest.approx([0.1 * 4 / 6])


def _resumed_rate(make: Any, rate: float) -> float:
    """The rate after resuming a run of 4 steps, whose peak was 0.1, with another peak."""
    engine = CountingEngine()
    first = _trainer([ScheduleHook(make(engine.optimizer))], engine=engine)
    first.fit()
    again = CountingEngine()
    again.optimizer.param_groups[0]["lr"] = rate
    second = _trainer([ScheduleHook(make(again.optimizer))], engine=again)
    again.optimizer.load_state_dict(engine.optimizer.state_dict())  # as Engine.load does
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    return float(again.optimizer.param_groups[0]["lr"])


def test_a_resumed_run_may_change_its_peak_rate() -> None:
    make = partial(warmup_linear, warmup_steps=2, total_steps=8)
    assert _resumed_rate(make, 0.1) == pytest.approx(0.1 * 4 / 6)
    assert _resumed_rate(make, 0.3) == pytest.approx(0.3 * 4 / 6)


def test_a_schedule_that_cannot_change_its_rate_says_so() -> None:
    make = partial(torch.optim.lr_scheduler.StepLR, step_size=2)
    assert _resumed_rate(make, 0.1) == pytest.approx(0.001)
    with pytest.raises(ValueError, match=r"were \[0.1\] and now are \[0.3\], but a StepLR"):
        _resumed_rate(make, 0.3)


def test_options_that_were_changed_survive_a_resume_and_others_are_restored() -> None:
    def options(weight_decay: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW([torch.zeros(1, requires_grad=True)], weight_decay=weight_decay, betas=(0.9, 0.95))

    first, second = options(0.1), options(0.0)
    saved = json.loads(json.dumps(OptimizerOptionsHook(first).state_dict()))
    hook = OptimizerOptionsHook(second)
    first.param_groups[0]["betas"] = (0.8, 0.95)  # a schedule's doing, which the checkpoint brings back
    second.load_state_dict(first.state_dict())
    hook.load_state_dict(saved)
    group = second.param_groups[0]
    assert (group["weight_decay"], group["betas"], group["lr"]) == (0.0, (0.8, 0.95), 1e-3)


@pytest.mark.parametrize(
    ("hook", "arguments"),
    [
        (TimerHook, {"every": 0}),
        (LoggingHook, {"loggers": [], "every": 0}),
        (EvaluationHook, {"evaluators": [], "every": -1}),
        (CheckpointHook, {"directory": RunDirectory(Path("x")), "every": -1}),
    ],
)
def test_intervals_must_make_sense(hook: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"every is (0|-1); expected"):
        hook(**arguments)


def test_a_number_of_kept_checkpoints_must_make_sense() -> None:
    with pytest.raises(ValueError, match="keep is -1"):
        CheckpointHook(RunDirectory(Path("x")), every=1, keep=-1)


def _without_memory(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("made by the test")


def _run_out_of_memory() -> list[str]:
    adam = partial(torch.optim.AdamW, lr=0.1)
    engine = parallelize(partial(nn.Linear, 256, 128), Plan(zero=1), optimizer=adam, loss_fn=_without_memory)
    batch = torch.ones(4, 256), torch.ones(4, 128)
    trainer = Trainer(engine, [batch], max_steps=1, hooks=[OutOfMemoryHook(global_batch_size=8)])
    with pytest.raises(torch.OutOfMemoryError) as raised:
        trainer.fit()
    return raised.value.__notes__


def test_an_error_about_memory_says_what_was_held_and_what_takes_less(ranks: RankPool) -> None:
    note = ranks(2, _run_out_of_memory)[1][-1]
    assert "rank 1 ran out of memory in step 1" in note and "optimizer states" in note and "parameters" in note
    assert "zero=2" in note and "micro_batches=2" in note and "recompute=full" in note
