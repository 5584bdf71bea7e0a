"""The machine that a search runs on, if no other hardware was named."""

import os

import torch

from tensorshard.predict.hardware import THIS_MACHINE, Hardware, Link, Rates, find_hardware, known_hardware

ASSUMED_CPU = "assumed-cpu"
"""The name of the hardware that stands for a machine which was not measured."""

_ASSUMED_PROCESS = 300 << 20  # bytes of Python, torch and a world's connections, before the first tensor
# One core of a server. The numbers are a guess that serves to order plans, and not to predict seconds.
_ASSUMED = Rates(
    {"float32": 5e10, "bfloat16": 5e10},
    1e10,
    (0.6, 1.0),
    (0.6, 1.5),
    launch=5e-6,
    asynchronous=False,
    devices_per_node=1024,
    within_node=Link(2e9, 1e-4),
    between_nodes=Link(1e9, 2e-4),
    host_bandwidth=1e10,
    disk_bandwidth=5e8,
)


def hardware_here() -> Hardware:
    """This machine: as ``tensorshard check`` measured it, else the profile of its GPU, else an assumed CPU.

    Raises:
        ValueError: it has a GPU without a profile, and was not measured.
    """
    try:
        measured = find_hardware(THIS_MACHINE)
    except ValueError:
        measured = None
    has_gpus = torch.cuda.is_available()
    if measured is not None and measured.rates is not None and measured.rates.asynchronous == has_gpus:
        return measured
    if not has_gpus:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        source = "Assumed; 'tensorshard check' measures this machine."
        return Hardware(ASSUMED_CPU, memory, _ASSUMED_PROCESS, _ASSUMED, source)
    called = torch.cuda.get_device_name().lower().replace(" ", "-")
    memory = torch.cuda.get_device_properties(0).total_memory
    profiles = [profile for name in known_hardware() if (profile := find_hardware(name)) is not None]
    # "a100-80" and "a100-40" are both found in "NVIDIA A100-SXM4-80GB", "rtx-4090" in "NVIDIA GeForce RTX 4090".
    near = [profile for profile in profiles if _device(profile.name) in called]
    if not near:
        raise ValueError(
            f"this machine's GPU is a {torch.cuda.get_device_name()}, whose speed is not known; run 'tensorshard "
            f"check', which measures it, or name the hardware that is nearest: {', '.join(known_hardware())}"
        )
    return min(near, key=lambda profile: abs(profile.memory - memory))


def _device(name: str) -> str:
    """The name of a profile without the size of the memory at its end."""
    device, _, memory = name.rpartition("-")
    return device if memory.isdecimal() and len(memory) < 4 else name
