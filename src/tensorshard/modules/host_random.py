"""The states of Python's and numpy's global random numbers."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

HostStates = tuple[Any, Any]


def host_random_states() -> HostStates:
    """The states of Python's and of numpy's global generator. They are equal if nothing was drawn in between."""
    state: Any = np.random.get_state()
    name, keys, *rest = state
    return random.getstate(), (name, keys.tobytes(), *rest)


def set_host_random_states(states: HostStates) -> None:
    """Puts back what :func:`host_random_states` returned."""
    random.setstate(states[0])
    name, keys, *rest = states[1]
    np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), *rest))


@contextmanager
def host_random_kept() -> Iterator[None]:
    """Leaves both generators as they were."""
    states = host_random_states()
    try:
        yield
    finally:
        set_host_random_states(states)
