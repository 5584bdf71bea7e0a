"""The model of a config: built anew, or with weights from files."""

import functools
from collections.abc import Callable

from omegaconf import DictConfig
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
    if _KEY not in config or _is_argument(config):
        return functools.partial(_build, config)
    path = config[_KEY]
    rest = config.copy()
    del rest[_KEY]
    if path is None:
        return functools.partial(_build, rest)
    if "_target_" not in rest and any(key not in CALL_KEYS for key in rest):
        given = ", ".join(str(key) for key in rest)
        raise ConfigError(f"model has {given} beside model.pretrained={path}, and no _target_ that would take them")
    try:
        return from_pretrained(path, functools.partial(_build, rest) if "_target_" in rest else None)
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
