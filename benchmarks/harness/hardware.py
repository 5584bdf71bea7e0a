"""Names for the hardware of a benchmark: enough to compare by, but nothing that identifies the machine."""

import os
import platform
import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version


def hardware_name(device_type: str) -> str:
    """``"cpu-2core"``, or ``"2x-nvidia-h200"`` for "cuda"."""
    if device_type == "cpu":
        return f"cpu-{len(os.sched_getaffinity(0))}core"
    import torch

    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    count = torch.cuda.device_count()
    return name if count == 1 else f"{count}x-{name}"


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """The version of Python and of each of `packages` that is installed."""
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
