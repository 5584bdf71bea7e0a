"""Makes the calls that a config records."""

import functools
from typing import Any

from omegaconf import DictConfig, ListConfig


def instantiate(config: DictConfig | ListConfig, **arguments: Any) -> Any:
    """What the recorded call `config` returns; calls inside it are made first, containers become plain.

    Args:
        config: what ``LazyCall(...)(...)`` returned, or a list or mapping of such.
        arguments: further arguments of the outermost call (a model, parameters); they win over recorded ones
            and reach the target as they are, without being copied.

    Raises:
        Exception: what the target itself raised, with a note that names the target and its key.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate as hydra_instantiate

    try:
        # A partial takes further arguments itself: OmegaConf, which copies what it holds, never sees them.
        built = hydra_instantiate(config, _convert_="all", **({"_partial_": True} if arguments else {}))
    except InstantiationException as error:
        if error.__cause__ is None:
            raise
        first, *_, last = str(error).splitlines()
        error.__cause__.add_note(f"{first} {last}")
        raise error.__cause__ from None
    if isinstance(built, functools.partial):
        # A plain one: hydra's own examines its target anew at each call.
        built = functools.partial(built.func, *built.args, **{**built.keywords, **arguments})
    waits = isinstance(config, DictConfig) and config.get("_partial_")
    return built() if arguments and not waits else built
