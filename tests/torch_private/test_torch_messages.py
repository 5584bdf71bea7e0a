"""What torch says and users cannot act on is silenced; all else is heard."""

import logging
import subprocess
import sys
import warnings

import pytest

from tensorshard.torch_private import messages


def test_one_warning_is_silenced_and_others_are_heard() -> None:
    others = [f"{messages._ONE_PROCESS} And more.", "torch.distributed is disabled", "mine"]
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with messages.reading_in_one_process():
            for text in (messages._ONE_PROCESS, *others):
                warnings.warn(text, UserWarning, stacklevel=1)
        warnings.warn(messages._ONE_PROCESS, UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in heard] == [*others, messages._ONE_PROCESS]


def test_one_message_is_silenced_and_others_are_heard(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("torch.utils.cpp_extension")
    with messages.compiling():
        logger.warning(messages._NO_CUDA, "/usr/local")
        logger.warning("another of %s", "torch")
    logger.warning(messages._NO_CUDA, "/usr/local")
    assert [record.msg for record in caplog.records] == ["another of %s", messages._NO_CUDA]


@pytest.mark.slow
def test_torch_still_says_what_is_silenced_in_these_words() -> None:
    """In a process without a world, and one that profiles for the first time."""
    code = """
import tempfile, warnings, torch
import torch.distributed.checkpoint as dcp
from tensorshard.torch_private import messages
folder = tempfile.mkdtemp()
dcp.save({"a": torch.ones(1)}, checkpoint_id=folder, no_dist=True)
for surrounding in (warnings.catch_warnings, messages.reading_in_one_process):
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with surrounding():
            dcp.load({"a": torch.zeros(1)}, checkpoint_id=folder, no_dist=True)
    print(len([warning for warning in heard if str(warning.message) == messages._ONE_PROCESS]))
messages.silence_profiler_marks()
with torch.profiler.profile():
    torch.ones(1) + 1
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n0\n"
    assert "profiler_start" not in done.stderr
