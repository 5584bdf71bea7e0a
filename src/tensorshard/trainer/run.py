"""A run, from its config to its summary: what every worker of ``tensorshard train`` executes.

Also here: loading the newest checkpoint of a run that is not damaged, the same one on every rank.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from rich.console import Console
from rich.panel import Panel
from rich.text import Text
from torch import nn
from torch.utils.data import Dataset

from tensorshard.comm.call_watch import is_of_collective
from tensorshard.comm.decisions import decide_once
from tensorshard.comm.groups import world_group
from tensorshard.comm.refusals import is_refusal, sentence
from tensorshard.comm.world import DEFAULT_TIMEOUT, as_timedelta, default_device, join_world, ranks_here
from tensorshard.config import ConfigError, instantiate
from tensorshard.config.files import values_of
from tensorshard.engine.engine import Engine, NonFiniteLossError
from tensorshard.engine.guards.wrong_batch import OutOfRangeError
from tensorshard.engine.optimizer import build_optimizer, wants_names
from tensorshard.parallelize.build import parallelize
from tensorshard.plan.plan import Plan
from tensorshard.predict import Estimate
from tensorshard.trainer import loggers
from tensorshard.trainer.hooks import (
    CheckpointHook,
    EvaluationHook,
    ExpectationHook,
    Hook,
    LoggingHook,
    MemoryHook,
    MemoryProfileHook,
    OptimizerOptionsHook,
    OutOfMemoryHook,
    ProfileHook,
    ScheduleHook,
    StepWork,
    TimerHook,
)
from tensorshard.trainer.hooks.schedule import Evaluator, LossEvaluator, MetricEvaluator
from tensorshard.trainer.initial_model import initial_model
from tensorshard.trainer.launch.worker import end_process
from tensorshard.trainer.loaders import Collate, evaluation_loader, sample_inputs, training_loader
from tensorshard.trainer.memory import PeakMemory, held_now
from tensorshard.trainer.planned_run import PlanRequest, choose_for_run, set_plan
from tensorshard.trainer.report import predicted_peaks, print_opening, print_summary, resume_command
from tensorshard.trainer.run_directory import RunDirectory, Session, write_session
from tensorshard.trainer.settings import TrainSettings
from tensorshard.trainer.start import Start, begun_anywhere, find_start, note_end, note_start, write_config
from tensorshard.trainer.text import TextSettings, sample_text, tokenizer_of
from tensorshard.trainer.trainer import BatchSize, StopRequest, Trainer
from tensorshard.weights.files.manifest import DamagedCheckpointError

logger = logging.getLogger("tensorshard")


def run(
    config: DictConfig,
    *,
    resume: str | None = None,
    output: str | None = None,
    timeout: float | None = None,
    expected: Estimate | None = None,
    request: PlanRequest | None = None,
    verbose: bool = False,
    ended: Callable[[RunDirectory], None] | None = None,
) -> None:
    """Trains as `config` says. Every process of the run makes this call; rank 0 alone prints.

    Args:
        config: what :func:`tensorshard.config.load_config` returned.
        resume: a checkpoint to continue from; ``"latest"`` for the newest one of the run; None to begin anew.
        output: the run's directory; wins over ``train.output_dir``.
        timeout: seconds that a rank waits for the others in a collective; as for :func:`parallelize` if None.
        expected: the run's estimate, which is printed beside what is measured.
        request: the fields of the plan that rank 0 chooses, for all ranks; None if the config's plan is used as it is.
        verbose: whether every field of the plan and the mesh are printed before training.
        ended: called on rank 0 where an error ends the run.

    Raises:
        ConfigError: the config cannot be run, the directory holds a run already, or there is nothing to resume
            from.
        NonFiniteLossError: the loss became NaN or infinite. The message names the last good checkpoint.
    """
    joined_before = dist.is_initialized()
    patience = DEFAULT_TIMEOUT if timeout is None else as_timedelta(timeout)
    device = default_device()
    join_world(device, timeout=patience)
    held_before = held_now(device)
    if request is not None:
        expected = _choose_plan(config, request, device)
    settings = TrainSettings.from_config(config)
    sample = TextSettings.from_config(config.sample) if config.get("sample") else None
    if sample is not None and (tokenizer := tokenizer_of(config)) is None:
        raise ConfigError("sample: it needs a tokenizer: 'bytes', a tokenizer.json, or a directory that has one")
    sample = sample and replace(sample, tokenizer=tokenizer)
    settings.check_batch(settings.plan.resolve(dist.get_world_size()).dp_size)
    begun = begun_anywhere(world_group())
    start = decide_once(lambda: find_start(config, settings, resume, output, begun), world_group())
    if os.environ.get("LOCAL_RANK", "0") == "0":
        note_start(start)

    console = Console(quiet=dist.get_rank() != 0)
    log = loggers.RankLog(start.directory.path, dist.get_rank(), loggers.ConsoleHandler(console))
    try:
        with log, StopRequest() as stop:
            parts = _prepare(
                config, settings, start, console, stop, patience, expected, held_before, verbose, not joined_before
            )
            if dist.get_rank() == 0:
                write_config(config, start.directory, parts.trainer.step)
            first, last = parts.trainer.step + 1, settings.steps
            if first > last:
                logger.info("%s has all %d steps; raise train.steps to train further", start.checkpoint, last)
            else:
                verb = "continuing" if start.checkpoint else "training"
                logger.info("%s in %s, steps %d to %d", verb, start.directory.path, first, last)
                _record_session(parts.trainer, start.directory, expected, held_before)
                try:
                    parts.trainer.fit()
                except OutOfRangeError as error:
                    raise ConfigError(f"data: {error}") from error
                _report(parts, config, start.directory, console, expected, held_before)
                note_end()
                if sample is not None and not parts.trainer.interrupted:
                    console.print(
                        Panel(Text(sample_text(parts.trainer.engine, sample)), title="a sample", expand=False)
                    )
    except Exception as error:
        if ended is not None and dist.get_rank() == 0:
            ended(start.directory)
        if isinstance(error, NonFiniteLossError):
            error.add_note(f"(the traceback is in {log.path})")
        if isinstance(error, ConfigError) or not is_refusal(error):
            raise
        raise ConfigError(f"{sentence(error)}\n(the traceback is in {log.path})") from error
    if not joined_before:
        dist.destroy_process_group()


def _choose_plan(config: DictConfig, request: PlanRequest, device: torch.device) -> Estimate:
    """Rank 0 chooses the plan and prints it; every rank sets it in `config`. Returns its estimate. Collective."""
    gpus = device.type == "cuda"

    def choose() -> tuple[Plan, Estimate]:
        search = choose_for_run(config, request, dist.get_world_size(), ranks_here(), gpus=gpus)
        print(f"the best plan for {search.describe()}", flush=True)
        return search.best.plan, search.best.estimate

    plan, estimate = decide_once(choose, world_group())
    set_plan(config, plan)
    return estimate


@dataclass(frozen=True)
class _Run:
    """A trainer that is ready to run, and those of its hooks that the summary needs."""

    trainer: Trainer
    timer: TimerHook
    memory: PeakMemory
    evaluation: EvaluationHook


def _prepare(
    config: DictConfig,
    settings: TrainSettings,
    start: Start,
    console: Console,
    stop: StopRequest,
    timeout: timedelta,
    expected: Estimate | None,
    held_before: int,
    verbose: bool,
    owns_process: bool,
) -> _Run:
    _check_optimizer(config)
    with _asked_for("data.train"):
        dataset = instantiate(config.data.train)
    collate = Collate.of(config)
    engine = parallelize(
        initial_model(config.model),
        settings.plan,
        optimizer=instantiate(config.optimizer),
        loss_fn=instantiate(config.loss),
        seed=settings.seed,
        # Stages are balanced by the cost of real samples.
        sample_inputs=sample_inputs(dataset, collate) if settings.plan.pp > 1 else None,
        timeout=timeout,
        debug=settings.debug,
        watchdog=settings.watchdog,
    )
    engine.call_watch.stacks = start.directory.stacks
    if owns_process:
        engine.call_watch.end_process = end_process
    # Keeps the options from the config, before a checkpoint changes them.
    options = OptimizerOptionsHook(engine.optimizer)
    schedule = ScheduleHook(instantiate(config.scheduler)(engine.optimizer))
    state = None
    if start.checkpoint is not None:
        with _asked_for("--resume"):
            state = load_start(engine, start)
    print_opening(console, engine, _gather(engine.summary().held_parameters), verbose=verbose)

    loader = training_loader(
        dataset,
        engine,
        global_batch_size=settings.global_batch_size,
        seed=settings.seed,
        samples_consumed=state["samples_consumed"] if state else 0,
        num_workers=settings.num_workers,
        collate=collate,
    )
    timer = TimerHook(every=settings.log_every, work=_work(expected, dataset, collate))
    memory = PeakMemory(engine.device)
    evaluation = EvaluationHook(_evaluators(config, settings, engine), settings.eval_every)
    # The order matters: measure, write down, move the learning rate on, save.
    hooks = [
        timer,
        *_profile(settings, start.directory, console),
        *([MemoryProfileHook(start.directory.profile, expected)] if settings.profile_memory else []),
        MemoryHook(memory, every=settings.log_every),
        *([ExpectationHook(expected, memory, held_before)] if expected is not None and dist.get_rank() == 0 else []),
        OutOfMemoryHook(settings.global_batch_size),
        evaluation,
        LoggingHook(_loggers(config, settings, start.directory, console), settings.log_every),
        schedule,
        options,
        CheckpointHook(
            start.directory,
            settings.save_every,
            settings.keep_checkpoints,
            settings.save_best,
            keep_every=settings.keep_every,
            background=settings.save_in_background,
        ),
    ]
    trainer = Trainer(
        engine, loader, max_steps=settings.steps, hooks=hooks, stop=stop, replay_every=settings.replay_every
    )
    if state:
        trainer.load_state_dict(state)
    return _Run(trainer, timer, memory, evaluation)


def _work(expected: Estimate | None, dataset: Dataset[Any], collate: Collate) -> StepWork | None:
    """What a step computes, by the estimate of the run's first sample; None without one."""
    if expected is None or expected.global_batch is None:
        return None
    pair = BatchSize.of(sample_inputs(dataset, collate))
    batch = BatchSize(expected.global_batch, pair.tokens and expected.global_batch * pair.tokens // pair.samples)
    return StepWork(expected.model_flops, expected.peak_flops, batch)


def _record_session(trainer: Trainer, directory: RunDirectory, expected: Estimate | None, held_before: int) -> None:
    """Writes what a report of the run needs to know about this start. Collective."""
    engine = trainer.engine
    held_bytes = _gather(held_before)
    if engine.mesh.rank != 0:
        return
    session = Session(
        first_step=trainer.step + 1,
        steps=trainer.max_steps,
        world_size=len(held_bytes),
        device=engine.device.type,
        plan=engine.plan.to_dict(),
        held_before_bytes=held_bytes,
        estimated_bytes=None if expected is None else expected.peaks,
        predicted_bytes=None if expected is None else predicted_peaks(expected, held_bytes),
        estimated_step_seconds=None if expected is None else expected.step_seconds,
        estimated_step_span=None if expected is None or expected.step_span is None else list(expected.step_span),
        times_are=None if expected is None or expected.hardware is None else expected.hardware.basis,
    )
    write_session(directory.sessions, session)


@contextmanager
def _asked_for(section: str) -> Iterator[None]:
    """A context that turns errors about files into one that names the section of the config.

    Raises:
        ConfigError: a file is not there, cannot be read, or has other contents than expected.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        raise ConfigError(f"{section}: {error}") from error


def _check_optimizer(config: DictConfig) -> None:
    """Builds the optimizer of a small matrix and a number, before anything large is built.

    One that chooses parameters by their names needs the model's.
    """
    few = {"weight": nn.Parameter(torch.zeros(2, 2)), "bias": nn.Parameter(torch.zeros(1))}
    try:
        factory = instantiate(config.optimizer)
        if not isinstance(factory, Mapping) and not wants_names(factory):
            build_optimizer(factory, few)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer: {str(error).removeprefix('optimizer(parameters) failed: ')}") from error


def _report(
    parts: _Run,
    config: DictConfig,
    directory: RunDirectory,
    console: Console,
    expected: Estimate | None,
    held_before: int,
) -> None:
    """Prints the summary and, if training was stopped, how to go on. Collective."""
    trainer = parts.trainer
    loss = {} if trainer.last_record is None else {"loss": trainer.last_record.loss.item()}
    print_summary(
        console,
        steps=trainer.step,
        figures=loss | parts.evaluation.latest | parts.timer.overall(),
        peak_bytes=_gather(parts.memory.bytes()),
        above_start=_gather(parts.memory.bytes() - held_before),
        expected=expected,
        directory=directory,
    )
    if trainer.interrupted:
        logger.info("stopped early, after step %d of %d", trainer.step, trainer.max_steps)
        words = f"the checkpoint is after step {trainer.step}; continue with:\n{resume_command(config, directory)}"
        logger.info("%s", words, extra=loggers.AS_IT_IS)


def _evaluators(config: DictConfig, settings: TrainSettings, engine: Engine) -> list[Evaluator]:
    """Evaluators of the loss and of the config's metrics on the validation set; none without a validation set."""
    if config.data.get("validation") is None:
        return []
    with _asked_for("data.validation"):
        dataset = instantiate(config.data.validation)
    loader = evaluation_loader(
        dataset,
        engine.mesh,
        global_batch_size=settings.global_batch_size,
        shuffle=settings.eval_batches is not None,
        num_workers=settings.num_workers,
        collate=Collate.of(config),
    )
    evaluators: list[Evaluator] = [LossEvaluator(loader, settings.eval_batches)]
    if config.get("metrics"):
        evaluators.append(MetricEvaluator(loader, instantiate(config.metrics), settings.eval_batches))
    return evaluators


def _profile(settings: TrainSettings, directory: RunDirectory, console: Console) -> list[Hook]:
    """The hook that profiles, if the config asks for it."""
    return [] if settings.profile is None else [ProfileHook(settings.profile, directory.profile, console)]


def _loggers(
    config: DictConfig, settings: TrainSettings, directory: RunDirectory, console: Console
) -> list[loggers.Logger]:
    """On rank 0 loggers for the terminal, ``metrics.jsonl`` and what the config asks for; none on other ranks."""
    if dist.get_rank() != 0:
        return []
    values = values_of(config)
    return [
        loggers.console_logger(console),
        loggers.JsonLinesLogger(directory.metrics),
        *(loggers.service_logger(name, directory.path, values) for name in settings.loggers),
    ]


def _gather(value: Any) -> list[Any]:
    """The `value` of each rank, on every rank. Collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def load_start(engine: Engine, start: Start) -> dict[str, Any]:
    """Loads what a run continues from; returns the ``extra`` that it was saved with. Collective.

    Unless the user named the checkpoint, a damaged one is renamed, a warning names its file, and the next older one is
    taken. That a checkpoint is damaged may be found as it is read, by one rank alone; the engine is then as it was.

    Raises:
        DamagedCheckpointError: it is the one that the user named, or there is no older one.
    """
    checkpoint, directory, group = start.checkpoint, start.directory, engine.mesh.world_group
    assert checkpoint is not None
    if not start.named:
        _warn(decide_once(directory.set_aside_damaged, group))
    while True:
        error: Exception | None = None
        try:
            return _on_all_ranks(engine, checkpoint)
        except DamagedCheckpointError as damage:
            error = damage
        if start.named or directory.step_of(checkpoint) is None:
            raise error

        def pass_over(damaged: Path | str = checkpoint, why: str = str(error)) -> tuple[Path | str, str] | None:
            others = [step for step in directory.checkpoint_steps() if directory.checkpoint(step) != damaged]
            if not others:
                return None
            warning = directory.set_aside(damaged, why)
            newest = directory.newest_checkpoint()
            return None if newest is None else (newest, warning)

        older = decide_once(pass_over, group)
        if older is None:
            raise error
        checkpoint, warning = older
        _warn([warning])


def _on_all_ranks(engine: Engine, checkpoint: Path | str) -> dict[str, Any]:
    """``engine.load(checkpoint)``, which raises a DamagedCheckpointError on all ranks if it does so on one."""
    error: Exception | None = None
    extra: dict[str, Any] = {}
    try:
        extra = engine.load(checkpoint)
    except (ValueError, RuntimeError, OSError) as failure:
        if is_of_collective(failure):
            raise
        error = failure
    damage = str(error) if isinstance(error, DamagedCheckpointError) else None
    everyone: list[Any] = [damage]
    if engine.mesh.world_size > 1:
        everyone = [None] * engine.mesh.world_size
        dist.all_gather_object(everyone, damage, group=engine.mesh.world_group)
    damages = [message for message in everyone if message is not None]
    if damages:
        raise DamagedCheckpointError(damages[0]) from error
    if error is not None:
        raise error
    return extra


def _warn(sentences: list[str]) -> None:
    for text in sentences:
        logger.warning("%s", text)
