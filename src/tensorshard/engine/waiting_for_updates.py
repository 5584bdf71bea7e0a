"""An Engine's model and optimizer. If an update goes on after its step, access to them waits for it."""

import torch
from torch import nn

from tensorshard.plan.storage import Update
from tensorshard.sharded.sharded_model import ShardedModel


class WaitingForUpdates:
    """The parts of an Engine that show only finished updates."""

    sharded: ShardedModel
    _model: nn.Module
    _optimizer: torch.optim.Optimizer
    _update: Update

    @property
    def model(self) -> nn.Module:
        """The laid-out model. Access waits until the last step's update is finished."""
        self.wait_for_update()
        return self._model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer. Access waits until the last step's update is finished."""
        self.wait_for_update()
        return self._optimizer

    def wait_for_update(self) -> None:
        """Returns when this rank's part of the last step's update is finished: at once without ``offload.overlap``.

        A parameter that you took out of the Engine before that step shows the update from then on.

        Raises:
            OSError: the disk failed during the update. The error names the folder. Other ranks raise it in their next
                call.
        """
        self._update.wait()

    def _finish_update(self) -> None:
        """Waits for the last update on all ranks; if it failed on one, all raise. Takes over what user code wrote.

        A collective, if an update goes on.
        """
        self._update.finish()
        self.sharded.adopt_writes()

    def _follow_update(self) -> None:
        if self._update.is_pending:
            self.sharded.gather_as_updated(self._update.copied)
        else:
            self.sharded.all_gather_parameters(self._update.copied)
