"""What a run trains, from its config: for what looks at a run without starting it."""

from typing import Any

from omegaconf import DictConfig

from tensorshard.config import ConfigError, instantiate
from tensorshard.trainer.initial_model import initial_model
from tensorshard.trainer.loaders import Collate
from tensorshard.trainer.settings import TrainSettings


class RunParts:
    """The parts of one config's run.

    Args:
        config: what :func:`tensorshard.config.load_config` returned.

    Attributes:
        settings: the ``train`` section.
        collate: makes batches of samples.

    Raises:
        ConfigError: a section is missing, or a setting makes no sense.
    """

    def __init__(self, config: DictConfig) -> None:
        self._config = config
        self.settings = TrainSettings.from_config(config)
        if config.data.get("train") is None:
            raise ConfigError("the config has no data.train, whose samples say what the model is given")
        self._data = instantiate(config.data.train)
        self.collate = Collate.of(config)

    def arguments(self) -> dict[str, Any]:
        """The model, optimizer and loss, as arguments of :func:`tensorshard.parallelize`."""
        return {
            "model": initial_model(self._config.model),
            "optimizer": instantiate(self._config.optimizer),
            "loss_fn": instantiate(self._config.loss),
        }

    def sample(self) -> Any:
        """The first sample of the training data."""
        return self._data[0]

    def batch(self, samples: int) -> Any:
        """Inputs and targets of the first samples of the training data; of all, if these are fewer."""
        found = []
        for index in range(samples):
            try:
                found.append(self._data[index])
            except IndexError:
                break
        if not found:
            raise ConfigError("data.train has no samples")
        return self.collate(found)
