"""Which context-parallel group a thread works for, and what of torch is replaced meanwhile.

A replacement is in place while any thread works for a group; it asks :func:`active` which one its own thread works for,
and does what torch does where that is none.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

_local = threading.local()
_lock = threading.Lock()
_users = 0


@dataclass
class Activation:
    """A group for which code runs.

    Attributes:
        group: a ContextGroup.
        layouts: of the sequences that were cut for this code, by their lengths.
        seen_keys: what attention has found in masks.
    """

    group: Any
    layouts: dict[int, Any] = field(default_factory=dict)
    seen_keys: dict[Any, Any] = field(default_factory=dict)


@dataclass
class Replacement:
    """An attribute that is replaced while a thread works for a group: ``make(original)`` stands in its place."""

    owner: Any
    name: str
    make: Callable[[Any], Any]
    original: Any = None


_replacements: list[Replacement] = []
_preparations: list[Callable[[], None]] = []


def replace_while_active(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Registers a replacement, when this package is imported."""
    _replacements.append(Replacement(owner, name, make))


def prepare_before_active(prepare: Callable[[], None]) -> None:
    """Registers what is called whenever the first thread begins to work for a group."""
    _preparations.append(prepare)


def active() -> Activation | None:
    """What this thread works for."""
    return getattr(_local, "activation", None)


@contextmanager
def activated(activation: Activation | None) -> Iterator[None]:
    """Works for a group inside, or for none. It may be entered again, in other threads too."""
    before = active()
    _enter()
    _local.activation = activation
    try:
        yield
    finally:
        _local.activation = before
        _leave()


def _enter() -> None:
    global _users  # noqa: PLW0603
    with _lock:
        _users += 1
        if _users == 1:
            for prepare in _preparations:
                prepare()
            for each in _replacements:
                is_class = isinstance(each.owner, type)  # whose attribute may be a descriptor, to be set again
                each.original = vars(each.owner)[each.name] if is_class else getattr(each.owner, each.name)
                setattr(each.owner, each.name, each.make(each.original))


def _leave() -> None:
    global _users  # noqa: PLW0603
    with _lock:
        _users -= 1
        if _users == 0:
            for each in reversed(_replacements):
                setattr(each.owner, each.name, each.original)
