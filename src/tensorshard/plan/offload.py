"""What a Plan offloads, and to where, as pure data."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorshard.plan.field_checks import check_choice, data_with_known_fields, size_in_bytes, unknown_field

TIERS = ("cpu", "disk")
_LEAST_BUFFERS = 512 * 1024


@data_with_known_fields
@dataclass(frozen=True)
class Offload:
    """What a rank keeps in host memory or on disk, in place of its device's memory.

    Each of the first four is None (on the device), "cpu" (host memory) or "disk" (a scratch file). On CPU ranks,
    training is the same to the last bit. See ``docs/offload.md``.

    Args:
        optimizer: states of the optimizer, and the fp32 master weights where forward computes with 16-bit ones.
        gradients: gradients, from the end of their reduction to the update.
        parameters: parameters, at ZeRO 3: a unit's are read before its forward and its backward, and dropped after.
        activations: what the model's blocks keep for backward; with recomputation, their inputs.
        path: the folder of the scratch files, on a local disk; None for the system's folder for temporary files. Each
            rank has one file there, without a name, which is gone when the process ends, however it ends.
        host_memory: how many bytes all of this machine's ranks may keep in host memory, or text such as "6GiB". What
            does not fit goes to disk. None for no bound.
        buffer_memory: how many bytes a rank may use for buffers between the tiers.
        overlap: whether ``engine.step`` returns while its update goes on. The next forward waits for it, unit by unit,
            and so does code that asks the Engine for its model, its optimizer or its state.

    Raises:
        ValueError, TypeError: a value that cannot work; the message says what would work.

    Examples:
        >>> plan = ts.Plan(offload=ts.Offload(optimizer="disk", gradients="disk", host_memory="6GiB"))
        >>> plan.offload.uses_disk
        True
    """

    optimizer: str | None = None
    gradients: str | None = None
    parameters: str | None = None
    activations: str | None = None
    path: str | None = None
    host_memory: int | str | None = None
    buffer_memory: int | str = "128MiB"
    overlap: bool = False

    def __post_init__(self) -> None:
        for name in ("optimizer", "gradients", "parameters", "activations"):
            if getattr(self, name) is not None:
                check_choice(f"offload.{name}", getattr(self, name), TIERS)
        if not isinstance(self.overlap, bool):
            raise TypeError(f"offload.overlap is {self.overlap!r}; it must be True or False")
        if self.path is not None and not isinstance(self.path, str):
            object.__setattr__(self, "path", str(self.path))
        if self.host_memory is not None:
            size_in_bytes("offload.host_memory", self.host_memory)
        if size_in_bytes("offload.buffer_memory", self.buffer_memory) < _LEAST_BUFFERS:
            raise ValueError(
                f"offload.buffer_memory is {self.buffer_memory!r}; it must be at least 512KiB, for several "
                f"transfers at once"
            )

    @property
    def folder(self) -> Path:
        """The folder that `path` means."""
        import tempfile  # imported when used: `import tensorshard` stays quick

        return Path(tempfile.gettempdir() if self.path is None else self.path)

    @property
    def host_bytes(self) -> int | None:
        """`host_memory` as a number of bytes."""
        return None if self.host_memory is None else size_in_bytes("offload.host_memory", self.host_memory)

    @property
    def buffer_bytes(self) -> int:
        """`buffer_memory` as a number of bytes."""
        return size_in_bytes("offload.buffer_memory", self.buffer_memory)

    @property
    def uses_disk(self) -> bool:
        """Whether anything is, or may be, on disk."""
        fields = (self.optimizer, self.gradients, self.parameters, self.activations)
        return self.host_memory is not None or "disk" in fields

    @property
    def activation_buffer_bytes(self) -> int:
        """The part of `buffer_memory` for activations: half of it if optimizer states are offloaded too, else all."""
        if self.activations is None:
            return 0
        return self.buffer_bytes if self.optimizer is None else self.buffer_bytes // 2

    def describe(self) -> str:
        """Says in words what is kept where."""
        where = {None: "device", "cpu": "host memory", "disk": "disk"}
        places = [f"{name}: {where[getattr(self, name)]}" for name in ("optimizer", "gradients", "parameters")]
        if self.activations is not None:
            places.append(f"activations: {where[self.activations]}")
        if self.host_memory is not None:
            places.append(f"at most {self.host_memory} of host memory, the rest on disk")
        if self.path is not None:
            places.append(f"in {self.path}")
        if self.overlap:
            places.append("updates go on during the next forward")
        return ", ".join(places)

    def check_implemented(self, zero: int) -> None:
        """Refuses what this version does not support.

        Args:
            zero: the plan's ZeRO level.

        Raises:
            ValueError: the message names the field, and what works instead.
        """
        if self.parameters is not None and zero != 3:
            raise ValueError(
                f"offload.parameters={self.parameters!r} was given with zero={zero}, where every rank computes with "
                f"full parameters that stay in memory; set zero=3 (it works on one rank, too), or leave "
                f"offload.parameters at None"
            )
        beside = self.gradients is not None or self.parameters is not None
        if self.optimizer is None and (beside or self.activations is None):
            raise ValueError(
                "offload was given without optimizer=: what is offloaded are the optimizer's states, gradients and "
                "parameters beside them, and activations; set offload.optimizer or offload.activations to 'cpu' or "
                "'disk', or offload=None"
            )
        if self.overlap and self.optimizer is None:
            raise ValueError(
                "offload.overlap=True was given without offload.optimizer: what goes on during the next forward are "
                "updates of states in host memory or on disk; set offload.optimizer to 'cpu' or 'disk', or leave "
                "offload.overlap at False"
            )


def as_offload(value: Any) -> Offload | None:
    """The Offload for a Plan's `value`: an Offload, "cpu" or "disk", a mapping of its fields, or None.

    Raises:
        ValueError, TypeError: it is none of these.
    """
    if value is None or isinstance(value, Offload):
        return value
    if isinstance(value, str):
        check_choice("offload", value, TIERS)
        return Offload(optimizer=value, gradients=value)
    if isinstance(value, Mapping):
        unknown = unknown_field(Offload, value)
        if unknown is not None:
            raise ValueError(unknown)
        return Offload(**value)  # type: ignore[misc]
    raise TypeError(
        f"offload is {value!r}; it must be None, 'cpu', 'disk' or a tensorshard.Offload, such as "
        f"Offload(optimizer='disk')"
    )
