"""The calls that a YAML config may make: a file from a stranger must not be able to run any function it names.

A Python config is code itself, and is trusted.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, MissingMandatoryValue, OmegaConfBaseException

from tensorshard.common.dotted_names import is_inside
from tensorshard.config.config_error import ConfigError, MissingValueError
from tensorshard.config.lazy import calls, file_of_target, find_target
from tensorshard.config.overrides import Override

ALLOWED = ("tensorshard", "torch.nn", "torch.optim", "torchmetrics", "transformers")
"""Modules whose functions and classes a YAML config may call."""

# These modules start processes or read further configs.
_REFUSED = ("tensorshard.cli", "tensorshard.commands", "tensorshard.config", "tensorshard.trainer.launch")
_CODE_FLAG = "trust_remote_code"


def check_targets(config: DictConfig, source: str, allow: Iterable[str] = (), typed: Iterable[str] = ()) -> None:
    """Checks that all calls in `config` are to modules that a YAML file may name. It imports no other module.

    References are resolved first. Those to values that are still to be given resolve to a name that is never allowed.

    Args:
        source: where the config was read from.
        allow: further modules, with all that is in them.
        typed: the overrides that `config` has already. Their user is trusted with the targets that they name.

    Raises:
        ConfigError: there is a call to something else.
    """
    allowed = (*ALLOWED, *allow)
    typed = list(typed)
    trusted = _targets_of(typed)
    for where, call in calls(resolved(_with_missing_given(config), source)):
        name = call["_target_"]
        if name in trusted:
            continue
        key = where or "the config"
        if (file := file_of_target(name)) is not None:
            if not any(Path(file).resolve() == Path(module).resolve() for module in allow):
                raise ConfigError(_refusal(source, key, name, file))
        elif (
            not isinstance(name, str)
            or not is_inside(name, allowed)
            or (is_inside(name, _REFUSED) and name not in allow)
        ):
            raise ConfigError(_refusal(source, key, name, str(name).rpartition(".")[0]))
        # A module's attributes include what it imports: torch.nn.functional.torch.hub does not belong to torch.nn.
        home = str(getattr(find_target(name, key), "__module__", None))
        if file is None and (not is_inside(home, allowed) or (is_inside(home, _REFUSED) and home not in allow)):
            raise ConfigError(_refusal(source, key, f"{name}, which is {home}'s", home))
        if call.get(_CODE_FLAG) and not any(_CODE_FLAG in text for text in typed):
            raise ConfigError(
                f"{source}: {key}.{_CODE_FLAG} would run code that comes with a model; a YAML file may not ask for "
                f"that. Write the config in Python, which is code and trusted as such"
            )


def _targets_of(typed: Iterable[str]) -> set[str]:
    """The targets that overrides name."""
    found = set()
    for override in map(Override.parse, typed):
        values = {override.key.rpartition(".")[2]: override.value}
        found |= {str(call["_target_"]) for _, call in calls(values)}
    return found


def _with_missing_given(config: DictConfig) -> DictConfig:
    """A copy of `config` in which ``"???"`` is a value that can be referred to."""

    def given(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: given(item) for key, item in value.items()}
        if isinstance(value, list):
            return [given(item) for item in value]
        return "still to be given" if value == "???" else value

    copied = OmegaConf.create(given(OmegaConf.to_container(config, resolve=False)))
    assert isinstance(copied, DictConfig)
    return copied


def modules_to_allow(config: DictConfig) -> list[str]:
    """The top-level modules, and config files, that must be allowed before a YAML file of `config` can be read."""
    container = OmegaConf.to_container(config, resolve=True)
    names = [str(call["_target_"]) for _, call in calls(container)]
    files = {file for name in names if (file := file_of_target(name)) is not None}
    others = [name for name in names if file_of_target(name) is None and not is_inside(name, ALLOWED)]
    return sorted(files | {name.partition(".")[0] for name in others})


def resolved(config: DictConfig, source: str, *, throw_on_missing: bool = False) -> Any:
    """`config` as plain dictionaries and lists, references resolved.

    Raises:
        ConfigError: a reference leads nowhere; or, with `throw_on_missing`, a required value is missing.
    """
    try:
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=throw_on_missing)
    except MissingMandatoryValue as error:
        group = error.parent_node
        target = group.get("_target_") if isinstance(group, DictConfig) else None
        raise MissingValueError(source, str(error.full_key), target) from error
    except InterpolationToMissingValueError as error:
        # The key itself is named by the message alone.
        key = str(error).splitlines()[0].rpartition(" ")[2]
        raise MissingValueError(source, key, None) from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{source}: {error.full_key} has no value: {str(error).splitlines()[0]}") from error


def _refusal(source: str, key: str, name: Any, module: str) -> str:
    return (
        f"{source}: {key} calls {name}; so that opening a stranger's file runs none of its code, YAML may call what is "
        f"in {', '.join(ALLOWED)}. If you trust it: --allow {module or name}"
    )
