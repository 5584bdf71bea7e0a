"""The states of Python's and numpy's global random numbers."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

HostStates = tuple[Any, Any]


def host_random_states() -> HostStates:
    """The states of Python's and of numpy's global generator. They are equal if nothing was drawn in between."""
    return random.getstate(), numpy_random_state()


def set_host_random_states(states: HostStates) -> None:
    """Puts back what :func:`host_random_states` returned."""
    random.setstate(states[0])
    set_numpy_random_state(states[1])


def numpy_random_state() -> Any:
    """The state of numpy's global generator, of plain values that can be compared."""
    state: Any = np.random.get_state()
    name, keys, *rest = state
    return name, keys.tobytes(), *rest


def set_numpy_random_state(state: Any) -> None:
    """Puts back what :func:`numpy_random_state` returned."""
    name, keys, *rest = state
    np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), *rest))


@contextmanager
def host_random_kept() -> Iterator[None]:
    """Leaves both generators as they were."""
    states = host_random_states()
    try:
        yield
    finally:
        set_host_random_states(states)
