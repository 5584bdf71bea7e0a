"""The options of an optimizer in a resumed run."""

import json
from typing import Any

from torch.optim import Optimizer

from tensorshard.trainer.hooks.hook import Hook


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
