"""Devices by name: how much memory they have, how much of it a process takes before any tensor, and how fast they are.

Each device is a JSON file in ``profiles/``; a new file adds a device. "this-machine" is what ``tensorshard check`` has
measured.
"""

import difflib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from tensorshard.common.paths import cache_folder, write_whole
from tensorshard.plan.field_checks import size_in_bytes
from tensorshard.plan.plan import AXES, Plan
from tensorshard.torch_private.process_groups import opens_at_once

_COMMUNICATOR = 1 << 28
_GIB = 1 << 30

THIS_MACHINE = "this-machine"
"""The name of the profile that ``tensorshard check`` writes."""


@dataclass(frozen=True)
class Link:
    """What collectives travel over.

    Args:
        bandwidth: bytes a second that a device sends, while it receives as many.
        latency: seconds that each message takes in addition to the time of its bytes.
        efficiency: the share of the bandwidth that collectives reach, at least and at most.
    """

    bandwidth: float
    latency: float
    efficiency: tuple[float, float] = (1.0, 1.0)


@dataclass(frozen=True)
class Rates:
    """How fast a device is.

    Args:
        flops: dense floating-point operations a second by type, such as "bfloat16". Other types take as long as
            float32.
        memory_bandwidth: bytes a second that kernels read and write.
        matmul_efficiency, memory_efficiency: the shares of these two that kernels reach, at least and at most.
        launch: seconds that each operator takes in addition to its work.
        asynchronous: whether the host launches ahead of the device, and transfers run beside kernels.
        devices_per_node: how many consecutive ranks are linked within a node.
        within_node, between_nodes: the links.
        host_bandwidth: bytes a second between a device and its host's memory.
        disk_bandwidth: bytes a second to and from the disk of a node, for all of its devices together; None if unknown.
    """

    flops: Mapping[str, float]
    memory_bandwidth: float
    matmul_efficiency: tuple[float, float]
    memory_efficiency: tuple[float, float]
    launch: float
    asynchronous: bool
    devices_per_node: int
    within_node: Link
    between_nodes: Link
    host_bandwidth: float
    disk_bandwidth: float | None = None

    def peak(self, dtype: str) -> float:
        """Floating-point operations a second in a type such as "bfloat16"."""
        return self.flops.get(dtype, self.flops["float32"])


@dataclass(frozen=True)
class Hardware:
    """A device.

    Args:
        name: the device's name.
        memory: bytes that it has, as its driver says.
        context: bytes that a process takes before its first tensor: the context, libraries and one communicator. They
            are assumed for a GPU, and measured for this machine's CPU.
        rates: how fast it is; None if that is not known.
        source: where the numbers come from.
        time_ratio, memory_ratio: measured over estimated, in the last run on it. Searches for plans use them.
    """

    name: str
    memory: int
    context: int = _GIB * 3 // 4
    rates: Rates | None = None
    source: str = ""
    time_ratio: float = 1.0
    memory_ratio: float = 1.0

    def context_under(self, plan: Plan) -> int:
        """`context`, and on a GPU what the plan's other communicators take: 0.25 GiB each, which is assumed."""
        others = 0 if self.is_cpu else max(0, communicators(plan) - 1)
        return self.context + others * _COMMUNICATOR

    @property
    def is_measured(self) -> bool:
        """Whether the rates were measured here."""
        return self.name == THIS_MACHINE

    @property
    def basis(self) -> str:
        """What its times are worth, in words."""
        if self.is_measured:
            return "from measured rates"
        if self.name == ASSUMED_CPU:
            return "at assumed rates; 'tensorshard check' measures them"
        return f"by the profile {self.name}, not validated"

    @property
    def shares_cores(self) -> bool:
        """Whether its ranks are processes that share this machine's cores."""
        return self.is_cpu and self.name in (THIS_MACHINE, ASSUMED_CPU)

    @property
    def is_cpu(self) -> bool:
        """Whether its ranks are known to be CPU processes."""
        return self.rates is not None and not self.rates.asynchronous


def communicators(plan: Plan, at_once: bool | None = None) -> int:
    """How many communicators NCCL makes for a rank under a resolved `plan`: one for each group with other ranks, and
    one for each neighbour in a pipeline, as torch's schedules send by themselves what needs no answer. Groups of
    experts are others than those of the axes, even with the same ranks, unless all ranks of the world are in one. At
    ZeRO 0 gradients are summed over all replicas and their ranks at once.

    Args:
        at_once: whether a group has its communicator when it is made, even if it never sends, and a pipeline one of its
            own, as with torch 2.15. None: as the installed torch has it.
    """
    at_once = opens_at_once() if at_once is None else at_once
    axes = {axis for axis in AXES if getattr(plan, axis) > 1}
    data, shard = {"dp_replicate", "dp_shard"}, {"dp_shard", "cp"}
    of_experts = [plan.ep, plan.dp_shard * plan.cp // plan.ep]
    by_one_axis = axes
    if plan.zero == 0 and data <= axes:
        by_one_axis, shard = axes if at_once else axes - data, data
    if at_once:
        of_experts += [plan.dp_replicate, plan.tp]
    if plan.zero == 0 and (not at_once or min(of_experts[1], plan.dp_replicate) > 1):
        of_experts += [of_experts[1] * plan.dp_replicate]
        of_experts[1] = of_experts[1] if at_once else 1
    groups = {frozenset({axis}) for axis in by_one_axis}
    groups |= {frozenset(axes & group) for group in (axes, data, data | {"cp"}, shard)}
    world_size = math.prod(getattr(plan, axis) for axis in AXES)
    others = 0 if plan.ep in (1, plan.cp) else sum(1 < ranks < world_size for ranks in of_experts)
    others += at_once and plan.pp == world_size > 1
    return len(groups - {frozenset()}) + min(plan.pp - 1, 2) + others


def known_hardware() -> list[str]:
    """The names of the profiles that come with tensorshard, the device with the most memory first."""
    profiles = [
        _from_json(json.loads(path.read_text())) for path in _profiles().iterdir() if path.name.endswith(".json")
    ]
    return [hardware.name for hardware in sorted(profiles, key=lambda h: (-h.memory, h.name))]


def find_hardware(hardware: str | Hardware | None) -> Hardware | None:
    """The device with the given name.

    Raises:
        ValueError: the name is unknown, and the error lists the known ones; or it is "this-machine", which was not
            measured yet.
    """
    if hardware is None or isinstance(hardware, Hardware):
        return hardware
    name = str(hardware).lower().replace("_", "-").replace(" ", "-")
    if name == THIS_MACHINE:
        return _measured()
    names = known_hardware()
    if name not in names:
        near = [known for known in names if known.startswith(name)] or difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        raise ValueError(
            f"hardware={hardware!r} is not known; {hint}known are {', '.join(names)}, and {THIS_MACHINE}, which "
            f"'tensorshard check' measures"
        )
    return _from_json(json.loads((_profiles() / f"{name}.json").read_text()))


def measured_profile() -> Path | None:
    """The file for the profile of this machine, which may not exist yet; None if there is no cache folder."""
    folder = cache_folder()
    return None if folder is None else folder / f"{THIS_MACHINE}.json"


def save_measured(memory: int, context: int, rates: Rates, source: str) -> Path | None:
    """Writes the profile of this machine, whole or not at all. Returns its file; None if there is no cache folder."""
    path = measured_profile()
    if path is None:
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, {"name": THIS_MACHINE, "memory": memory, "context": context, "rates": asdict(rates), "source": source})
    return path


def save_ratios(**ratios: float) -> Path | None:
    """Adds `time_ratio` or `memory_ratio` to the profile of this machine. Returns its file; None if there is none."""
    path = measured_profile()
    if path is None or not path.is_file():
        return None
    _write(path, json.loads(path.read_text()) | ratios)
    return path


def _write(path: Path, values: Mapping[str, Any]) -> None:
    write_whole(path, json.dumps(values, indent=2) + "\n")


def _measured() -> Hardware:
    path = measured_profile()
    if path is None or not path.is_file():
        raise ValueError(
            f"hardware={THIS_MACHINE!r} was asked for, and this machine was not measured yet; run 'tensorshard check', "
            f"which takes about a minute"
        )
    try:
        return _from_json(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); run 'tensorshard check' to write it anew") from error


def _profiles() -> Any:
    return resources.files("tensorshard.predict") / "profiles"


def _from_json(values: Mapping[str, Any]) -> Hardware:
    return Hardware(
        values["name"],
        size_in_bytes("memory", values["memory"]),
        values.get("context", Hardware.context),
        rates_from_json(values["rates"]),
        values.get("source", ""),
        values.get("time_ratio", 1.0),
        values.get("memory_ratio", 1.0),
    )


def rates_from_json(values: Mapping[str, Any]) -> Rates:
    """The Rates of the "rates" in a profile."""
    rates = {name: value for name, value in values.items() if name in Rates.__dataclass_fields__}
    for name in ("matmul_efficiency", "memory_efficiency"):
        rates[name] = tuple(rates[name])
    for name in ("within_node", "between_nodes"):
        rates[name] = Link(**{**rates[name], "efficiency": tuple(rates[name]["efficiency"])})
    return Rates(**rates)


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
    has_gpus = torch.cuda.is_available()
    measured = measured_here(gpus=has_gpus)
    if measured is not None:
        return measured
    if not has_gpus:
        return assumed_cpu()
    name, memory = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
    known = profile_of_gpu(name, memory)
    if known is None:
        raise ValueError(
            f"this machine's GPU is a {name}, whose speed is not known; run 'tensorshard check', which measures it, or "
            f"name the hardware that is nearest: {', '.join(known_hardware())}"
        )
    return known


def measured_here(*, gpus: bool) -> Hardware | None:
    """This machine's GPUs, or its CPU, as ``tensorshard check`` measured them; None if it did not."""
    try:
        measured = find_hardware(THIS_MACHINE)
    except ValueError:
        return None
    known = measured is not None and measured.rates is not None and measured.rates.asynchronous == gpus
    return measured if known else None


def assumed_cpu() -> Hardware:
    """This machine's CPU, whose speed is assumed."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    source = "Assumed; 'tensorshard check' measures this machine."
    return Hardware(ASSUMED_CPU, memory, _ASSUMED_PROCESS, _ASSUMED, source)


def profile_of_gpu(name: str, memory: int) -> Hardware | None:
    """The profile of the GPU that its driver calls `name`, with `memory` bytes; None if no profile is of it."""
    called = name.lower().replace(" ", "-")
    profiles = [profile for known in known_hardware() if (profile := find_hardware(known)) is not None]
    # "a100-80" and "a100-40" are both found in "NVIDIA A100-SXM4-80GB", "rtx-4090" in "NVIDIA GeForce RTX 4090".
    near = [profile for profile in profiles if _device(profile.name) in called]
    return min(near, key=lambda profile: abs(profile.memory - memory)) if near else None


def _device(name: str) -> str:
    """The name of a profile without the size of the memory at its end."""
    device, _, memory = name.rpartition("-")
    return device if memory.isdecimal() and len(memory) < 4 else name
