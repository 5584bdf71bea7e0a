"""Hooks that act at certain steps: learning rates and other options of the optimizer, evaluations, checkpoints.

Also here: what to measure on data that is not trained on.
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from tensorshard.comm.sharding import to_local
from tensorshard.engine.engine import Engine, NonFiniteLossError
from tensorshard.torch_private.optimizers import set_last_rates
from tensorshard.trainer.run_directory import RunDirectory
from tensorshard.trainer.trainer import Hook, StepRecord

if TYPE_CHECKING:
    from torchmetrics import Metric

    from tensorshard.trainer.trainer import Trainer


class Evaluator(Protocol):
    """Measures something. Collective: every rank has its own share of the data, in as many batches."""

    def evaluate(self, engine: Engine) -> dict[str, float]:
        """The results by name (``val_...``), the same on every rank."""


class LossEvaluator:
    """The mean loss: for a language model, in nats a token.

    It is that of all samples (or tokens, where the loss counts them), so a smaller last batch counts less.

    Args:
        loader: this data rank's batches of ``(inputs, targets)``, the same ones in each evaluation.
        max_batches: how many to use, or None for all.
        name: of the result.
    """

    def __init__(self, loader: Iterable[Any], max_batches: int | None = None, name: str = "val_loss") -> None:
        self.loader = loader
        self.max_batches = max_batches
        self.name = name

    def evaluate(self, engine: Engine) -> dict[str, float]:
        return {self.name: float(engine.evaluate(islice(self.loader, self.max_batches)))}


class MetricEvaluator:
    """Any ``torchmetrics`` metrics of outputs against targets, such as the accuracy of a classifier.

    Args:
        loader: this data rank's batches of ``(inputs, targets)``, the same ones in each evaluation.
        metrics: by the name of the result; each is updated with the outputs and targets of all ranks, see
            :meth:`tensorshard.Engine.evaluate`.
        max_batches: how many to use, or None for all.
    """

    def __init__(self, loader: Iterable[Any], metrics: Mapping[str, "Metric"], max_batches: int | None = None) -> None:
        self.loader = loader
        self.metrics = {name: _OfLogits(metric) for name, metric in metrics.items()}
        self.max_batches = max_batches

    def evaluate(self, engine: Engine) -> dict[str, float]:
        metrics = engine.evaluate(islice(self.loader, self.max_batches), metrics=self.metrics)
        return {name: float(value) for name, value in metrics.items()}


class _OfLogits(nn.Module):
    """A metric of the logits, if the model's output is an object that has them, as those of transformers are."""

    def __init__(self, metric: "Metric") -> None:
        super().__init__()
        self.metric = metric

    def update(self, outputs: Any, targets: Any) -> None:
        self.metric.update(getattr(outputs, "logits", outputs), targets)

    def compute(self) -> Any:
        return self.metric.compute()

    def reset(self) -> None:
        self.metric.reset()


class CheckpointHook(Hook):
    """Saves every `every` steps and at the end, also at an early one; keeps the newest `keep` checkpoints.

    Put it last, so that what it saves is the state after all other hooks have seen the step.

    If the loss turns NaN or infinite, the engine raises before the update. The state from before that step is
    then saved, if its weights are finite, and nothing is deleted; the error says which checkpoint is the last
    good one.

    Args:
        directory: of the run.
        every: steps between checkpoints; 0 for one at the end alone.
        keep: checkpoints to keep, the newest ones; 0 for all.
        best: after which evaluations ``checkpoints/best`` is replaced, such as "lowest val_loss"; None for no such
            checkpoint. It does not count as one of those to keep.
        keep_every: those of steps that this divides are kept as well, whatever their age; 0 for none.
        background: whether they are written while training goes on.

    Nothing is deleted unless a whole checkpoint stays.

    Training does not begin where the directory holds checkpoints of later steps, as of another run: ConfigError.
    """

    def __init__(
        self,
        directory: RunDirectory,
        every: int,
        keep: int = 2,
        best: str | None = None,
        *,
        keep_every: int = 0,
        background: bool = False,
    ) -> None:
        if every < 0:
            raise ValueError(f"every is {every}; expected a number of steps, or 0 for a checkpoint at the end alone.")
        if keep < 0:
            raise ValueError(f"keep is {keep}; expected a number of checkpoints, or 0 to keep all.")
        if keep_every < 0:
            raise ValueError(f"keep_every is {keep_every}; expected a number of steps, or 0 for none.")
        self.directory = directory
        self.every = every
        self.keep = keep
        self.keep_every = keep_every
        self.background = background
        self._writing: Path | str | None = None  # in the background
        self._sign, self._metric = (0, "") if best is None else best_of(best)
        self._best: float | None = None  # value of the metric

    def before_train(self, trainer: "Trainer") -> None:
        self.directory.check_not_ahead(trainer.step)
        self._saved_step = trainer.step

    def after_step(self, trainer: "Trainer", record: StepRecord) -> None:
        if self._writing is not None and trainer.engine.saving is None:
            self._end_writing(trainer.engine)
        if self.every and record.step % self.every == 0:
            self._save(trainer, background=self.background)
            if self._writing is None:
                self._delete_old(trainer.engine)
        value = record.metrics.get(self._metric)  # the same on every rank
        if value is not None and (self._best is None or self._sign * value > self._sign * self._best):
            self._best = value
            self._write(trainer, self.directory.best_checkpoint, background=self.background, overwrite=True)
            logger.info("checkpoint %s: %s %.6g", self.directory.best_checkpoint, self._metric, value)

    def state_dict(self) -> dict[str, Any]:
        return {} if self._best is None else {"best": {self._metric: self._best}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._best = state["best"].get(self._metric)

    def after_train(self, trainer: "Trainer") -> None:
        if trainer.step != self._saved_step:
            self._save(trainer)
            self._delete_old(trainer.engine)
        elif self._writing is not None:
            trainer.engine.wait_for_save()
            self._end_writing(trainer.engine)

    def on_error(self, trainer: "Trainer", error: Exception) -> None:
        # The loss is the global one, so this error is raised on every rank, and all of them may communicate
        # here.
        if not isinstance(error, NonFiniteLossError):
            return
        if trainer.step != self._saved_step and _weights_are_finite(trainer.engine):
            self._save(trainer)
        newest = self.directory.newest_checkpoint()
        if newest is None:
            error.add_note("No checkpoint was written before: there is nothing to go back to.")
        else:
            error.add_note(
                f"The last good checkpoint is {newest}; continue from it with --resume and "
                f"another learning rate, clipping or precision."
            )

    def _save(self, trainer: "Trainer", *, background: bool = False) -> None:
        self._write(trainer, self.directory.checkpoint(trainer.step), background=background)
        self._saved_step = trainer.step

    def _write(self, trainer: "Trainer", path: Path | str, *, background: bool, overwrite: bool = False) -> None:
        options: dict[str, Any] = {"overwrite": True} if overwrite else {}
        if background:
            if self._writing is not None:
                trainer.engine.wait_for_save()
                self._end_writing(trainer.engine)
            trainer.engine.save(path, extra=trainer.state_dict(), background=True, **options)
            self._writing = path
            return
        trainer.engine.save(path, extra=trainer.state_dict(), **options)  # which waits for one in the background
        if self._writing is not None:
            self._end_writing(trainer.engine)
        logger.info("saved checkpoint %s", path)

    def _end_writing(self, engine: Engine) -> None:
        """What follows a save in the background that is done."""
        logger.info("saved checkpoint %s", self._writing)
        self._writing = None
        self._delete_old(engine)

    def _delete_old(self, engine: Engine) -> None:
        if not self.keep or engine.mesh.rank != 0:
            return
        from tensorshard.checkpoint.integrity import is_whole

        steps = self.directory.checkpoint_steps()
        old = [step for step in steps[: -self.keep] if not (self.keep_every and step % self.keep_every == 0)]
        if old and not any(is_whole(self.directory.checkpoint(step)) for step in reversed(steps) if step not in old):
            logger.warning("no older checkpoint is deleted, as none of the newest %d is whole", self.keep)
            return
        for step in old:
            self.directory.delete_checkpoint(step)


def best_of(best: str) -> tuple[int, str]:
    """Whether the highest value is the best one (1) or the lowest (-1), and of which metric.

    Raises:
        ValueError: `best` does not say so.
    """
    signs = {"lowest": -1, "highest": 1}
    words = best.split() if isinstance(best, str) else []
    if len(words) != 2 or words[0] not in signs:
        raise ValueError(f"it is {best!r}; expected 'lowest' or 'highest' and a metric, such as 'lowest val_loss'")
    return signs[words[0]], words[1]


def _weights_are_finite(engine: Engine) -> bool:
    """Whether every weight on every rank is. Collective."""
    local = (to_local(p) for p in engine.model.parameters())
    bad = sum((~torch.isfinite(p.detach())).sum().to(engine.device, torch.int64) for p in local)
    count = torch.as_tensor(bad, device=engine.device)
    if dist.is_initialized():
        dist.all_reduce(count)
    return not count.item()


class ScheduleHook(Hook):
    """Moves any torch ``LRScheduler`` on by one after each step, and keeps its state in checkpoints.

    Put it after the hook that logs, so that the log has the rate with which the step was taken.

    A resumed run may have another peak rate or another number of steps than the run that it continues. A schedule
    that is a function of the step (a ``LambdaLR``, as all of :mod:`tensorshard.trainer.schedulers` are) then goes
    on as if it had had these values from the start.
    """

    def __init__(self, scheduler: LRScheduler) -> None:
        self.scheduler = scheduler

    def after_step(self, trainer: "Trainer", record: StepRecord) -> None:
        self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return self.scheduler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what :meth:`state_dict` gave.

        Raises:
            ValueError: the peak rates have changed, and the schedule is not a function of the step.
        """
        peaks = getattr(self.scheduler, "base_lrs", None)
        if isinstance(self.scheduler, LambdaLR):
            self.scheduler.load_state_dict({**state, "base_lrs": peaks})
            _set_rates(self.scheduler)
        elif peaks != state.get("base_lrs"):
            raise ValueError(
                f"the learning rates were {state.get('base_lrs')} and now are {peaks}, but a "
                f"{type(self.scheduler).__name__} cannot change them on the way; keep them, or use a LambdaLR"
            )
        else:
            self.scheduler.load_state_dict(state)


def _set_rates(schedule: LambdaLR) -> None:
    """Gives the optimizer the rates of the step that `schedule` stands at."""
    ratios = [ratio(schedule.last_epoch) for ratio in schedule.lr_lambdas]
    rates = [peak * ratio for peak, ratio in zip(schedule.base_lrs, ratios, strict=True)]
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    set_last_rates(schedule, rates)


class OptimizerOptionsHook(Hook):
    """Lets a resumed run change options of its optimizer, such as the weight decay.

    A checkpoint restores the options with which it was saved. Options that the config has changed since then are set
    to their new values. The schedule restores the learning rate.

    Args:
        optimizer: as it was made: not stepped, and with no schedule on it yet.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._configured = [
            {key: value for key, value in group.items() if key != "lr" and _is_plain(value)}
            for group in optimizer.param_groups
        ]

    def state_dict(self) -> dict[str, Any]:
        return {"groups": self._configured}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for group, now, then in zip(self.optimizer.param_groups, self._configured, state["groups"], strict=True):
            for key, value in now.items():
                # Compared as JSON, since the saved values were stored as JSON.
                if json.dumps(value) != json.dumps(then.get(key)):
                    group[key] = value


def _is_plain(value: Any) -> bool:
    """Whether `value` is that of an option, which goes into a checkpoint, and not a parameter or tensor."""
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


logger = logging.getLogger("tensorshard")


class EvaluationHook(Hook):
    """Runs evaluators every `every` steps and after the last one; what they return joins the step's metrics.

    Args:
        evaluators: run in this order.
        every: steps between evaluations; 0 for one at the end alone.

    Attributes:
        latest: the last results, empty before the first evaluation.
    """

    def __init__(self, evaluators: Sequence[Evaluator], every: int) -> None:
        if every < 0:
            raise ValueError(f"every is {every}; expected a number of steps, or 0 for an evaluation at the end alone.")
        self.evaluators = list(evaluators)
        self.every = every
        self.latest: dict[str, float] = {}

    def after_step(self, trainer: "Trainer", record: StepRecord) -> None:
        due = self.every and record.step % self.every == 0
        if not due and record.step != trainer.max_steps:
            return
        for evaluator in self.evaluators:
            self.latest |= evaluator.evaluate(trainer.engine)
        record.metrics |= self.latest
        logger.debug("evaluated after step %d: %s", record.step, self.latest)
