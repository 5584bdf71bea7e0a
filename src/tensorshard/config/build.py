"""Makes the calls that a config records."""

import functools
from typing import Any

from omegaconf import DictConfig, ListConfig


def instantiate(config: DictConfig | ListConfig, **arguments: Any) -> Any:
    """Makes the recorded call `config` and returns its result. Calls inside it are made first, and configs become plain
    lists and dicts.

    Args:
        config: a recorded call from ``LazyCall(...)(...)``, or a list or mapping of such.
        arguments: further arguments of the outermost call (a model, parameters). They win over recorded ones, and reach
            the target without being copied.

    Raises:
        Exception: any exception of the target, with a note that names the target and its key.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate as hydra_instantiate

    try:
        # OmegaConf would copy further arguments. So they are given to a partial, later.
        built = hydra_instantiate(config, _convert_="all", **({"_partial_": True} if arguments else {}))
    except InstantiationException as error:
        if error.__cause__ is None:
            raise
        first, *_, last = str(error).splitlines()
        error.__cause__.add_note(f"{first} {last}")
        raise error.__cause__ from None
    if isinstance(built, functools.partial):
        # A plain partial: hydra's own partial examines its target at each call.
        built = functools.partial(built.func, *built.args, **{**built.keywords, **arguments})
    waits = isinstance(config, DictConfig) and config.get("_partial_")
    return built() if arguments and not waits else built
