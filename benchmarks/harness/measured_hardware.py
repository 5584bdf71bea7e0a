"""This machine's rates, as ``tensorshard check`` measures them."""

import os
import subprocess
import sys
from tempfile import TemporaryDirectory
from unittest import mock

from tensorshard.predict.hardware import THIS_MACHINE, Hardware, find_hardware

_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TENSORSHARD_CACHE": "off"}
_TIMEOUT = 600.0


def measured_hardware() -> Hardware:
    """This machine, as ``tensorshard check`` measures it."""
    with TemporaryDirectory() as folder:
        environment = os.environ | _ENVIRONMENT | {"TENSORSHARD_CACHE": folder}
        command = [sys.executable, "-c", "from tensorshard.cli import main; raise SystemExit(main())", "check"]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=_TIMEOUT)
        with mock.patch.dict(os.environ, {"TENSORSHARD_CACHE": folder}):
            hardware = find_hardware(THIS_MACHINE)
    assert hardware is not None  # the command would have failed
    return hardware
