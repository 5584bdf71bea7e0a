"""Wrong inputs, and what is said about them: each is refused, by code of this package, in a sentence."""

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorshard

_PACKAGE = str(Path(tensorshard.__file__).parent)

Case = tuple[Any, ...]
"""What is done wrong, as a callable, and the words that the sentence must have."""


RAW = {
    "a keyword that does not exist": "Python names it",
    "batches: step without a batch": "Python names what is missing",
    "loops: a schedule on the Engine": "torch says that an Engine is no Optimizer",
    "loops: a state dict that lacks weights": "torch lists them",
}
"""What Python or torch says in its own words, clearly enough."""


@dataclass(frozen=True)
class Said:
    """What a call raised.

    Attributes:
        kind: the error's type; "" where nothing was raised.
        text: its message and notes.
        is_ours: whether code of this package raised it, or added a note, rather than let it pass.
    """

    kind: str
    text: str
    is_ours: bool


def said(call: Callable[..., Any], *args: Any) -> Said:
    """Calls ``call(*args)``, which is wrong."""
    try:
        call(*args)
    except (Exception, SystemExit) as error:
        notes = getattr(error, "__notes__", [])
        is_ours = traceback.extract_tb(error.__traceback__)[-1].filename.startswith(_PACKAGE)
        return Said(type(error).__name__, "\n".join([str(error), *notes]), is_ours or bool(notes))
    return Said("", "", False)


def say_all(cases: Mapping[str, Case], *args: Any) -> dict[str, Said]:
    """What is said about each of `cases`, whose calls are given `args`."""
    return {what: said(call, *args) for what, (call, *_) in cases.items()}


def assert_refused(what: str, found: Said, case: Case) -> None:
    """Whether the words of `case` were said, and by this package, but for what is :data:`RAW`."""
    assert found.kind, "it was accepted"
    missing = [word for word in case[1:] if word not in found.text]
    assert not missing, f"{found.kind} does not say {missing}:\n{found.text}"
    assert found.is_ours or what in RAW, f"a raw {found.kind}:\n{found.text}"
