"""The memory of a run, from its config, before it is started."""

from dataclasses import replace
from typing import Any

from omegaconf import DictConfig
from torch.utils.data import Dataset, default_collate

from tensorshard.config import ConfigError, instantiate
from tensorshard.estimate import Estimate, estimate
from tensorshard.estimate.changes import Change, find_changes
from tensorshard.plan import Plan
from tensorshard.trainer.initial_model import initial_model
from tensorshard.trainer.settings import TrainSettings


def estimate_run(
    config: DictConfig, world_size: int, hardware: str | None = None, plan: Plan | None = None, device: str = "cuda"
) -> Estimate:
    """The memory that the run of `config` takes on `world_size` ranks; see :func:`tensorshard.estimate.estimate`.

    Args:
        plan: in place of the one that the config has.
        device: as for :func:`tensorshard.estimate.estimate`.

    Raises:
        ConfigError: the config cannot be run on so many ranks.
        ValueError: as for :func:`tensorshard.estimate.estimate`.
    """
    settings = TrainSettings.from_config(config)
    if plan is not None:
        settings = replace(settings, plan=plan)
    plan = settings.plan.resolve(world_size)
    settings.check_batch(plan.dp_size)
    if config.data.get("train") is None:
        raise ConfigError("the config has no data.train, whose samples say what the model is given")
    inputs, targets = _batch(instantiate(config.data.train), settings.global_batch_size // plan.dp_size)
    return estimate(
        initial_model(config.model),
        plan,
        world_size=world_size,
        inputs=inputs,
        targets=targets,
        optimizer=instantiate(config.optimizer),
        loss_fn=instantiate(config.loss),
        hardware=hardware,
        device=device,
    )


def changes_that_fit(config: DictConfig, found: Estimate, memory: int) -> list[Change]:
    """The cheapest changes of the plan with which the run of `config` fits into `memory` bytes of each device.

    The global batch stays as it is.
    """
    hardware = None if found.hardware is None else found.hardware.name

    def needed(plan: Plan) -> int:
        return estimate_run(config, found.world_size, hardware, plan).largest.peak_device

    batch = TrainSettings.from_config(config).global_batch_size // found.plan.dp_size
    return find_changes(found.plan, memory, needed, batch=batch)


def _batch(dataset: Dataset[Any], samples: int) -> Any:
    """A batch of the first sample, again and again: only its shapes matter."""
    return default_collate([dataset[0]] * samples)
