"""Writes a training state as a folder of ``torch.distributed.checkpoint``, for other programs.

The keys are torchtitan's, which are those of ``torch.distributed.checkpoint.state_dict.get_state_dict``: weights and
buffers by their names at the top, ``optimizer.state.NAME.exp_avg``, and the options of each parameter
(``optimizer.param_groups.NAME.lr``) and of each group (``optimizer.param_groups.0.lr``), so that optimizers find theirs
whether their state dicts are flattened or not.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tensorshard.checkpoint.parts import OptimizerPart, WeightsPart
from tensorshard.checkpoint.pieces import PiecesSavePlanner
from tensorshard.comm.decisions import decide_once, meet
from tensorshard.common.folders import WholeFolder
from tensorshard.common.words import kind_of
from tensorshard.torch_private.dispatch import without_torch_functions_of_tensors

KIND = "a folder of torch.distributed.checkpoint"
_FILES = (".metadata", "*.distcp")
_KEYS = ("optimizer", "step", "extra")


def check_arguments(format: Any, place: Path | str, extra: Any, **options: bool) -> None:
    """Refuses arguments of ``engine.save`` that do not go with ``format="dcp"``.

    Raises:
        TypeError, ValueError: there is such a one.
    """
    if format != "dcp":
        raise ValueError(
            f"engine.save was given format={format!r}; it must be 'tensorshard', for a checkpoint that engine.load "
            f"reads under any plan, or 'dcp', for a folder of torch.distributed.checkpoint"
        )
    given = next((f"{name}=True" for name, value in options.items() if value), None)
    if given is not None:
        raise ValueError(
            f"engine.save was given format='dcp' and {given}, which goes with tensorshard's own format alone: leave "
            f"out one of the two"
        )
    if isinstance(place, str):
        raise ValueError(
            f"engine.save was given format='dcp' and the URL {place!r}: such folders are written to a file system that "
            f"all ranks see; give a path, and copy the folder"
        )
    if extra is not None and not isinstance(extra, dict):
        raise TypeError(f"extra is {kind_of(extra)}; it must be a dict of numbers, strings, lists and dicts")


def state_of(weights: WeightsPart, optimizer: OptimizerPart, aliases: Mapping[str, str]) -> dict[str, Any]:
    """What :func:`write_dcp` writes of a model and its optimizer: what this rank holds of each tensor. A collective.

    Args:
        aliases: for every name of a parameter, the first one. Tied weights are written by each name, as torch does.
    """
    named = {key.partition(".")[2]: tensor for key, tensor in weights.tensors().items()}
    named |= {name: named[first] for name, first in aliases.items() if first in named}
    if taken := named.keys() & _KEYS:
        raise ValueError(
            f"engine.save(format='dcp') puts weights at the top of the folder's keys, beside {', '.join(_KEYS)}; the "
            f"model has one called {min(taken)!r}: give it another name, or take tensorshard's own format"
        )
    entries = optimizer.gather(optimizer.entries())["optimizer"]
    states: dict[str, dict[str, Any]] = {name: dict(values) for name, values in entries["scalars"].items()}
    for key, tensor in optimizer.tensors().items():
        _, state, name = key.split(".", 2)
        states.setdefault(name, {})[state] = tensor
    return {**named, "optimizer": {"state": states, "param_groups": _options(entries["groups"])}}


def _options(groups: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The options of each parameter by its name, and those of each group by its number."""
    by_name: dict[str, dict[str, Any]] = {}
    by_number: dict[str, dict[str, Any]] = {}
    for number, group in enumerate(groups):
        options = dict(group["options"])
        if "lr" in options:
            options.setdefault("initial_lr", options["lr"])  # programs that have a scheduler look for it
        by_name |= dict.fromkeys(group["names"], options)
        by_number[str(number)] = {**options, "params": list(group["names"])}
    return {**by_name, **by_number}


def write_dcp(
    target: Path, state: dict[str, Any], group: dist.ProcessGroup, device: torch.device, *, overwrite: bool
) -> None:
    """Writes `state` to the folder `target`, which is whole or absent. A collective of `group`.

    Args:
        device: on which this rank's messages are sent.
        overwrite: whether an older folder of this kind is replaced, once this one is complete.

    Raises:
        FileExistsError: `target` is there, and must not be replaced.
        RuntimeError: a rank could not write. `target` is as it was.
    """
    meet("engine.save", group, device)
    folder: WholeFolder | None = None

    def begin() -> str:
        nonlocal folder
        folder = WholeFolder(target, _FILES, needed=1, kind=KIND, overwrite=overwrite)
        return str(folder.begin())

    def finish() -> None:
        assert folder is not None
        folder.finish()

    name = decide_once(begin, group)
    try:
        with without_torch_functions_of_tensors():
            writer = dcp.FileSystemWriter(name)
            dcp.save(state, storage_writer=writer, planner=PiecesSavePlanner(), process_group=group)
    except (Exception, dcp.CheckpointException) as error:  # which derives from BaseException
        if folder is not None:
            folder.discard()
        raise RuntimeError(f"engine.save could not write {target}, which is as it was: {_reasons(error)}") from error
    decide_once(finish, group)


def _reasons(error: BaseException) -> str:
    failures = error.failures if isinstance(error, dcp.CheckpointException) else {}
    return "; ".join(f"rank {rank}: {failure[0]!r}" for rank, failure in failures.items()) or repr(error)
