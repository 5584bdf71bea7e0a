"""The option for the number of ranks, of commands that try a config without its hardware."""

import argparse

from tensorshard.config import ConfigError


def add_config_and_world_size(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the config with its overrides, and for the number of ranks."""
    parser.add_argument("words", nargs="*", metavar="CONFIG KEY=VALUE", help="as for 'tensorshard train'")
    parser.add_argument("--world-size", type=int, metavar="N", help="the number of ranks")


def check_world_size(world_size: int | None) -> int:
    """The number of ranks that was given.

    Raises:
        ConfigError: none was given, or a number below 1.
    """
    if world_size is None or world_size < 1:
        given = "was not given" if world_size is None else f"is {world_size}"
        raise ConfigError(f"--world-size {given}; it must be the number of ranks, 1 or more, as in --world-size 8")
    return world_size
