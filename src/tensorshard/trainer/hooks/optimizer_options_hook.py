"""What an optimizer was configured with, across a resume."""

import json
from typing import Any

from torch.optim import Optimizer

from tensorshard.trainer.hooks.hook import Hook


class OptimizerOptionsHook(Hook):
    """Lets a resumed run change options of its optimizer, such as the weight decay.

    A checkpoint brings back the options that it was saved with. Those that the run is now configured with
    otherwise than then are set to what they are now. The learning rate is the schedule's to restore.

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
                # Compared as JSON, through which what was saved has gone.
                if json.dumps(value) != json.dumps(then.get(key)):
                    group[key] = value


def _is_plain(value: Any) -> bool:
    """Whether `value` is an option's, and goes into a checkpoint: no parameter or tensor."""
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)
