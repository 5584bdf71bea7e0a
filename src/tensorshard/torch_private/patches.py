"""Putting functions of ours in the place of torch's, for a while. All that is replaced goes through here."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, ``make(original)`` stands in the place of an attribute of torch's. At the end the original is there
    again, unless somebody has put something else there: that may go on to call what was made, and stays.

    Args:
        owner: a module, class or function.
        name: of the attribute, public or not.
        make: called with the attribute; of a class, with what the class's own dict has, such as a classmethod.

    Why: torch's own code, and code that knows nothing of tensorshard, call these functions where a rank has a part, or
    is none. ``tests/torch_private/test_patches.py`` shows of each that torch calls what is put there: a name may stay
    and be called no more.

    Checked: torch 2.13 and 2.15.

    Public way: none for functions that others have imported. Of public functions, a ``TorchFunctionMode`` sees some.
    """
    original = vars(owner)[name] if name in vars(owner) else getattr(owner, name)
    ours = make(original)
    setattr(owner, name, ours)
    try:
        yield
    finally:
        if (vars(owner)[name] if name in vars(owner) else getattr(owner, name)) is ours:
            setattr(owner, name, original)
