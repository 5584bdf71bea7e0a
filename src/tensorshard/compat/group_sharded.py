"""Paddle's entry points to ZeRO: `group_sharded_parallel` and `save_group_sharded_model`.

The caller keeps its training loop: forward, backward, ``optimizer.step()``, ``optimizer.zero_grad()``. Gradients are
averaged over the group. :func:`tensorshard.parallelize` offers more; this is for scripts that have the two calls.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tensorshard.comm.collectives import all_reduce_
from tensorshard.comm.decisions import decide_once
from tensorshard.comm.marks import ParallelMark, get_mark
from tensorshard.comm.sharded_tensors import gather_full
from tensorshard.comm.sharding import to_local
from tensorshard.comm.world import default_device, join_world, world_size
from tensorshard.common.folders import WholeFolder, recover
from tensorshard.common.words import kind_of
from tensorshard.data_parallel.sharded_model import ShardedModel
from tensorshard.engine.optimizer import build_optimizer
from tensorshard.model.trains_itself import self_training
from tensorshard.parallelize.build import open_storage, shard_model
from tensorshard.parallelize.checks import check_model
from tensorshard.parallelize.parallelized_models import check_not_parallelized, mark_parallelized
from tensorshard.parallelize.restore_on_error import RestoreOnError
from tensorshard.plan.mesh import Mesh
from tensorshard.plan.plan import ZERO_NAMES, Plan
from tensorshard.torch_private.operators import unscale_
from tensorshard.torch_private.optimizers import set_unscaling
from tensorshard.weights.initial import from_module

_ATTRIBUTE = "_tensorshard_layout"
_FILES = ("model.pt", "optimizer.pt")


@dataclass(frozen=True)
class _Layout:
    """What group_sharded_parallel attaches to the model, for saving it.

    Args:
        split: how the parameters of parallel layers are split over ranks outside of the mesh, by name.
    """

    sharded: ShardedModel
    mesh: Mesh
    split: dict[str, ParallelMark]


def group_sharded_parallel(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    level: str,
    scaler: Any = None,
    group: dist.ProcessGroup | None = None,
    offload: bool = False,
    segment_size: int | None = None,
) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Shards a model and its optimizer over the ranks of `group`, in place, by Paddle's name and levels.

    Args:
        model: a module. Every rank gets the weights of the group's first rank. Parallel layers may be split
            over other ranks than those of `group`, as with ``group=tensorshard.distributed.get_data_parallel_group()``.
        optimizer: of that model's parameters, before its first step. It keeps its groups and their options, and
            updates sharded parameters from now on.
        level: "os" (optimizer states), "os_g" (and gradients) or "p_g_os" (and parameters): ZeRO 1, 2 and 3.
        scaler: a ``torch.amp.GradScaler``, or None. All ranks of the group then skip a step together.
        group: the processes to shard over; None for all of them.
        offload: whether optimizer states and gradients are kept in host memory, see ``docs/offload.md``.
        segment_size: at least so many bytes of parameters are gathered and reduced together; None for one block of
            the model at a time.

    Returns:
        The same three objects.

    Raises:
        ValueError: an unknown level; a group without this process; an optimizer that has already stepped or holds
            parameters of another model; a model that cannot be sharded; with `offload`, an optimizer that does not
            update each parameter by itself.
        TypeError: a model or an optimizer of another type.

    Examples:
        >>> model = torch.nn.Linear(16, 4)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> model, optimizer, _ = ts.group_sharded_parallel(model, optimizer, level="os_g")
        rank 0 of 1
        ...
        >>> model(torch.randn(8, 16)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """
    if level not in ZERO_NAMES:
        raise ValueError(f"level is {level!r}; it must be one of {', '.join(map(repr, ZERO_NAMES))}")
    if not isinstance(offload, bool):
        raise TypeError(f"offload is {offload!r}; it must be True or False")
    if segment_size is not None and (not isinstance(segment_size, int) or segment_size < 1):
        raise ValueError(f"segment_size is {segment_size!r}; it must be a number of bytes, at least 1, or None")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {kind_of(model)}; it must be a built nn.Module")
    check_not_parallelized(model)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this process is not in the group; call group_sharded_parallel on the group's own ranks alone")
    names = _check_optimizer(model, optimizer)
    size = world_size() if group is None else dist.get_world_size(group)
    plan = Plan(zero=level, shard_units=segment_size, offload="cpu" if offload else None).resolve(size)
    ranks = dist.get_process_group_ranks(group) if dist.is_initialized() else []
    check_model(model, plan, split="outside", ranks=ranks)
    for name, module in self_training(model).items():
        module.check_under_plan(name, takes_rules=False)
    split = _split_parameters(model)
    device = default_device()
    join_world(device)
    mesh = Mesh(plan, device.type, group)
    if mesh.rank == 0:
        print(mesh.describe(), flush=True)
    storage = open_storage(plan, mesh, device)
    with RestoreOnError() as restored:
        restored.note(model)
        source = from_module(model)
        sharded = shard_model(source, plan, mesh, device, broadcast=mesh.world_size > 1, storage=storage)
    mark_parallelized([model], "tensorshard.group_sharded_parallel")
    object.__setattr__(model, _ATTRIBUTE, _Layout(sharded, mesh, split))
    masters = sharded.masters()
    for group_options in optimizer.param_groups:
        group_options["params"] = [masters[names[p]] for p in group_options["params"]]
    trained = {name: master for name, master in masters.items() if master.requires_grad}

    def again(parameters: Any) -> torch.optim.Optimizer:
        return type(optimizer)(parameters, **optimizer.defaults)

    copied = storage.keep_states(optimizer, sharded, trained, partial(build_optimizer, again)).copied
    optimizer.register_step_pre_hook(lambda *_: sharded.finish_backward())
    optimizer.register_step_post_hook(lambda *_: sharded.all_gather_parameters(copied))
    if scaler is not None:
        set_unscaling(scaler, _unscaler([mesh.world_group, *_groups_of(split)]))
    return model, optimizer, scaler


def save_group_sharded_model(
    model: nn.Module,
    output: str | os.PathLike[str],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Writes full weights to ``output/model.pt`` and, if given, the optimizer's full state to ``optimizer.pt``.

    The names are those of the original model, so it reads them with ``load_state_dict(torch.load(...))``. The
    optimizer's state has the same names. Every rank of the group calls this; its first rank writes.

    Args:
        overwrite: whether older files are replaced, both at once, when the new ones are complete. An older
            ``optimizer.pt`` goes, too, if `optimizer` is None. Other files in the folder stay.

    Raises:
        ValueError: the model did not come from :func:`group_sharded_parallel`.
        FileExistsError: a file is there already, and `overwrite` is false.

    Examples:
        >>> model = torch.nn.Linear(16, 4)
        >>> model, optimizer, _ = ts.group_sharded_parallel(model, torch.optim.SGD(model.parameters(), lr=0.1), "os")
        rank 0 of 1
        ...
        >>> ts.save_group_sharded_model(model, "output", optimizer)
        >>> sorted(torch.load("output/model.pt"))
        ['bias', 'weight']
    """
    layout: _Layout | None = getattr(model, _ATTRIBUTE, None)
    if layout is None:
        raise ValueError("the model did not come from group_sharded_parallel, so there is nothing sharded to save")
    writes = layout.mesh.rank == 0
    folder = Path(output)
    names = _FILES if optimizer is not None else _FILES[:1]
    existing = decide_once(lambda: _existing(folder, _FILES if overwrite else names), layout.mesh.world_group)
    if existing and not overwrite:
        raise FileExistsError(
            f"{' and '.join(existing)} would be overwritten; nothing was written: give another output folder, or "
            f"overwrite=True, which replaces them once the new ones are complete"
        )
    state = layout.sharded.full_state_dict(keep=writes)
    states = [state] if optimizer is None else [state, _whole_optimizer_state(layout.sharded, optimizer, layout.split)]
    if writes:
        # Each group that shards the model has its own parts of what parallel layers split. The first ranks of these
        # groups gather them, and the first of these ranks writes.
        state.update({name: _whole(state[name], mark).cpu() for name, mark in layout.split.items() if name in state})
        writes = all(group.rank() == 0 for group in _groups_of(layout.split))
    if writes:
        if existing:
            whole = WholeFolder(folder, _FILES, needed=len(_FILES), kind="of a group-sharded model", overwrite=True)
            target = whole.begin()
            for name, content in zip(names, states, strict=True):
                torch.save(content, target / name)
            whole.finish()
        else:
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in zip(names, states, strict=True):
                temporary = folder / f".{name}.saving"
                torch.save(content, temporary)
                temporary.rename(folder / name)
    for process_group in (*_groups_of(layout.split), layout.mesh.world_group):
        dist.barrier(process_group)


def _existing(folder: Path, names: Sequence[str]) -> list[str]:
    recover(folder)
    return [str(folder / name) for name in names if (folder / name).exists()]


def _check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, str]:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is {kind_of(optimizer)}; it must be a torch Optimizer of the model")
    if optimizer.state:
        raise ValueError(
            "the optimizer has already stepped, and its states belong to whole parameters; call "
            "group_sharded_parallel before the first step"
        )
    names = {parameter: name for name, parameter in model.named_parameters()}
    for options in optimizer.param_groups:
        for parameter in options["params"]:
            if parameter not in names:
                raise ValueError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not the model's; build "
                    f"it from model.parameters()"
                )
    return names


def _whole_optimizer_state(
    sharded: ShardedModel, optimizer: torch.optim.Optimizer, split: dict[str, ParallelMark]
) -> dict[str, Any]:
    names: dict[torch.Tensor, str] = {master: name for name, master in sharded.masters().items()}
    state: dict[str, dict[str, Any]] = {}
    for parameter, values in optimizer.state.items():
        state[names[parameter]] = {
            key: _whole(value, split.get(names[parameter])).cpu() if isinstance(value, torch.Tensor) else value
            for key, value in values.items()
        }
    groups = [
        {**{k: v for k, v in options.items() if k != "params"}, "params": [names[p] for p in options["params"]]}
        for options in optimizer.param_groups
    ]
    return {"state": state, "param_groups": groups}


def _whole(tensor: torch.Tensor, mark: ParallelMark | None) -> torch.Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full if mark is None or full.ndim == 0 else gather_full(full.to(default_device()), mark)


def _split_parameters(model: nn.Module) -> dict[str, ParallelMark]:
    marks = {name: get_mark(parameter) for name, parameter in model.named_parameters()}
    return {name: mark for name, mark in marks.items() if mark is not None}


def _groups_of(split: dict[str, ParallelMark]) -> list[dist.ProcessGroup]:
    return list(dict.fromkeys(mark.group for mark in split.values() if mark.group is not None))


def _unscaler(groups: list[dist.ProcessGroup]) -> Any:
    """A function by which GradScaler unscales. torch's own takes the full tensors of one process. This one takes
    shards; if one rank finds an overflow, all skip the step."""

    def unscale(
        scaler: Any, optimizer: torch.optim.Optimizer, inverse: torch.Tensor, overflow: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        gradients = [
            to_local(p.grad) for options in optimizer.param_groups for p in options["params"] if p.grad is not None
        ]
        for device in {gradient.device for gradient in gradients}:  # offloaded ones are in the host's memory
            here = overflow if device == overflow.device else torch.zeros_like(overflow, device=device)
            unscale_([g for g in gradients if g.device == device], here, inverse.to(device))
            if here is not overflow:
                overflow.add_(here.to(overflow.device))
        for group in groups:
            all_reduce_(overflow, group, dist.ReduceOp.MAX)
        return {overflow.device: overflow}

    return unscale
