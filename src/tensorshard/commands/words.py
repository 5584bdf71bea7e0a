"""The words of a command line that are not options: a config, and overrides of its values."""

from collections.abc import Sequence

from tensorshard.config import ConfigError


def config_and_overrides(words: Sequence[str]) -> tuple[str, list[str]]:
    """The config, by default the quickstart, and its overrides.

    Raises:
        ConfigError: the words name several configs.
    """
    overrides = [word for word in words if "=" in word]
    configs = [word for word in words if "=" not in word]
    if len(configs) > 1:
        raise ConfigError(f"one config at a time, not {' and '.join(configs)}; overrides are written KEY=VALUE")
    return (configs[0] if configs else "quickstart"), overrides
