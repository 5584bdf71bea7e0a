"""An Engine whose updates may go on behind its steps: what looks at the model or the optimizer waits here."""

import torch
from torch import nn

from tensorshard.offload.offloaded_optimizer import OffloadedOptimizer
from tensorshard.sharded_model import ShardedModel


class WaitingForUpdates:
    """What of an Engine shows finished updates alone."""

    sharded: ShardedModel
    _model: nn.Module
    _optimizer: torch.optim.Optimizer
    _offloaded: OffloadedOptimizer | None

    @property
    def model(self) -> nn.Module:
        """The laid-out model. Asking for it waits for an update that goes on behind a step."""
        self.wait_for_update()
        return self._model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer. Asking for it waits for an update that goes on behind a step."""
        self.wait_for_update()
        return self._optimizer

    def wait_for_update(self) -> None:
        """Returns when this rank's part of the last step's update is over: at once without ``offload.overlap``.

        What was taken out of the Engine before that step, such as a parameter, shows the update from then on.

        Raises:
            OSError: the update failed, as the disk did; names the folder. Other ranks raise it in their next call.
        """
        if self._offloaded is not None:
            self._offloaded.wait()

    def _finish_update(self) -> None:
        """Waits for the last update on all ranks, or raises on all what failed on any. A collective, if one goes on."""
        if self._offloaded is not None:
            self._offloaded.finish()

    def _follow_update(self) -> None:
        copied = () if self._offloaded is None else self._offloaded.written
        if self._offloaded is not None and self._offloaded.is_behind:
            self.sharded.follow_behind(copied)
        else:
            self.sharded.all_gather_parameters(copied)
