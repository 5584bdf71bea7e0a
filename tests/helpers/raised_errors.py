"""Errors by type and by the file whose code raises them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorshard

OURS = Path(tensorshard.__file__).parent / "tensor_parallel" / "apply" / "apply_table.py"
BY_VALUES = [ValueError, IndexError, RuntimeError, ZeroDivisionError]
OTHERS = [AssertionError, AttributeError, KeyError, NotImplementedError, TypeError]


def raising(error: type[Exception], file: str | Path) -> Callable[..., Any]:
    """A function that raises `error`, as code of the source file `file` would."""
    return from_file("def made(*args, **kwargs):\n    raise error('here')\n", file, error=error)


def from_file(source: str, file: str | Path, **names: Any) -> Callable[..., Any]:
    """The function ``made`` that `source` defines, which sees `names`, as code of `file`."""
    exec(compile(source, str(file), "exec"), names)
    return names["made"]
