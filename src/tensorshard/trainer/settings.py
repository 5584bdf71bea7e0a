"""The ``train`` section of a config, checked."""

from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from tensorshard.common.stores import is_url, local_or_url
from tensorshard.common.words import kind_of
from tensorshard.config import ConfigError, instantiate
from tensorshard.config.lazy import suggest
from tensorshard.plan.plan import Plan
from tensorshard.trainer.hooks.profiling import profiled_steps
from tensorshard.trainer.hooks.schedule import best_of
from tensorshard.trainer.loggers import chosen_services

SECTIONS = ("model", "train", "optimizer", "scheduler", "loss", "data")
"""The sections that a config must have at its top level. It may have others, such as ``metrics`` and ``collate``."""


@dataclass(frozen=True)
class TrainSettings:
    """How a run trains. The defaults, with a comment each, are in the shipped config ``common/train.py``.

    Attributes:
        plan: how the model is split over the processes.
        steps: optimizer steps in all.
        global_batch_size: samples in a step, over all data ranks and micro-batches.
        seed: of initial weights, of the order of the data and of dropout.
        name: of the run, for its directory; None for that of its config.
        output_dir: the run's directory; None for the next free ``runs/<name>-<n>``.
        checkpoint_dir: where this run's checkpoints go, if not there: a folder, or a URL such as ``s3://bucket/my_run``.
        eval_every: steps between evaluations; 0 for one at the end alone.
        eval_batches: global batches in an evaluation; None for the whole validation set.
        save_every: steps between checkpoints; 0 for one at the end alone.
        keep_checkpoints: how many checkpoints to keep, the newest ones; 0 for all.
        keep_every: the checkpoints of steps that this divides are kept as well, whatever their age; 0 for none.
        save_in_background: whether checkpoints are written while training goes on.
        replay_every: steps between those whose first micro-batch is computed twice and compared bit for bit before the
            update, which finds a processor that computes wrongly; 0 for none.
        save_best: which evaluation's state ``checkpoints/best`` holds, such as "lowest val_loss"; None for no such
            checkpoint.
        log_every: steps between log lines.
        num_workers: processes that load data, for each rank; 0 loads in the rank itself.
        loggers: programs that measurements are written for beside the terminal and ``metrics.jsonl``.
        profile: steps that are traced, see :class:`ProfileHook`; None for none.
        profile_memory: whether the first steps' memory is recorded, see :class:`MemoryProfileHook`.
        estimate: whether ``tensorshard train`` estimates the memory first, and refuses what cannot fit.
        watchdog: as for :func:`tensorshard.parallelize`. In a process that does nothing but train, it also ends the one
            that keeps the others waiting. The stacks of all ranks go to ``stacks/``.
        debug: whether the first step also finds out if the loss couples samples, see :func:`tensorshard.parallelize`.

    Raises:
        ConfigError: a value is out of range.
    """

    plan: Plan
    steps: int
    global_batch_size: int
    seed: int
    name: str | None
    output_dir: str | None
    eval_every: int
    eval_batches: int | None
    save_every: int
    keep_checkpoints: int
    log_every: int
    num_workers: int
    checkpoint_dir: str | None = None
    save_best: str | None = None
    keep_every: int = 0
    save_in_background: bool = False
    replay_every: int = 0
    loggers: list[str] = field(default_factory=list)
    profile: range | None = None
    debug: bool = False
    profile_memory: bool = False
    estimate: bool = True
    watchdog: bool | float = True

    def __post_init__(self) -> None:
        least = {"steps": 1, "global_batch_size": 1, "eval_batches": 1, "log_every": 1}
        steps = ("eval_every", "save_every", "keep_every", "replay_every")
        least |= dict.fromkeys((*steps, "seed", "keep_checkpoints", "num_workers"), 0)
        for name, bound in least.items():
            value = getattr(self, name)
            if value is None and name == "eval_batches":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < bound:
                raise ConfigError(f"train.{name} is {value!r}; expected an integer of at least {bound}")
        if self.profile is not None and self.profile[-1] > self.steps:
            raise ConfigError(
                f"train.profile names step {self.profile[-1]}, and train.steps={self.steps} ends before it"
            )
        for name in ("debug", "profile_memory", "estimate", "save_in_background"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"train.{name} is {getattr(self, name)!r}; expected true or false")
        if not isinstance(self.watchdog, bool) and not (isinstance(self.watchdog, int | float) and self.watchdog > 0):
            raise ConfigError(f"train.watchdog is {self.watchdog!r}; expected true, false or seconds of more than 0")
        if is_url(self.output_dir):
            raise ConfigError(
                f"train.output_dir is {self.output_dir}, but logs and measurements go to a folder of this machine; "
                f"train.checkpoint_dir takes a URL, for the checkpoints"
            )
        if self.checkpoint_dir is not None and not isinstance(self.checkpoint_dir, str):
            raise ConfigError(f"train.checkpoint_dir is {self.checkpoint_dir!r}; expected a folder or a URL")
        if not isinstance(self.plan, Plan):
            raise ConfigError(
                f"train.plan is {kind_of(self.plan)}; expected LazyCall(Plan)(...), as in common/train.py"
            )

    @property
    def checkpoint_place(self) -> Path | str | None:
        """``checkpoint_dir`` as a Path, or a URL as it is."""
        return None if self.checkpoint_dir is None else local_or_url(self.checkpoint_dir)

    @classmethod
    def from_config(cls, config: DictConfig) -> "TrainSettings":
        """The settings of a whole config.

        Raises:
            ConfigError: a section or a setting is missing, unknown or out of range.
        """
        missing = [section for section in SECTIONS if config.get(section) is None]
        if missing:
            raise ConfigError(
                f"the config has no {' and no '.join(missing)}; one that can be run has the sections "
                f"{', '.join(SECTIONS)} (see the shipped config quickstart.py)"
            )
        required = {entry.name: entry.default is entry.default_factory is MISSING for entry in fields(cls)}
        known = list(required)
        for key in config.train:
            if key not in known:
                raise ConfigError(f"train has no setting {key!r}; {suggest(str(key), known, 'its settings')}")
        values: dict[str, Any] = instantiate(config.train)
        for name in known:
            if name not in values and required[name]:
                raise ConfigError(
                    f"train.{name} is missing; start from get_config('common/train.py').train, which has it"
                )
        values["loggers"] = chosen_services(values.get("loggers"))
        if values.get("profile") is not None:
            try:
                values["profile"] = profiled_steps(values["profile"])
            except ValueError as error:
                raise ConfigError(f"train.profile: {error}") from error
        if values.get("save_best") is not None:
            _check_best(values["save_best"], config)
        return cls(**values)

    def check_batch(self, dp_size: int) -> None:
        """Whether the global batch can be cut into equal parts for each data rank and micro-batch.

        Raises:
            ConfigError: it cannot. The message names the nearest sizes that can.
        """
        parts = dp_size * self.plan.micro_batches
        rest = self.global_batch_size % parts
        if not rest:
            return
        below = self.global_batch_size - rest
        near = f"{below} or {below + parts}" if below else str(parts)
        raise ConfigError(
            f"train.global_batch_size {self.global_batch_size} does not divide by {dp_size} data ranks x "
            f"{self.plan.micro_batches} micro-batches; the nearest that does is {near}"
        )


def _check_best(best: Any, config: DictConfig) -> None:
    """Checks that ``train.save_best`` names something that evaluations measure."""
    try:
        _, metric = best_of(best)
    except ValueError as error:
        raise ConfigError(f"train.save_best: {error}") from error
    measured = ["val_loss", *(config.get("metrics") or {})] if config.data.get("validation") is not None else []
    if metric not in measured:
        known = (
            f"evaluations measure {', '.join(measured)}" if measured else "nothing is evaluated without data.validation"
        )
        raise ConfigError(f"train.save_best names {metric!r}; {known}")
