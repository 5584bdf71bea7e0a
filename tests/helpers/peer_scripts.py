"""Example scripts of other libraries, rebuilt small, run as they are and with their import lines changed."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

SCRIPTS = Path(__file__).parents[1] / "compat" / "scripts"


@contextmanager
def fresh_accelerate() -> Iterator[None]:
    """Inside, Accelerate sees this rank's world, as torchrun would have told it, and none of earlier tests'."""

    def reset() -> None:
        state = sys.modules.get("accelerate.state")  # DeepSpeed's scripts do without
        if state is not None:
            state.AcceleratorState._reset_state(True)
            state.PartialState._reset_state()
            state.GradientState._reset_state()

    before = dict(os.environ)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    if dist.is_initialized():
        rank, size = str(dist.get_rank()), str(dist.get_world_size())
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    reset()
    try:
        yield
    finally:
        reset()
        os.environ.clear()
        os.environ.update(before)


def run(name: str, arguments: Any, imports: dict[str, str] | None = None, **variables: str) -> Any:
    """What ``main(arguments)`` of a script returns.

    Args:
        imports: lines of the script, and what takes their place.
        variables: of the environment.
    """
    before = sys.argv
    with fresh_accelerate():
        os.environ.update(variables)
        sys.argv = [name]
        try:
            return names_of(name, imports)["main"](arguments)
        finally:
            sys.argv = before


def names_of(name: str, imports: dict[str, str] | None = None) -> dict[str, Any]:
    """What a script defines, with other import lines."""
    path = SCRIPTS / f"{name}.py"
    text = path.read_text()
    for line, other in (imports or {}).items():
        assert text.count(f"{line}\n") == 1, f"{path} has no line {line!r}"
        text = text.replace(f"{line}\n", f"{other}\n")
    scope: dict[str, Any] = {"__name__": name, "__file__": str(path)}
    exec(compile(text, str(path), "exec"), scope)
    return scope
