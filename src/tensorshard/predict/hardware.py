"""Devices by name: how much memory they have, how much of it a process takes before any tensor, and how fast they are.

Each device is a JSON file in ``profiles/``; a new file adds a device. "this-machine" is what ``tensorshard check`` has
measured.
"""

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from tensorshard.common.paths import cache_folder
from tensorshard.plan.field_checks import size_in_bytes
from tensorshard.predict.convolution_times import ConvolutionTimes

_GIB = 1 << 30

THIS_MACHINE = "this-machine"
"""The name of the profile that ``tensorshard check`` writes."""


Curve = tuple[tuple[float, float], ...]
"""Calls of an operator at several sizes, ascending: seconds by the roofline, and seconds that they took."""


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
class HostCosts:
    """Processor seconds that CPU ranks take in addition to kernels. ``tensorshard check`` measures them on two ranks,
    and on four that share two cores: where ranks share cores, messages and their bytes take longer.

    Waiting is not included. The costs of messages come from collectives of several sizes. The others come from steps of
    small Engines: their time without kernels and messages, divided by the number of actions.

    Args:
        message: for each message between two ranks, at both ends together: Python, Gloo's threads, the system.
        queued: for a message that is sent while others are under way, so that no thread has to be woken up.
        byte: for each byte of a message, at both ends together.
        unit: for each all-gather and each reduction of a unit's parameters under ZeRO 3.
        split: for each collective along tp, and each other one that forward or backward waits for, as those of batch
            normalization.
        action: for each forward and each backward of a micro-batch on a pipeline's stage.
        step: for each step, whatever its plan.
    """

    message: float
    queued: float
    byte: float
    unit: float
    split: float
    action: float
    step: float


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
        operators: the measured times of operators, by name. Operators that were not measured take as long as "aten.mm"
            with the same roofline if they multiply, and as "aten.add" if they do not. Empty if nothing was measured.
        memory_beside: whether a kernel's time is that of its arithmetic and of its memory traffic together, and not the
            longer of the two.
        convolutions: times convolutions when they are met; None unless this is the CPU of this machine.
        host: what else CPU ranks compute; None if it was not measured. Then ranks compute all the time that messages
            take.
        crowded: the same where ranks share cores; None if it was not measured.
        crowded_operators: the times of operators where ranks share cores: other ranks' tensors take the place of theirs
            in caches, in the middle of a kernel, too. Empty if nothing was measured.
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
    operators: Mapping[str, Curve] = field(default_factory=dict)
    memory_beside: bool = False
    convolutions: ConvolutionTimes | None = field(default=None, compare=False, repr=False)
    host: HostCosts | None = None
    crowded: HostCosts | None = None
    crowded_operators: Mapping[str, Curve] = field(default_factory=dict)

    def shared_by(self, ranks: int, cores: int) -> "Rates":
        """The rates of a world of `ranks` CPU ranks on `cores` cores."""
        if ranks <= cores or self.crowded is None:
            return self
        return replace(self, host=self.crowded, operators=self.crowded_operators or self.operators)


@dataclass(frozen=True)
class Hardware:
    """A device.

    Args:
        name: the device's name.
        memory: bytes that it has, as its driver says.
        context: bytes that a process takes before its first tensor: the context, libraries and communicators. They are
            assumed for a GPU, and measured for this machine's CPU.
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

    @property
    def is_measured(self) -> bool:
        """Whether the rates were measured here."""
        return self.name == THIS_MACHINE

    @property
    def is_cpu(self) -> bool:
        """Whether its ranks are known to be CPU processes."""
        return self.rates is not None and not self.rates.asynchronous


def known_hardware() -> list[str]:
    """The names of the profiles that come with tensorshard, the device with the most memory first."""
    found = [_from_json(json.loads(path.read_text())) for path in _profiles().iterdir() if path.name.endswith(".json")]
    return [hardware.name for hardware in sorted(found, key=lambda h: (-h.memory, h.name))]


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
    _convolutions_file(path).unlink(missing_ok=True)  # they are timed anew, as all else
    rates = replace(rates, convolutions=None)
    _write(path, {"name": THIS_MACHINE, "memory": memory, "context": context, "rates": asdict(rates), "source": source})
    return path


def _convolutions_file(profile: Path) -> Path:
    """Where the times of convolutions are kept beside the profile of this machine."""
    return profile.with_name(f"{THIS_MACHINE}-convolutions.json")


def save_ratios(**ratios: float) -> Path | None:
    """Adds `time_ratio` or `memory_ratio` to the profile of this machine. Returns its file; None if there is none."""
    path = measured_profile()
    if path is None or not path.is_file():
        return None
    _write(path, json.loads(path.read_text()) | ratios)
    return path


def _write(path: Path, values: Mapping[str, Any]) -> None:
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(values, indent=2) + "\n")
    draft.replace(path)


def _measured() -> Hardware:
    path = measured_profile()
    if path is None or not path.is_file():
        raise ValueError(
            f"hardware={THIS_MACHINE!r} was asked for, and this machine was not measured yet; run 'tensorshard check', "
            f"which takes about a minute"
        )
    try:
        measured = _from_json(json.loads(path.read_text()))
        assert measured.rates is not None
        if measured.rates.asynchronous:
            return measured
        times = ConvolutionTimes(_convolutions_file(path))
        return replace(measured, rates=replace(measured.rates, convolutions=times))
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
    rates = dict(values)
    for name in ("matmul_efficiency", "memory_efficiency"):
        rates[name] = tuple(rates[name])
    for name in ("within_node", "between_nodes"):
        rates[name] = Link(**{**rates[name], "efficiency": tuple(rates[name]["efficiency"])})
    for name in ("operators", "crowded_operators"):
        rates[name] = {
            operator: tuple((bound, seconds) for bound, seconds in curve)
            for operator, curve in values.get(name, {}).items()
        }
    for name in ("host", "crowded"):
        if values.get(name) is not None:
            rates[name] = HostCosts(**values[name])
    return Rates(**rates)
