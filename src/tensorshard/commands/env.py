"""``tensorshard env``: versions and devices on this machine, for a bug report or before a run."""

import argparse
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import TextIO

from tensorshard.commands.arguments import HelpFormat
from tensorshard.common.words import fit, size_text, terminal_width
from tensorshard.host.memory import cores_here

_PACKAGES = (
    "torch", "numpy", "omegaconf", "safetensors", "torchmetrics",
    "transformers", "tokenizers", "tensorboard", "triton",
)  # fmt: skip
_VARIABLES = (
    "NCCL_",
    "GLOO_",
    "TORCH_",
    "TENSORSHARD_",
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "MASTER_",
    "WORLD_",
)


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds ``env`` to the command line."""
    parser = commands.add_parser(
        "env",
        help="print versions, devices, backends and links",
        description="Prints versions, devices, backends, links between GPUs, and environment variables that matter.",
        formatter_class=HelpFormat,
        allow_abbrev=False,
    )
    parser.set_defaults(command=run, parser=parser, words=None)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    print(describe_machine(sys.stdout, variables=True))
    return 0


def describe_machine(stream: TextIO, *, variables: bool = False) -> str:
    """A line for each version, device and backend, as wide as the terminal that `stream` writes to.

    Args:
        variables: whether to add the environment variables that matter.
    """
    import tensorshard

    lines = {
        "tensorshard": tensorshard.__version__,
        "Python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": platform.platform(),
        **{name: _version(name) for name in _PACKAGES},
        **_machine(),
        **_devices(),
    }
    if variables:
        lines |= {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)}
    width = max(map(len, lines))
    columns = terminal_width(stream)
    return "\n".join(fit(f"{name:<{width}}  {value}", columns) for name, value in lines.items())


def _version(package: str) -> str:
    if package == "torch":  # its metadata may lack the end of the version, as in 2.11.0+cu130
        import torch

        return torch.__version__
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _machine() -> dict[str, str]:
    cores = cores_here()
    facts = {"CPU cores": str(cores)}
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        facts["memory"] = size_text(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return facts


def _devices() -> dict[str, str]:
    import torch
    import torch.distributed as dist

    facts = {
        "CPU kernels": torch.backends.cpu.get_cpu_capability(),
        "backends": ", ".join(
            name
            for name, there in {
                "gloo": dist.is_gloo_available(),
                "nccl": dist.is_nccl_available(),
                "mpi": dist.is_mpi_available(),
            }.items()
            if there
        )
        or "none",
    }
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return {**facts, "GPUs": "none"}
    if dist.is_nccl_available():
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        peers = [i for i in range(count) if i != index and torch.cuda.can_device_access_peer(index, i)]
        links = f"; reaches {', '.join(map(str, peers))} directly" if peers else ""
        facts[f"GPU {index}"] = f"{properties.name}, {size_text(properties.total_memory)}{links}"
    return facts
