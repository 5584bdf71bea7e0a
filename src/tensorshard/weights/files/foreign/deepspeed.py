"""DeepSpeed's checkpoints: ZeRO 0 to 3, and universal ones.

A folder has a file of the model's states and one of the optimizer's states for each data rank. At ZeRO 1 and 2, the
parameters of a group lie behind one another in one vector, of which each rank has an equal part; at ZeRO 3 each rank
has an equal part of every parameter. Layouts as in DeepSpeed's ``zero_to_fp32.py`` and ``ds_to_universal.py``.
"""

import math
import re
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from tensorshard.weights.files.foreign.pieces import Contents, ForeignTensor, load_safely, without_module
from tensorshard.weights.files.manifest import DamagedCheckpointError

_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OWN = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
    "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version",
    "checkpoint_parallel_dimensions", "universal_checkpoint_info",
}  # fmt: skip
"""What DeepSpeed puts into the file of a model's states; everything else there is the user's."""


def folder_of(path: Path) -> Path | None:
    """The folder of DeepSpeed's checkpoint at `path`, which may be the one above it; None if there is none."""
    if path.is_file():
        return None
    if any(_MODEL_FILE.fullmatch(file.name) for file in path.iterdir()) or _is_universal(path):
        return path
    for latest in ("latest", "latest_universal"):
        if (path / latest).is_file():
            tag = path / (path / latest).read_text(encoding="utf-8").strip()
            if tag.is_dir():
                return folder_of(tag)
            raise DamagedCheckpointError(f"{path / latest} names {tag.name}, and there is no such folder in {path}")
    steps = [entry for entry in path.glob("global_step*") if entry.is_dir()]
    return folder_of(steps[0]) if len(steps) == 1 else None


def _is_universal(path: Path) -> bool:
    return (path / "zero").is_dir() and any((path / "zero").glob("*/fp32.pt"))


def read(folder: Path) -> Contents:
    """What DeepSpeed's checkpoint in `folder` holds.

    Raises:
        DamagedCheckpointError: a rank's file is missing or cut off.
        ValueError: a kind that is not read.
    """
    names = sorted(file.name for file in folder.iterdir())
    models = {int(m[1] or 0): folder / m[0] for name in names if (m := _MODEL_FILE.fullmatch(name)) and m[2] == "00"}
    optimizers = {int(m[1]): folder / m[0] for name in names if (m := _OPTIMIZER_FILE.fullmatch(name)) and m[2] == "00"}
    _refuse(folder, names)
    if _is_universal(folder):
        return _read_universal(folder, models)
    if not models:
        raise DamagedCheckpointError(f"{folder} has no file mp_rank_00_model_states.pt of DeepSpeed's rank 0")
    model = load_safely(models[min(models)])
    if optimizers:
        states = [load_safely(optimizers[rank]) for rank in sorted(optimizers)]
        states = [state.get("optimizer_state_dict", state) for state in states]
        count = states[0]["partition_count"]
        _check_ranks(folder, optimizers, max(count) if isinstance(count, list) else int(count), "optim_states.pt")
        stage = int(states[0]["zero_stage"])
    else:
        states, stage = [], 3 if "zero_pp_rank" in models[min(models)].name else 0
        if stage or (model.get("param_shapes") and model.get("optimizer") is None):
            raise DamagedCheckpointError(
                f"{folder} has no file zero_pp_rank_0_mp_rank_00_optim_states.pt: the optimizer's files of all ranks "
                f"are missing, and they have the fp32 weights; copy them from every node, or to import the weights "
                f"alone give the files that save_16bit_model or zero_to_fp32.py wrote"
            )
    contents = Contents(f"DeepSpeed {model.get('ds_version', '')}, ZeRO {stage} on {model.get('dp_world_size')} ranks")
    module = model["module"]
    prefix = without_module(module)
    if stage == 3:
        _check_ranks(folder, models, len(states), "model_states.pt")
        files = [model, *(load_safely(models[rank]) for rank in sorted(models)[1:])]
        _add_weights(contents, {n: module[n] for n in model["buffer_names"] if n in module}, prefix)
        for name, shape in (model.get("frozen_param_shapes") or {}).items():
            runs = [file["frozen_param_fragments"][name].reshape(-1) for file in files]
            contents.weights[name.removeprefix(prefix)] = ForeignTensor.of_flat(shape, runs)
        _read_stage_3(contents, model, states, prefix)
    else:
        _add_weights(contents, module, prefix)
        if stage:
            _read_stage_1_or_2(contents, model, states, prefix)
        elif model.get("optimizer"):
            _read_whole_optimizer(contents, model, folder)
    for again, first in dict(model.get("shared_params") or {}).items():
        if again.removeprefix(prefix) not in contents.weights and first.removeprefix(prefix) in contents.weights:
            contents.weights[again.removeprefix(prefix)] = contents.weights[first.removeprefix(prefix)]
    _add_the_rest(contents, model, states[0] if states else model.get("optimizer") or {})
    return contents


def _refuse(folder: Path, names: list[str]) -> None:
    split = [name for name in names if re.search(r"mp_rank_(?!00)\d+_", name)]
    if split and not _is_universal(folder):
        raise ValueError(
            f"{folder} was written under tensor or pipeline parallelism, as {split[0]} shows, and how its tensors are "
            f"cut is not in it: convert it with DeepSpeed's ds_to_universal.py, and import what that writes"
        )
    layers = [name for name in names if re.match(r"layer_\d+", name)]
    if layers and not _is_universal(folder):
        raise ValueError(
            f"{folder} has files of single layers or experts, such as {layers[0]}, as DeepSpeed's pipelines and MoE "
            f"layers write them: convert it with DeepSpeed's ds_to_universal.py, and import what that writes"
        )


def _check_ranks(folder: Path, files: Mapping[int, Path], count: int, kind: str) -> None:
    missing = [rank for rank in range(count) if rank not in files]
    if missing:
        raise DamagedCheckpointError(
            f"{folder} was written by {count} ranks, and the file of rank {missing[0]} is missing "
            f"(zero_pp_rank_{missing[0]}_mp_rank_00_{kind}); copy the files of every node into one folder"
        )


def _add_weights(contents: Contents, tensors: Mapping[str, Any], prefix: str) -> None:
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):
            contents.weights[name.removeprefix(prefix)] = ForeignTensor.of(tensor)


def _read_stage_1_or_2(contents: Contents, model: Any, states: list[Any], prefix: str) -> None:
    if "param_slice_mappings" not in states[0]:
        raise ValueError(
            f"the files are of DeepSpeed {states[0].get('ds_version', 'in an unknown version')}, which did not say "
            f"where each parameter lies: load and save the run once with DeepSpeed 0.8 or later, and import that"
        )
    base = [state["base_optimizer_state"] for state in states]
    if not isinstance(base[0], Mapping):
        raise ValueError(
            "the optimizer's states were written with elastic_checkpoint, which is not read: save the run once with "
            "zero_optimization.elastic_checkpoint false"
        )
    for index, shapes in enumerate(model["param_shapes"]):
        places = [state["param_slice_mappings"][index] for state in states]
        for name, shape in shapes.items():
            contents.weights[name.removeprefix(prefix)] = ForeignTensor.of_flat(
                shape,
                _runs([state["single_partition_of_fp32_groups"][index] for state in states], places, name),
            )
        _add_states(
            contents,
            [entry["state"].get(index, {}) for entry in base],
            {name.removeprefix(prefix): shape for name, shape in shapes.items()},
            lambda flat, name, places=places: _runs(flat, places, prefix + name),  # type: ignore[misc]
        )
        contents.groups.append(
            ([name.removeprefix(prefix) for name in shapes], _options(base[0]["param_groups"], index))
        )


def _runs(flat: list[torch.Tensor], places: list[Mapping[str, Any]], name: str) -> list[torch.Tensor]:
    """What each rank's part `flat` of a group has of the parameter `name`."""
    runs = []
    for part, of_rank in zip(flat, places, strict=True):
        if name in of_rank:
            place = of_rank[name]
            runs.append(part[place.start : place.start + place.numel])
    return runs


def _add_states(contents: Contents, of_ranks: list[Any], shapes: Mapping[str, Any], cut: Any) -> None:
    """Adds the optimizer's states of the parameters with `shapes`, which `cut` finds in the vectors of all ranks."""
    for key, value in of_ranks[0].items():
        whole = not isinstance(value, torch.Tensor) or value.dim() == 0
        for name, shape in shapes.items():
            if whole:
                tensor = ForeignTensor.of(torch.as_tensor(value, dtype=torch.float32).reshape(()))
            else:
                tensor = ForeignTensor.of_flat(shape, cut([states[key] for states in of_ranks], name))
            contents.states.setdefault(key, {})[name] = tensor


def _options(groups: Any, index: int) -> dict[str, Any]:
    group = groups[index] if index < len(groups) else groups[-1]
    return {key: value for key, value in group.items() if key not in ("params", "param_names", "step")}


def _read_stage_3(contents: Contents, model: Any, states: list[Any], prefix: str) -> None:
    shapes = {name.removeprefix(prefix): shape for group in model["param_shapes"] for name, shape in group.items()}
    each = {name: -(-math.prod(shape) // len(states)) for name, shape in shapes.items()}  # elements of a rank
    starts = dict(zip(each, accumulate(each.values(), initial=0), strict=False))
    base = [state["optimizer_state_dict"] for state in states]

    def cut(vectors: list[list[torch.Tensor]], name: str) -> list[torch.Tensor]:
        runs = []
        for of_rank in vectors:
            first = 0
            for vector in of_rank:  # one for each sub-group; a parameter may lie across two
                low, high = max(starts[name], first), min(starts[name] + each[name], first + vector.numel())
                if low < high:
                    runs.append(vector[low - first : high - first])
                first += vector.numel()
        return runs

    vectors = [_vectors(state["fp32_flat_groups"]) for state in states]
    for name, shape in shapes.items():
        contents.weights[name] = ForeignTensor.of_flat(shape, cut(vectors, name))
    first = base[0]["state"]
    if first:
        gathered = [
            {
                key: [entry["state"][index][key] for index in sorted(entry["state"])]
                if isinstance(value, torch.Tensor) and value.dim()
                else value
                for key, value in first[min(first)].items()
            }
            for entry in base
        ]
        for key, value in gathered[0].items():
            for name, shape in shapes.items():
                if isinstance(value, list):
                    tensor = ForeignTensor.of_flat(shape, cut([of_rank[key] for of_rank in gathered], name))
                else:
                    tensor = ForeignTensor.of(torch.as_tensor(value, dtype=torch.float32).reshape(()))
                contents.states.setdefault(key, {})[name] = tensor
    groups = [[name.removeprefix(prefix) for name in group] for group in model["param_shapes"]]
    contents.groups += _with_options(groups, base[0]["param_groups"])


def _with_options(groups: list[list[str]], stored: list[Any]) -> list[tuple[list[str], dict[str, Any]]]:
    """The options of `groups` of parameters. If the files have more of these than groups of options, as ZeRO 3 cuts
    groups into sub-groups and doesn't say of which, only options that are the same for all are known."""
    if len(groups) == len(stored):
        return [(names, _options(stored, index)) for index, names in enumerate(groups)]
    each = [_options(stored, index) for index in range(len(stored))]
    same = {k: v for k, v in each[0].items() if all(other.get(k) == v for other in each)} if each else {}
    return [(names, same) for names in groups]


def _vectors(groups: Any) -> list[torch.Tensor]:
    return [groups] if isinstance(groups, torch.Tensor) else list(groups)


def _read_whole_optimizer(contents: Contents, model: Any, folder: Path) -> None:
    """Of ZeRO 0, where the optimizer's state dict is in the file of the model's states."""
    from tensorshard.weights.files.foreign.torch_files import add_optimizer

    optimizer = model["optimizer"]
    if "state" not in optimizer and "optimizer_state_dict" in optimizer:  # of fp16, beside its scaler
        masters = optimizer.get("fp32_groups_flat")
        if masters is not None:
            raise ValueError(
                f"{folder} has fp16 weights whose fp32 copies lie in fused groups without names, as DeepSpeed writes "
                f"them at ZeRO 0: save the run once with zero_optimization.stage 1, and import that"
            )
        optimizer = optimizer["optimizer_state_dict"]
    if "state" in optimizer:
        add_optimizer(contents, optimizer)


def _read_universal(folder: Path, models: Mapping[int, Path]) -> Contents:
    contents = Contents("DeepSpeed, a universal checkpoint")
    model: Any = load_safely(models[min(models)]) if models else {}
    module = model.get("module") or {}
    prefix = without_module(module)
    shapes = {n.removeprefix(prefix): shape for group in model.get("param_shapes") or [] for n, shape in group.items()}
    for place in sorted(entry for entry in (folder / "zero").iterdir() if entry.is_dir()):
        for file in sorted(place.glob("*.pt")):
            value = load_safely(file)
            tensor = value.get("param") if isinstance(value, Mapping) else value
            if not isinstance(tensor, torch.Tensor | int | float):
                raise DamagedCheckpointError(f"{file} has no tensor, where one of DeepSpeed's universal files has one")
            one = torch.as_tensor(tensor)
            one = one.reshape(()).float() if file.stem == "step" else one
            of_one = ForeignTensor.of(one)
            if one.dim() == 1:  # of ZeRO 3
                of_one = ForeignTensor.of_flat(shapes.get(place.name, one.shape), [one])
            of_key = contents.weights if file.stem == "fp32" else contents.states.setdefault(file.stem, {})
            of_key[place.name] = of_one
    for key, of_key in contents.states.items():
        trained = {name for names in contents.states.values() for name in names}  # others are frozen, or buffers
        lost = sorted(trained - set(of_key))
        if lost:
            raise DamagedCheckpointError(f"{folder}/zero/{lost[0]} has no file {key}.pt, which other parameters have")
    buffers = set(model.get("buffer_names") or ())
    _add_weights(contents, {n: t for n, t in module.items() if n in buffers}, prefix)
    state: Any = {}
    if (folder / "zero" / "optimizer_state.pt").is_file():
        state = load_safely(folder / "zero" / "optimizer_state.pt")
        if "zero_stage" not in state:  # that of ZeRO 1 and 2 is one level deeper than that of ZeRO 3
            state = state.get("optimizer_state_dict", state)
        base = state.get("base_optimizer_state") or state.get("optimizer_state_dict") or {}
        groups = [[n.removeprefix(prefix) for n in group] for group in model.get("param_shapes") or [contents.weights]]
        contents.groups += _with_options(groups, base.get("param_groups", [])) if base.get("param_groups") else []
    for again, first in dict(model.get("shared_params") or {}).items():
        contents.weights.setdefault(again, contents.weights[first])
    _add_the_rest(contents, model, state)
    return contents


def _add_the_rest(contents: Contents, model: Any, state: Any) -> None:
    contents.step = model.get("global_steps")
    base = state.get("base_optimizer_state") or state.get("optimizer_state_dict") or state
    if contents.states and "step" not in contents.states:  # some of its optimizers count for a whole group
        of_groups = list(base.get("state", {}).values())
        counted = of_groups[0].get("step") if of_groups else None
        counted = base.get("param_groups", [{}])[0].get("step") if counted is None else counted
        taken = int(model.get("global_steps", 0) - model.get("skipped_steps", 0) if counted is None else counted)
        names = dict.fromkeys(name for of_key in contents.states.values() for name in of_key)
        contents.states["step"] = {name: ForeignTensor.of(torch.tensor(float(taken))) for name in names}
    scaler = state.get("loss_scaler") if isinstance(state, Mapping) else None
    if scaler is not None and state.get("dynamic_loss_scale"):
        contents.scaler = {"scale": float(scaler.cur_scale), "steps_since_overflow": _steps_since_overflow(scaler)}
    if model.get("lr_scheduler"):
        contents.extra["lr_scheduler"] = model["lr_scheduler"]
    contents.extra["client_state"] = {key: value for key, value in model.items() if key not in _OWN}
    contents.extra["skipped_steps"] = model.get("skipped_steps", 0)


def _steps_since_overflow(scaler: Any) -> int:
    return max(0, int(getattr(scaler, "cur_iter", 0)) - int(getattr(scaler, "last_overflow_iter", -1)) - 1)
