"""The model of a config, built anew or with weights from files, and the other parts of its run."""

import copy
import functools
import importlib.util
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from torch import nn

from tensorshard.common.words import install_extra
from tensorshard.config import ConfigError, instantiate
from tensorshard.config.lazy import CALL_KEYS, WEIGHTS_KEY, find_target, parameters
from tensorshard.data.text import BYTES
from tensorshard.engine.loader import is_stream
from tensorshard.models.adapters import with_lora
from tensorshard.trainer.loaders import Collate
from tensorshard.trainer.settings import TrainSettings
from tensorshard.weights.files.pretrained_model import PretrainedModel, ReadWhole, from_pretrained
from tensorshard.weights.files.transformers_weights import model_of

_KEY = WEIGHTS_KEY.rpartition(".")[2]
_CONFIG = "config"
_ADAPTERS = {"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout", "layers": "target_modules"}


def initial_model(config: DictConfig) -> Callable[[], nn.Module] | PretrainedModel | ReadWhole:
    """What :func:`tensorshard.parallelize` takes for the ``model`` section of a config.

    ``model.pretrained`` names files whose weights the model starts from, as for :func:`tensorshard.from_pretrained`;
    without a ``_target_`` the model itself is the one of its ``config.json``, or of that in ``model.config``, with the
    adapters that ``model.adapters`` describes, if they have a rank.

    Raises:
        ConfigError: there are no such files, or no model for them.
    """
    path = _files(config)
    if _has_adapters(config):
        build: Callable[..., nn.Module] = functools.partial(_adapted, config.adapters, config=_described(config))
        return build if path is None else ReadWhole(functools.partial(build, pretrained=path), build)
    if _CONFIG in config and "_target_" not in config:
        try:
            build = model_of(Path(_described(config)))
        except (OSError, ImportError, ValueError) as error:
            raise ConfigError(f"model.config={config[_CONFIG]}: {error}") from error
        return build if path is None else _pretrained(path, build)
    if path is None and (_KEY not in config or _is_argument(config)):
        return functools.partial(_build, config)
    rest = config.copy()
    OmegaConf.set_struct(rest, False)
    del rest[_KEY]
    if path is None:
        return functools.partial(_build, rest)
    if "_target_" not in rest and any(key not in CALL_KEYS for key in rest):
        given = ", ".join(str(key) for key in rest)
        raise ConfigError(f"model has {given} beside model.pretrained={path}, and no _target_ that would take them")
    return _pretrained(path, functools.partial(_build, rest) if "_target_" in rest else None)


def check_files(config: DictConfig) -> None:
    """Refuses a ``model`` section whose files are not there, or not named. It does not import transformers.

    Raises:
        ConfigError: there are no such files.
    """
    path = _files(config)
    if _has_adapters(config):
        _check_adapters(config.adapters)
    if path is not None:
        _pretrained(path, nn.Module)
    elif _CONFIG in config and "_target_" not in config and not Path(_described(config), "config.json").is_file():
        raise ConfigError(f"model.config={config[_CONFIG]}: there is no {config[_CONFIG]}/config.json")


def _has_adapters(config: DictConfig) -> bool:
    return config.get("adapters") is not None and config.adapters.rank is not None


def _check_adapters(adapters: DictConfig) -> None:
    rank = adapters.rank
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ConfigError(f"adapters.rank={rank} was given; it must be a number such as 8, or null for no adapters")
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            f"adapters.rank was given, and adapters are those of peft, which is not installed: "
            f"{install_extra('adapters')}"
        )


def _adapted(adapters: DictConfig, **base: Any) -> nn.Module:
    given = {_ADAPTERS.get(str(key), str(key)): value for key, value in adapters.items()}
    given = {key: list(value) if isinstance(value, ListConfig) else value for key, value in given.items()}
    given["target_modules"] = given["target_modules"] or "all-linear"
    try:
        return with_lora(**base, **given)
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(f"adapters: {error}") from error


def _described(config: DictConfig) -> str:
    """The folder whose ``config.json`` describes the model."""
    if config[_CONFIG] is None:
        raise ConfigError(
            f"{WEIGHTS_KEY} has no value; give it one: {WEIGHTS_KEY}=DIR, a directory as Hugging Face writes it; or "
            f"model.config=DIR, of which config.json alone is read, for new weights"
        )
    return str(config[_CONFIG])


def for_shapes(config: DictConfig) -> DictConfig:
    """`config`, for what looks at shapes alone: bytes stand for a tokenizer that is not there."""
    tokenizer = OmegaConf.select(config, "text.tokenizer")
    if tokenizer is not None and Path(tokenizer).is_dir() and not Path(tokenizer, "tokenizer.json").is_file():
        config = config.copy()
        config.text.tokenizer = BYTES
    return config


def _files(config: DictConfig) -> str | None:
    """The files that the model's weights are in; None for those of its constructor."""
    return config[_KEY] if _KEY in config and not _is_argument(config) else None


def _pretrained(path: str, build: Callable[[], nn.Module] | None) -> PretrainedModel:
    try:
        return from_pretrained(path, build)
    except (OSError, ImportError, ValueError) as error:
        new = f"; model.config={path} begins with new weights" if Path(path, "config.json").is_file() else ""
        raise ConfigError(f"{WEIGHTS_KEY}={path}: {error}{new}") from error


def _build(config: DictConfig) -> nn.Module:
    """The model of `config`.

    Raises:
        ConfigError: the constructor raises an error about its arguments.
    """
    try:
        return instantiate(config)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"model: {error}") from error


def _is_argument(config: DictConfig) -> bool:
    """Whether the model's own constructor has an argument of this name."""
    known = parameters(find_target(config["_target_"], "model")) if "_target_" in config else None
    return known is not None and _KEY in known


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
        check_files(config.model)
        self._config = config
        self.settings = TrainSettings.from_config(config)
        if config.data.get("train") is None:
            raise ConfigError("the config has no data.train, whose samples say what the model is given")
        config = for_shapes(config)
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
        return next(iter(copy.deepcopy(self._data))) if is_stream(self._data) else self._data[0]

    def batch(self, samples: int) -> Any:
        """Inputs and targets of the first samples of the training data; of all, if these are fewer."""
        if is_stream(self._data):
            return self.collate(list(islice(iter(copy.deepcopy(self._data)), samples)))
        first_samples = []
        for index in range(samples):
            try:
                first_samples.append(self._data[index])
            except IndexError:
                break
        if not first_samples:
            raise ConfigError("data.train has no samples")
        return self.collate(first_samples)
