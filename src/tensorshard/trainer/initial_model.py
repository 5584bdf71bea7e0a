"""The model of a config: built anew, or with weights from files."""

import functools
from collections.abc import Callable

from omegaconf import DictConfig, OmegaConf
from torch import nn

from tensorshard.config import ConfigError, instantiate
from tensorshard.config.lazy import CALL_KEYS, WEIGHTS_KEY, find_target, parameters
from tensorshard.weights.files.pretrained_model import PretrainedModel, from_pretrained

_KEY = WEIGHTS_KEY.rpartition(".")[2]


def initial_model(config: DictConfig) -> Callable[[], nn.Module] | PretrainedModel:
    """What :func:`tensorshard.parallelize` takes for the ``model`` section of a config.

    ``model.pretrained`` names files whose weights the model starts from, as for :func:`tensorshard.from_pretrained`;
    without a ``_target_`` the model itself is the one of its ``config.json``.

    Raises:
        ConfigError: there are no such files, or no model for them.
    """
    path = _files(config)
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
    """Refuses a ``model`` section whose files of weights are not there. It does not import transformers.

    Raises:
        ConfigError: there are no such files.
    """
    path = _files(config)
    if path is not None:
        _pretrained(path, nn.Module)


def _files(config: DictConfig) -> str | None:
    """The files that the model's weights are in; None for those of its constructor."""
    return config[_KEY] if _KEY in config and not _is_argument(config) else None


def _pretrained(path: str, build: Callable[[], nn.Module] | None) -> PretrainedModel:
    try:
        return from_pretrained(path, build)
    except (OSError, ImportError, ValueError) as error:
        raise ConfigError(f"{WEIGHTS_KEY}={path}: {error}") from error


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
