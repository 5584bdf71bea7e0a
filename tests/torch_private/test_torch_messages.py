"""What torch says and users cannot act on is silenced; all else is heard."""

import logging
import subprocess
import sys

import pytest

from tensorshard.torch_private import process


def test_one_message_is_silenced_and_others_are_heard(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("torch.utils.cpp_extension")
    with process.compiling():
        logger.warning(process._NO_CUDA, "/usr/local")
        logger.warning("another of %s", "torch")
    logger.warning(process._NO_CUDA, "/usr/local")
    assert [record.msg for record in caplog.records] == ["another of %s", process._NO_CUDA]


@pytest.mark.slow
def test_torch_still_says_what_is_silenced_in_these_words() -> None:
    """In a process that profiles for the first time."""
    code = """
import torch
from tensorshard.torch_private import process
process.silence_profiler_marks()
with torch.profiler.profile():
    torch.ones(1) + 1
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "profiler_start" not in done.stderr
