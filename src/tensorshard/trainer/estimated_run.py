"""The memory of a run, from its config, before it is started."""

from dataclasses import replace
from typing import Any

from omegaconf import DictConfig
from torch.utils.data import default_collate

from tensorshard.config import ConfigError, instantiate
from tensorshard.parallelize.decisions import Decisions
from tensorshard.plan.plan import Plan
from tensorshard.predict import Estimate, estimate
from tensorshard.predict.changes import Change, find_changes
from tensorshard.predict.hardware import THIS_MACHINE, measured_profile
from tensorshard.tensor_parallel.table.table import VerifiedTable
from tensorshard.trainer.initial_model import initial_model
from tensorshard.trainer.settings import TrainSettings


class EstimatedRun:
    """Estimates of one config's run, under its plan and under others. The global batch is the same in all.

    Args:
        config: what :func:`tensorshard.config.load_config` returned.
        world_size: the number of ranks.
        hardware, device: as for :func:`tensorshard.predict.estimate`.

    Raises:
        ConfigError: the config cannot be run on so many ranks.
    """

    def __init__(
        self, config: DictConfig, world_size: int, hardware: str | None = None, *, device: str | None = None
    ) -> None:
        self._config = config
        self._world_size = world_size
        self._hardware = hardware
        self._device = device
        self._settings = TrainSettings.from_config(config)
        self._settings.check_batch(self._settings.plan.resolve(world_size).dp_size)
        if config.data.get("train") is None:
            raise ConfigError("the config has no data.train, whose samples say what the model is given")
        self._sample = instantiate(config.data.train)[0]
        # Results of one estimate that later ones use: tensor-parallel tables by degree, and the run of the constructor.
        self._tables: dict[tuple[int, bool], VerifiedTable | None] = {}
        self._shared = Decisions()

    def estimate(self, plan: Plan | None = None) -> Estimate:
        """The memory that the run takes; see :func:`tensorshard.predict.estimate`.

        Args:
            plan: in place of the one that the config has.

        Raises:
            ConfigError, ValueError: the plan does not suit the batch, the number of ranks or the model.
        """
        settings = self._settings if plan is None else replace(self._settings, plan=plan)
        resolved = settings.plan.resolve(self._world_size)
        settings.check_batch(resolved.dp_size)
        inputs, targets = self._batch(settings.global_batch_size // resolved.dp_size)
        split = (resolved.tp, resolved.sequence_parallel)
        decisions = Decisions(table=self._tables.get(split), recorded=self._shared.recorded)
        found = estimate(
            initial_model(self._config.model),
            resolved,
            world_size=self._world_size,
            inputs=inputs,
            targets=targets,
            optimizer=instantiate(self._config.optimizer),
            loss_fn=instantiate(self._config.loss),
            hardware=self._hardware,
            device=self._device,
            decisions=decisions,
        )
        self._tables[split], self._shared.recorded = decisions.table, decisions.recorded
        return found

    def changes_that_fit(self, found: Estimate, memory: int) -> list[Change]:
        """The cheapest changes of the plan of `found` with which the run fits into `memory` bytes of each device."""
        batch = self._settings.global_batch_size // found.plan.dp_size

        def needed(plan: Plan) -> int:
            return (found if plan == found.plan else self.estimate(plan)).largest.peak_device

        return find_changes(found.plan, memory, needed, batch=batch)

    def _batch(self, samples: int) -> Any:
        """A batch of the first sample, again and again: only its shapes matter."""
        return default_collate([self._sample] * samples)


def estimate_run(config: DictConfig, world_size: int, *, device: str) -> Estimate:
    """The estimate of the run of `config` on `world_size` ranks. Arguments and errors as for :class:`EstimatedRun`.

    It has times if ``tensorshard check`` has measured this machine.
    """
    path = measured_profile()
    hardware = THIS_MACHINE if path is not None and path.is_file() else None
    return EstimatedRun(config, world_size, hardware, device=device).estimate()
