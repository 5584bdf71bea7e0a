"""The optimizer's part of a checkpoint: its options by the parameters' names, and its states."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from tensorshard.plan.storage import TemporaryCopy

if TYPE_CHECKING:
    from tensorshard.checkpoint.checkpoint import TrainingState


def check_optimizer(engine: "TrainingState", stored: dict[str, Any], source: Path) -> None:
    """Refuses what another optimizer has `stored` in the checkpoint `source`.

    Raises:
        ValueError: its class is not that of the engine's.
    """
    then, now = stored.get("class"), type(engine.optimizer).__name__
    if then is not None and then != now:
        raise ValueError(
            f"{source} was written with the optimizer {then}, and this engine has {now}, whose options and states are "
            f"others: build it with parallelize(optimizer=functools.partial({then}, ...)), or load the weights alone "
            f"with engine.model.load_state_dict(...), from the full_state_dict() of an engine that loaded it"
        )


def empty_optimizer_states(
    engine: "TrainingState", metadata: Metadata, copy: TemporaryCopy
) -> dict[str, dict[str, torch.Tensor]]:
    """Room for the stored states of each parameter: laid out as the parameter if they have its shape.

    Args:
        copy: makes the empty tensors.
    """
    masters = engine.sharded.masters()
    states: dict[str, dict[str, torch.Tensor]] = {}
    for full_key, entry in metadata.state_dict_metadata.items():
        if not full_key.startswith("optimizer.") or not isinstance(entry, TensorStorageMetadata):
            continue
        key, name = full_key.removeprefix("optimizer.").split(".", 1)
        if name not in masters:  # it is on another pipeline rank
            continue
        master = masters[name]
        dtype = entry.properties.dtype
        if entry.size == engine.sharded.full_shape(name) and master.dim() > 0:
            room = copy.like(master.detach(), dtype)
        else:
            room = torch.zeros(entry.size, dtype=dtype)
        states.setdefault(name, {})[key] = room
    return states


def restore_optimizer(
    engine: "TrainingState", states: dict[str, dict[str, torch.Tensor]], document: dict[str, Any]
) -> None:
    """Gives the engine's optimizer the `states` that were read, and the options in `document`."""
    stored = document["optimizer"]
    names: dict[torch.Tensor, str] = {p: name for name, p in engine.sharded.masters().items()}
    current = engine.optimizer.state_dict()
    state: dict[int, dict[str, Any]] = {}
    groups = []
    for place, (group, described) in enumerate(
        zip(engine.optimizer.param_groups, current["param_groups"], strict=True)
    ):
        members = [names.get(p, "") for p in group["params"]]
        # The choice of a kernel belongs to this machine, not to the checkpoint.
        restored = {
            k: v
            for k, v in _options(stored["groups"], members, place).items()
            if k not in ("fused", "foreach", "capturable")
        }
        groups.append({**described, **restored})
        for index, name in zip(described["params"], members, strict=True):
            values: dict[str, Any] = {**states.get(name, {}), **stored["scalars"].get(name, {})}
            if values:
                state[index] = values
    engine.optimizer.load_state_dict({"state": state, "param_groups": groups})


def _options(groups: list[dict[str, Any]], members: list[str], place: int) -> dict[str, Any]:
    """Options of the stored group that has `members`; if `members` is empty, of the group at the same position."""
    for group in groups:
        if set(members) & set(group["names"]):
            return group["options"]
    return {} if any(members) or place >= len(groups) else groups[place]["options"]
