"""Makes the calls that a config records."""

import functools
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from tensorshard.config.lazy import CALL_KEYS, find_target


def instantiate(config: DictConfig | ListConfig, **arguments: Any) -> Any:
    """Makes the recorded call `config` and returns its result. Calls inside it are made first, and configs become plain
    lists and dicts.

    Args:
        config: a recorded call from ``LazyCall(...)(...)``, or a list or mapping of such.
        arguments: further arguments of the outermost call (a model, parameters). They win over recorded ones, and reach
            the target without being copied.

    Raises:
        ConfigError: a target cannot be imported.
        Exception: any exception of a target, with a note that names the target and its key.
    """
    return _build(OmegaConf.to_container(config, resolve=True, throw_on_missing=True), "", arguments)


def _build(value: Any, key: str, further: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [_build(item, f"{key}[{index}]", {}) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    named = {
        name: _build(item, f"{key}.{name}".lstrip("."), {})
        for name, item in value.items()
        if "_target_" not in value or name not in CALL_KEYS
    }
    if "_target_" not in value:
        return named
    positional = _build(value.get("_args_", []), f"{key}._args_".lstrip("."), {})
    target = find_target(value["_target_"], key or "the config")
    call = functools.partial(target, *positional, **{**named, **further})
    if value.get("_partial_"):
        return call
    try:
        return call()
    except Exception as error:
        error.add_note(f"in the call of {value['_target_']}" + (f" at {key} of the config" if key else ""))
        raise
