"""Running a script of examples/ in this process, as a command would."""

import contextlib
import importlib.util
import io
import sys
from pathlib import Path
from unittest import mock

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name: str, *arguments: str) -> str:
    """Runs the ``main()`` of ``examples/<name>.py`` in this process, which may be a rank; returns what it printed."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    printed = io.StringIO()
    with mock.patch.object(sys, "argv", [name, *arguments]), contextlib.redirect_stdout(printed):
        script.main()
    return printed.getvalue()
