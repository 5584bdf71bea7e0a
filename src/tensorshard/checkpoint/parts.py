"""The parts of a training state: the tensors and entries of ``engine.json`` that a checkpoint holds of each.

Names of tensors and entries are the same under any plan, so that any other plan can read them.
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from tensorshard.checkpoint.between_saves import Stateful
from tensorshard.checkpoint.imported import fit_optimizer, fit_weights, why_other_optimizer
from tensorshard.checkpoint.integrity import checksums
from tensorshard.checkpoint.pieces import TensorPieces
from tensorshard.comm.sharding import to_local
from tensorshard.data_parallel.sharded_model import ShardedModel
from tensorshard.model.quantized import quantized_parameters
from tensorshard.plan.mesh import Mesh
from tensorshard.plan.plan import Plan
from tensorshard.plan.storage import TemporaryCopy
from tensorshard.weights.files.adapted_checkpoint import write_adapter_configs
from tensorshard.weights.files.checkpoint_files import OpenCheckpoint
from tensorshard.weights.files.export import write_configs

logger = logging.getLogger("tensorshard")

# Which kernel computes an update is a choice for this machine, not one of the checkpoint.
_KERNELS = ("fused", "foreach", "capturable")


@dataclass(frozen=True)
class Stored:
    """What a checkpoint says about itself.

    Args:
        source: its folder or URL.
        document: its ``engine.json``.
        metadata: of its tensors.
    """

    source: Path | str
    document: dict[str, Any]
    metadata: Metadata


class Part:
    """One part of a training state. What a part does not have, it leaves as it is here."""

    def entries(self) -> dict[str, Any]:
        """Its entries of ``engine.json``, as this rank knows them."""
        return {}

    def gather(self, entries: dict[str, Any]) -> dict[str, Any]:
        """`entries`, with what other ranks hold. A collective."""
        return entries

    def tensors(self) -> dict[str, Any]:
        """What this rank holds of its tensors, by names in the checkpoint."""
        return {}

    def write_files(self, folder: Path) -> None:
        """Writes further files to the checkpoint's `folder`. Called on rank 0."""

    def fit(self, checkpoint: OpenCheckpoint) -> OpenCheckpoint:
        """`checkpoint` of another program, with the names of this part. Called before :meth:`check`."""
        return checkpoint

    def check(self, stored: Stored) -> None:
        """Raises an error if the checkpoint is of something else. Nothing has been changed then."""

    def begin_load(self, stored: Stored) -> None:
        """Called on all ranks before :meth:`room`. A collective, which may refuse the checkpoint on all of them."""

    def room(self, stored: Stored, copy: TemporaryCopy) -> dict[str, Any]:
        """Tensors that this rank's part of the checkpoint is read into, by their names in it."""
        return {}

    def restore(self, stored: Stored) -> None:
        """Takes over what was read."""


class WeightsPart(Part):
    """The master weights and buffers of a model: ``model.NAME`` and ``buffers.NAME``.

    Args:
        group: all ranks.
        only: names of the parameters that are saved; None for all. Of the others ``engine.json`` has types, shapes and
            checksums.
    """

    def __init__(self, sharded: ShardedModel, group: dist.ProcessGroup, only: Collection[str] | None = None) -> None:
        self._sharded = sharded
        self._group = group
        self._only = only
        self._read: list[tuple[torch.Tensor, torch.Tensor]] = []

    def entries(self) -> dict[str, Any]:
        aliases = {name: first for name, first in self._sharded.aliases().items() if name != first}
        quantized = self._quantized()
        return {"aliases": aliases, **({"quantized": quantized} if quantized else {})}

    def _quantized(self) -> dict[str, str]:
        """What quantized weights, which are saved as bytes, are made of."""
        return {name: str(kind) for name, kind in quantized_parameters(self._sharded.structure).items()}

    def gather(self, entries: dict[str, Any]) -> dict[str, Any]:
        """`entries` with the reference to the base, which is not saved."""
        if self._only is None:
            return entries
        layouts = self._sharded.full_layouts()
        base = {name: layouts[name] for name in self._sharded.full_shapes() if name not in self._only}
        sums = checksums(self._sharded, {name: layout.dtype for name, layout in base.items()}, self._group)
        return {
            **entries,
            "base": {
                name: {"dtype": _short(layout.dtype), "shape": list(layout.shape), "checksum": sums[name]}
                for name, layout in base.items()
            },
        }

    def tensors(self) -> dict[str, Any]:
        masters = {name: master.detach() for name, master in self._sharded.masters().items()}
        if self._only is not None:
            masters = {name: master for name, master in masters.items() if name in self._only}
        return self._named(masters, self._sharded.owned_buffers())

    def _named(self, masters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        tensors = {f"model.{name}": in_pieces(self._sharded, name, master) for name, master in masters.items()}
        tensors.update({f"buffers.{name}": in_pieces(self._sharded, name, buffer) for name, buffer in buffers.items()})
        return tensors

    def write_files(self, folder: Path) -> None:
        write_configs(self._sharded.structure, folder)  # for exports of the checkpoint
        write_adapter_configs(self._sharded.structure, folder)

    def fit(self, checkpoint: OpenCheckpoint) -> OpenCheckpoint:
        return fit_weights(checkpoint, self._sharded)

    def check(self, stored: Stored) -> None:
        shapes = {f"model.{name}": shape for name, shape in self._sharded.full_shapes().items()}
        shapes.update({f"buffers.{name}": shape for name, shape in self._sharded.buffer_shapes().items()})
        there = {
            key: entry
            for key, entry in stored.metadata.state_dict_metadata.items()
            if key.startswith(("model.", "buffers.")) and isinstance(entry, TensorStorageMetadata)
        }
        base = {f"model.{name}": entry for name, entry in stored.document.get("base", {}).items()}
        missing = [key for key in shapes if key not in there and key not in base]
        unknown = [key for key in (*there, *base) if key not in shapes]
        reasons = []
        if missing:
            reasons.append(f"{len(missing)} tensors of the model are not in it, such as {missing[0]}")
        if unknown:
            reasons.append(f"it has {len(unknown)} that the model does not have, such as {unknown[0]}")
        if reasons:
            raise ValueError(f"{stored.source} is a checkpoint of another model: {'; '.join(reasons)}")
        then_quantized, quantized = stored.document.get("quantized", {}), self._quantized()
        for name in {**then_quantized, **quantized}:
            if then_quantized.get(name) != quantized.get(name):
                raise ValueError(
                    f"{stored.source} is a checkpoint of another model: the weight {name!r} is "
                    f"{then_quantized.get(name, 'not quantized')} in it and {quantized.get(name, 'not quantized')} in "
                    f"the model; quantize the model as it was, or take the values from the weights that it was made of"
                )
        for key, shape in shapes.items():
            then = tuple(there[key].size if key in there else base[key]["shape"])
            if then != tuple(shape):
                raise ValueError(
                    f"{stored.source} is a checkpoint of another model: {key} has shape {then} in it "
                    f"and {tuple(shape)} in the model"
                )

    def begin_load(self, stored: Stored) -> None:
        self._sharded.finish_gather()
        base = stored.document.get("base", {})
        here = checksums(self._sharded, {n: getattr(torch, entry["dtype"]) for n, entry in base.items()}, self._group)
        other = [name for name, entry in base.items() if here[name] != entry["checksum"]]
        if other:
            raise ValueError(
                f"{stored.source} has the trained parameters alone, and belongs to another base: {len(other)} of "
                f"{len(base)} parameters that it does not have are others here, such as {other[0]}; build the engine "
                f"from the weights that it was trained from"
            )
        self._warn_of_rounding(stored)

    def _warn_of_rounding(self, stored: Stored) -> None:
        entries = stored.metadata.state_dict_metadata
        rounded = [
            name
            for name, layout in self._sharded.full_layouts().items()
            if isinstance(entry := entries.get(f"model.{name}"), TensorStorageMetadata)
            and layout.is_floating_point()
            and torch.promote_types(entry.properties.dtype, layout.dtype) != layout.dtype
        ]
        if rounded and self._group.rank() == 0:
            logger.warning(
                "%s has %d parameters in more digits than this engine, in which they are frozen, such as %s: they are "
                "rounded",
                stored.source,
                len(rounded),
                rounded[0],
            )

    def room(self, stored: Stored, copy: TemporaryCopy) -> dict[str, Any]:
        base = stored.document.get("base", {})
        masters = {name: master.detach() for name, master in self._sharded.masters().items() if name not in base}
        buffers = self._sharded.persistent_buffers()
        new_masters = {name: copy.like(tensor) for name, tensor in masters.items()}
        new_buffers = {name: copy.like(tensor) for name, tensor in buffers.items()}
        self._read = [(tensor, new_masters[name]) for name, tensor in masters.items()]
        self._read += [(tensor, new_buffers[name]) for name, tensor in buffers.items()]
        return self._named(new_masters, new_buffers)

    @torch.no_grad()
    def restore(self, stored: Stored) -> None:
        read, self._read = self._read, []
        for tensor, value in read:
            to_local(tensor).copy_(to_local(value))
        self._sharded.all_gather_loaded()


class OptimizerPart(Part):
    """The states of an optimizer, ``optimizer.KEY.NAME``, and its options by the parameters' names.

    Args:
        kind: the name of the optimizer's class, or of several.
        wholes: the parameters that this rank updates whole, by name; None for those that another rank does.
    """

    def __init__(
        self,
        sharded: ShardedModel,
        optimizer: torch.optim.Optimizer,
        mesh: Mesh,
        *,
        kind: str,
        wholes: Mapping[str, torch.Tensor | None],
    ) -> None:
        self._sharded = sharded
        self._optimizer = optimizer
        self._mesh = mesh
        self._kind = kind
        self._wholes = wholes
        self._states: dict[str, dict[str, torch.Tensor]] = {}  # that are being read

    def _names(self) -> dict[torch.Tensor, str]:
        names: dict[torch.Tensor, str] = {master: name for name, master in self._sharded.masters().items()}
        names.update({whole: name for name, whole in self._wholes.items() if whole is not None})
        return names

    def entries(self) -> dict[str, Any]:
        names = self._names()
        groups = [
            {
                "names": [names[p] for p in group["params"] if p in names],
                "options": {k: v for k, v in group.items() if k not in ("params", "param_names") and _is_plain(v)},
            }
            for group in self._optimizer.param_groups
        ]
        scalars = {
            names[p]: {k: v for k, v in state.items() if not isinstance(v, torch.Tensor)}
            for p, state in self._optimizer.state.items()
        }
        scalars = {name: values for name, values in scalars.items() if values}
        return {"optimizer": {"class": self._kind, "groups": groups, "scalars": scalars}}

    def gather(self, entries: dict[str, Any]) -> dict[str, Any]:
        """`entries` with the options and states of the parameters that other stages or owners hold."""
        if self._mesh.degrees["pp"] == 1 and not self._wholes:
            return entries
        group = self._mesh.world_group if self._wholes else self._mesh.group("pp")
        stages: list[Any] = [None] * group.size()
        dist.all_gather_object(stages, entries["optimizer"], group=group)
        groups = [
            {
                "names": list(dict.fromkeys(name for stage in same_group for name in stage["names"])),
                "options": next((stage["options"] for stage in same_group if stage["names"]), same_group[0]["options"]),
            }
            for same_group in zip(*(stage["groups"] for stage in stages), strict=True)
        ]
        scalars = {name: values for stage in stages for name, values in stage["scalars"].items()}
        return {"optimizer": {**entries["optimizer"], "groups": groups, "scalars": scalars}}

    def tensors(self) -> dict[str, Any]:
        names = self._names()
        tensors = {}
        for parameter, state in self._optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"optimizer.{key}.{names[parameter]}"] = self._named(names[parameter], value)
        return tensors

    def _named(self, name: str, state: torch.Tensor) -> Any:
        is_sharded = name not in self._wholes and state.shape == self._sharded.masters()[name].shape  # as its master is
        return in_pieces(self._sharded, name, state) if is_sharded else state

    def fit(self, checkpoint: OpenCheckpoint) -> OpenCheckpoint:
        names = self._names()
        members = [[names.get(p, "") for p in group["params"]] for group in self._optimizer.param_groups]
        return fit_optimizer(checkpoint, self._sharded, members, whole=self._mesh.degrees["pp"] == 1)

    def check(self, stored: Stored) -> None:
        if "imported" in stored.document:
            self._check_imported(stored)
        then, now = stored.document["optimizer"].get("class"), self._kind
        if then is not None and then != now:
            raise ValueError(
                f"{stored.source} was written with the optimizer {then}, and this engine has {now}, whose options and "
                f"states are others: build it with parallelize(optimizer=functools.partial({then}, ...)), or load the "
                f"weights alone with engine.model.load_state_dict(...), from the full_state_dict() of an engine that "
                f"loaded it"
            )

    def _check_imported(self, stored: Stored) -> None:
        keys = {key.split(".")[1] for key in stored.metadata.state_dict_metadata if key.startswith("optimizer.")}
        group = self._optimizer.param_groups[0]
        reason = why_other_optimizer(keys, stored.document["optimizer"], self._kind, group)
        if reason is not None:
            raise ValueError(
                f"{stored.source} {reason}, whose updates are others: build the engine with that optimizer, or begin "
                f"from the weights alone, by ts.from_pretrained"
            )
        if not keys and self._mesh.rank == 0:
            logger.warning("%s has no states of an optimizer: they begin anew", stored.source)

    def room(self, stored: Stored, copy: TemporaryCopy) -> dict[str, Any]:
        masters = self._sharded.masters()
        self._states = {}
        tensors = {}
        for full_key, entry in stored.metadata.state_dict_metadata.items():
            if not full_key.startswith("optimizer.") or not isinstance(entry, TensorStorageMetadata):
                continue
            key, name = full_key.removeprefix("optimizer.").split(".", 1)
            if name not in masters:  # it is on another pipeline rank
                continue
            if name in self._wholes and self._wholes[name] is None:  # its owner is another rank
                continue
            master, dtype = masters[name], entry.properties.dtype
            if entry.size == self._sharded.full_shape(name) and master.dim() > 0 and name not in self._wholes:
                state = copy.like(master.detach(), dtype)
            else:
                state = torch.empty(entry.size, dtype=dtype)
            self._states.setdefault(name, {})[key] = state
            tensors[full_key] = self._named(name, state)
        return tensors

    def restore(self, stored: Stored) -> None:
        states, self._states = self._states, {}
        entries, names = stored.document["optimizer"], self._names()
        current = self._optimizer.state_dict()
        state: dict[int, dict[str, Any]] = {}
        groups = []
        for place, (group, described) in enumerate(
            zip(self._optimizer.param_groups, current["param_groups"], strict=True)
        ):
            members = [names.get(p, "") for p in group["params"]]
            options = _options(entries["groups"], members, place)
            if "imported" in stored.document:  # other programs have options of their own
                options = {key: value for key, value in options.items() if key in described}
            groups.append({**described, **{k: v for k, v in options.items() if k not in _KERNELS}})
            for index, name in zip(described["params"], members, strict=True):
                values: dict[str, Any] = {**states.get(name, {}), **entries["scalars"].get(name, {})}
                if values:
                    state[index] = values
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})


class Average(Protocol):
    """An average of the master weights, laid out as they are."""

    updates: int
    waited: int
    fewest: int  # what `updates` begins at
    tensors: dict[str, torch.Tensor]


class AveragesPart(Part):
    """Averages of the master weights by their names: ``average.AVERAGE.NAME``, and how many weights each is of."""

    def __init__(self, sharded: ShardedModel, averages: Mapping[str, Average]) -> None:
        self._sharded = sharded
        self._averages = averages
        self._read: dict[str, dict[str, torch.Tensor]] = {}

    def entries(self) -> dict[str, Any]:
        numbers = {name: {"updates": a.updates, "waited": a.waited} for name, a in self._averages.items()}
        return {"averages": numbers}

    def tensors(self) -> dict[str, Any]:
        return self._named({name: average.tensors for name, average in self._averages.items()})

    def _named(self, averages: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, Any]:
        return {
            f"average.{average}.{name}": in_pieces(self._sharded, name, tensor.detach())
            for average, tensors in averages.items()
            for name, tensor in tensors.items()
        }

    def check(self, stored: Stored) -> None:
        there = stored.document.get("averages", {})
        for name in self._averages:
            if name not in there:
                raise ValueError(
                    f"{stored.source} has no average {name!r}, which was made of this engine's weights; it has "
                    f"{', '.join(there) or 'none'}. Call engine.average after engine.load"
                )
        unknown = [name for name in there if name not in self._averages]
        if unknown:
            logger.warning(
                "%s has the averages %s, which are not loaded: call engine.average(name=...) before engine.load",
                stored.source,
                ", ".join(unknown),
            )

    def room(self, stored: Stored, copy: TemporaryCopy) -> dict[str, Any]:
        masters = self._sharded.masters()
        self._read = {
            average: {
                name: copy.like(master.detach())
                for name, master in masters.items()
                if f"average.{average}.{name}" in stored.metadata.state_dict_metadata
            }
            for average in self._averages
        }
        return self._named(self._read)

    def restore(self, stored: Stored) -> None:
        read, self._read = self._read, {}
        for name, tensors in read.items():
            average, entry = self._averages[name], stored.document["averages"][name]
            average.tensors.clear()
            average.tensors.update({each: tensor.clone() for each, tensor in tensors.items()})
            average.updates, average.waited = max(entry["updates"], average.fewest), entry["waited"]


class NumbersPart(Part):
    """States that are numbers or made of numbers, each under one name in ``engine.json``.

    Args:
        states: what keeps them, by these names; None for what a plan does not have.
    """

    def __init__(self, **states: Stateful | None) -> None:
        self._states = states

    def entries(self) -> dict[str, Any]:
        return {name: None if state is None else state.state_dict() for name, state in self._states.items()}

    def restore(self, stored: Stored) -> None:
        for name, state in self._states.items():
            entry = stored.document.get(name)
            if state is not None and entry is not None:
                state.load_state_dict(entry)


class LayoutPart(Part):
    """The plan under which a checkpoint was written, for people."""

    def __init__(self, plan: Plan, mesh: Mesh) -> None:
        self._plan, self._mesh = plan, mesh

    def entries(self) -> dict[str, Any]:
        return {"plan": self._plan.to_dict(), "world_size": self._mesh.world_size}


def in_pieces(sharded: ShardedModel, name: str, tensor: torch.Tensor) -> Any:
    """`tensor`, sharded as the master weight or buffer `name`, with the places of its pieces in the full tensor."""
    cuts = sharded.split.cuts(name)
    return TensorPieces.of(tensor, sharded.split.full_shape(name, tensor.shape), cuts) if cuts else tensor


def _options(groups: list[dict[str, Any]], members: list[str], place: int) -> dict[str, Any]:
    """Options of the stored group that has `members`; if `members` is empty, of the group at the same position."""
    for group in groups:
        if set(members) & set(group["names"]):
            return group["options"]
    return {} if any(members) or place >= len(groups) else groups[place]["options"]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | list | tuple)
