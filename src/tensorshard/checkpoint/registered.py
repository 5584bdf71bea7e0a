"""States that a user registers, such as an average of the weights: nested containers of numbers, text and tensors.

They are stored as JSON, in which each tensor is a reference to one of the checkpoint's tensors, so nothing is pickled.
"""

import logging
import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from tensorshard.checkpoint.between_saves import RegisteredStates
from tensorshard.checkpoint.parts import Part, Stored
from tensorshard.comm.decisions import check_same
from tensorshard.comm.sharding import to_local
from tensorshard.common.words import kind_of
from tensorshard.plan.mesh import Mesh
from tensorshard.plan.storage import TemporaryCopy
from tensorshard.weights.files.manifest import as_bytes

logger = logging.getLogger("tensorshard")

_TENSOR, _TUPLE, _DICT = "$tensor", "$tuple", "$dict"


class RegisteredPart(Part):
    """What :class:`RegisteredStates` holds: ``state.NAME.PATH``, and with the rank where states differ by rank."""

    def __init__(self, states: RegisteredStates, mesh: Mesh) -> None:
        self._states = states
        self._mesh = mesh
        self._tensors: dict[str, Any] = {}
        self._read: dict[str, torch.Tensor] = {}

    def entries(self) -> dict[str, Any]:
        self._tensors = {}
        shared, of_ranks = {}, {}
        for name, part in self._states.shared.items():
            shared[name] = encode(part.state_dict(), f"state.{name}", self._tensors)
            if self._mesh.degrees["tp"] > 1:
                for key, value in self._tensors.items():
                    if key.startswith(f"state.{name}.") and isinstance(value, DTensor):
                        raise ValueError(
                            f"the registered state {name!r} holds a DTensor, {key}, of which ranks along tp hold "
                            f"different values; register it with per_rank=True, or keep whole tensors in it"
                        )
        for name, part in self._states.of_ranks.items():
            own: dict[str, Any] = {}
            of_ranks[name] = encode(part.state_dict(), f"state.{name}.{self._mesh.rank}", own)
            self._tensors.update({key: to_local(value) for key, value in own.items()})
        return {"states": shared, "states_of_ranks": of_ranks}

    def gather(self, entries: dict[str, Any]) -> dict[str, Any]:
        compared = {
            name: {
                "its structure and numbers": str(state),
                **{
                    key: _checksum(value)
                    for key, value in self._tensors.items()
                    if key.startswith(f"state.{name}.") and not isinstance(value, DTensor)
                },
            }
            for name, state in entries["states"].items()
        }
        if compared:
            try:
                check_same(compared, self._mesh.world_group, "engine.save")
            except ValueError as error:
                raise ValueError(
                    f"a registered state differs between ranks: {error}. Register it with per_rank=True if it should"
                ) from error
        names = list(entries["states_of_ranks"])
        everyone: list[Any] = [entries["states_of_ranks"]]
        if self._mesh.world_size > 1:
            everyone = [None] * self._mesh.world_size
            dist.all_gather_object(everyone, entries["states_of_ranks"], group=self._mesh.world_group)
        return {**entries, "states_of_ranks": {name: [states.get(name) for states in everyone] for name in names}}

    def tensors(self) -> dict[str, Any]:
        tensors, self._tensors = self._tensors, {}
        return tensors

    def check(self, stored: Stored) -> None:
        shared = stored.document.get("states", {})
        of_ranks = stored.document.get("states_of_ranks", {})
        for here, there in ((self._states.shared, shared), (self._states.of_ranks, of_ranks)):
            for name in here:
                if name not in there:
                    raise ValueError(
                        f"{stored.source} has no state {name!r}, which is registered with this engine"
                        f"{' for each rank' if here is self._states.of_ranks else ''}; it has "
                        f"{', '.join([*shared, *of_ranks]) or 'none'}. Register it after engine.load"
                    )
        for name in self._states.of_ranks:
            then = len(of_ranks[name])
            if then != self._mesh.world_size:
                raise ValueError(
                    f"{stored.source} has the state {name!r} of {then} ranks, each its own, and there are "
                    f"{self._mesh.world_size}; load it on {then} ranks, or register it after engine.load"
                )
        unknown = [n for n in [*shared, *of_ranks] if n not in self._states.shared and n not in self._states.of_ranks]
        if unknown and self._mesh.rank == 0:
            logger.warning("%s has the states %s, which are not registered and not loaded", stored.source, unknown)

    def room(self, stored: Stored, copy: TemporaryCopy) -> dict[str, Any]:
        self._read = {}
        room: dict[str, Any] = {}
        held: dict[str, Any] = {}
        prefixes = []
        for name, part in self._states.shared.items():
            prefixes.append(f"state.{name}")
            encode(part.state_dict(), prefixes[-1], held)
        for name, part in self._states.of_ranks.items():
            prefixes.append(f"state.{name}.{self._mesh.rank}")
            encode(part.state_dict(), prefixes[-1], held)
        for key, entry in stored.metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                continue
            if not any(key == prefix or key.startswith(f"{prefix}.") for prefix in prefixes):
                continue
            now = held.get(key)
            local = key.split(".")[1] in self._states.of_ranks
            if isinstance(now, DTensor) and (to_local(now) if local else now).shape == entry.size:
                self._read[key] = copy.like(now.detach(), entry.properties.dtype)
                room[key] = to_local(self._read[key]) if local else self._read[key]
            else:
                self._read[key] = room[key] = torch.zeros(entry.size, dtype=entry.properties.dtype)
        return room

    def restore(self, stored: Stored) -> None:
        read, self._read = self._read, {}
        for name, part in self._states.shared.items():
            part.load_state_dict(decode(stored.document["states"][name], read))
        for name, part in self._states.of_ranks.items():
            part.load_state_dict(decode(stored.document["states_of_ranks"][name][self._mesh.rank], read))


def encode(value: Any, path: str, tensors: dict[str, Any]) -> Any:
    """`value` as JSON can hold it.

    Args:
        path: of the value, for the names of its tensors and for messages.
        tensors: where they are put.

    Raises:
        TypeError: it holds something that is no number, text, tensor, list, tuple or dict.
    """
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach()
        return {_TENSOR: path}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list | tuple):
        items = [encode(item, f"{path}.{index}", tensors) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {_TUPLE: items}
    if isinstance(value, Mapping):
        pairs = [(key, encode(item, f"{path}.{key}", tensors)) for key, item in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs):
            return dict(pairs)
        for key, _ in pairs:
            if type(key) not in (bool, int, float, str):
                raise TypeError(f"the registered {path} has a key of type {type(key).__name__}; use text or numbers")
        return {_DICT: [list(pair) for pair in pairs]}
    raise TypeError(
        f"the registered {path} is {kind_of(value)}; a state must be made of numbers, text, tensors, lists, "
        f"tuples and dicts, so that loading it never runs code"
    )


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """What :func:`encode` made `value` of."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _TUPLE in value:
        return tuple(decode(item, tensors) for item in value[_TUPLE])
    if _DICT in value:
        return {key: decode(item, tensors) for key, item in value[_DICT]}
    return {key: decode(item, tensors) for key, item in value.items()}


def _checksum(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype} {zlib.crc32(as_bytes(tensor.cpu().contiguous())):08x}"
