"""The seed behind the models and data of tests: another one by ``TENSORSHARD_TEST_SEED``."""

import os

import torch

_BASE = 1_000_003 * int(os.environ.get("TENSORSHARD_TEST_SEED", "0"))


def seed(number: int) -> None:
    """torch's global generator starts from `number`, moved by the base seed."""
    torch.manual_seed(_BASE + number)


def generator(number: int) -> torch.Generator:
    """A generator that starts from `number`, moved by the base seed."""
    return torch.Generator().manual_seed(_BASE + number)
