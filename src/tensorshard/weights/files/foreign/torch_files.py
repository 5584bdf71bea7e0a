"""Folders with a file of weights and one of the optimizer, of the Trainer and Accelerate; and full state dicts."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tensorshard.weights.files.foreign.pieces import Contents, ForeignTensor, Piece, load_safely, without_module
from tensorshard.weights.files.weight_files import open_weight_files

OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
_SCHEDULERS = ("scheduler.pt", "scheduler.bin")
_MODELS = ("model", "module", "state_dict", "model_state_dict")
_OPTIMIZER_KEYS = ("optimizer", "optim", "optimizer_state_dict", "optim_state_dict", "optimizer_state", "optimizers")
_STEPS = ("step", "steps", "global_step", "global_steps", "iteration")


def read_folder(folder: Path, source: str) -> Contents:
    """What a folder of weights, ``optimizer.pt`` and the like holds."""
    contents = Contents(source)
    full = folder / "pytorch_model_fsdp.bin"  # of Accelerate, where FSDP's state dicts are full
    for file in open_weight_files(full if full.is_file() else folder):
        for name in file:
            shape = tuple(file.layout(name).shape)
            contents.weights[name] = _mapped(file, name, shape, file.layout(name).dtype)
    for name in OPTIMIZERS:
        if (folder / name).is_file():
            add_optimizer(contents, load_safely(folder / name))
    add_side_files(contents, folder)
    return contents


def _mapped(file: Any, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> ForeignTensor:
    return ForeignTensor(shape, dtype, [Piece((0,) * len(shape), shape, lambda: file[name])])


def add_side_files(contents: Contents, folder: Path) -> None:
    """What the Trainer and Accelerate write beside weights and optimizer: scheduler, scaler, step."""
    for name in _SCHEDULERS:
        if (folder / name).is_file():
            contents.extra["lr_scheduler"] = load_safely(folder / name)
    if (folder / "trainer_state.json").is_file():
        state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
        contents.step = state.get("global_step")
        contents.extra["trainer_state"] = {k: v for k, v in state.items() if k in ("epoch", "global_step", "max_steps")}
    if (folder / "scaler.pt").is_file():
        scaler = load_safely(folder / "scaler.pt")
        if scaler:
            contents.scaler = {"scale": float(scaler["scale"]), "steps_since_overflow": int(scaler["_growth_tracker"])}


def read_state_dicts(path: Path) -> Contents:
    """What one file of ``torch.save`` holds: full state dicts of a model and its optimizer, under their usual keys."""
    loaded = load_safely(path)
    contents = Contents(f"full state dicts in {path.name}")
    keys = list(loaded) if isinstance(loaded, Mapping) else []
    model = next((loaded[key] for key in _MODELS if key in keys and isinstance(loaded[key], Mapping)), None)
    if model is None:
        raise ValueError(
            f"{path} holds {', '.join(map(str, keys[:6])) or type(loaded).__name__}, where a model's state dict was "
            f"expected under one of {', '.join(_MODELS)}"
        )
    prefix = without_module(model)
    for name, value in model.items():
        if isinstance(value, torch.Tensor):
            contents.weights[name.removeprefix(prefix)] = ForeignTensor.of(value)
    for key in _OPTIMIZER_KEYS:
        if isinstance(loaded.get(key), Mapping):
            add_optimizer(contents, loaded[key], prefix)
            break
    add_rest(contents, {key: value for key, value in loaded.items() if key not in (*_MODELS, *_OPTIMIZER_KEYS)})
    return contents


def add_rest(contents: Contents, rest: Mapping[str, Any]) -> None:
    """What a script puts beside its state dicts: the step, the scheduler, and things of its own."""
    for key, value in rest.items():
        if key in _STEPS and contents.step is None:
            contents.step = int(value)
        elif key in ("lr_scheduler", "scheduler", "lr_schedulers"):
            contents.extra["lr_scheduler"] = value
        else:
            contents.extra[key] = value
            if isinstance(value, Mapping):
                add_rest(contents, {k: v for k, v in value.items() if k in _STEPS})


def add_optimizer(contents: Contents, state_dict: Mapping[str, Any], prefix: str = "") -> None:
    """Adds an optimizer's state dict, whose parameters are numbers, or names as FSDP gives them."""
    if not {"state", "param_groups"} <= set(state_dict):
        if all(isinstance(key, str) and key.startswith(("state.", "param_groups.")) for key in state_dict):
            add_flat_optimizer(contents, state_dict, prefix)
            return
        raise ValueError(
            f"an optimizer's state dict was expected, with 'state' and 'param_groups'; this one has "
            f"{', '.join(map(str, list(state_dict)[:6]))}"
        )
    numbers: dict[Any, str] = {}
    for group in state_dict["param_groups"]:
        members = group.get("params", [])
        given = group.get("param_names")  # of torch, where the optimizer was given named parameters
        for index, member in enumerate(members):
            name = given[index] if given else member if isinstance(member, str) else f"#{len(numbers)}"
            numbers[member] = name.removeprefix(prefix)
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        contents.groups.append(([numbers[member] for member in members], options))
    for member, states in state_dict["state"].items():
        name = numbers.get(member, str(member).removeprefix(prefix))
        for key, value in states.items():
            if isinstance(value, torch.Tensor | int | float):
                tensor = value if isinstance(value, torch.Tensor) else torch.tensor(float(value))
                contents.states.setdefault(key, {})[name] = ForeignTensor.of(tensor)


def add_flat_optimizer(contents: Contents, flat: Mapping[str, Any], prefix: str = "") -> None:
    """Adds an optimizer's state dict whose keys are ``state.NAME.exp_avg`` and ``param_groups.NAME.lr``. Values may be
    :class:`ForeignTensor` s."""
    options: dict[str, dict[str, Any]] = {}
    members: dict[str, list[str]] = {}  # of groups that have numbers
    for path, value in flat.items():
        part, _, rest = path.partition(".")
        name, _, key = rest.rpartition(".")
        number, _, within = rest.partition(".")
        if part == "param_groups" and number.isdigit() and within.partition(".")[0] == "params":
            names = value if isinstance(value, list) else [value]
            members.setdefault(number, []).extend(str(each).removeprefix(prefix) for each in names)
        elif part == "param_groups":
            options.setdefault(name.removeprefix(prefix), {})[key] = value
        elif isinstance(value, ForeignTensor):
            contents.states.setdefault(key, {})[name.removeprefix(prefix)] = value
        elif isinstance(value, torch.Tensor | int | float):
            one = torch.as_tensor(value, dtype=torch.float32)
            contents.states.setdefault(key, {})[name.removeprefix(prefix)] = ForeignTensor.of(one)
    contents.groups += [(members.get(name, [name]), of_one) for name, of_one in options.items()]
