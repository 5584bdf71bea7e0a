"""FSDP2's collectives, and its state.

`AllGather`, `ReduceScatter`: the base classes of what :func:`set_collectives` is given.

Why: on Gloo, all-gathers and reduce-scatters built from sends and receives are several times as fast.

Checked: torch 2.13 and 2.15.

Public way: none; the methods are public and the classes are not.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    FSDPMeshInfo,
    HSDPMeshInfo,
    ShardPlacementResult,
    TrainingState,
)
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

__all__ = [
    "FSDP_STATE",
    "AllGather",
    "ReduceScatter",
    "forget_fully_shard",
    "gather_from",
    "has_gradient",
    "members",
    "one_chunk_at_a_time",
    "padded_shards",
    "parameter_groups",
    "reduces_gradients",
    "refresh_dtypes",
    "replace_shards",
    "reset_iteration",
    "set_collectives",
    "shard_over",
    "shard_version",
    "sharded_parameter",
    "surround_reduction",
    "takes_gradient",
    "unsharded_parameter",
    "watch_reduced",
]


FSDP_STATE = "__composable_api_"
"""The prefix of the attributes in which ``fully_shard`` keeps its state on a module.

Why: blocks that are alike differ in these attributes, which are not part of what the blocks compute.

Checked: torch 2.13 and 2.15.

Public way: none.
"""


def parameter_groups(model: nn.Module) -> list[Any]:
    """FSDP2's groups of parameters that are gathered together, for all modules in `model`.

    Why: a group only reduces the gradients that this rank has, but all ranks have to reduce the same.

    Checked: torch 2.13 and 2.15, in which a module may have several groups.

    Public way: ``FSDPModule.set_reduce_scatter_unused_params``, which does not tell who has none.
    """
    groups: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            groups.update((id(group), group) for group in _groups_of(module._get_fsdp_state()))
    return list(groups.values())


def set_collectives(module: FSDPModule, gather: AllGather, reduce: ReduceScatter) -> None:
    """Makes the groups of parameters of a `module` send by `gather` and `reduce`.

    Why: see the top of this file.

    Checked: torch 2.13 and 2.15.

    Public way: ``FSDPModule.set_custom_all_gather`` and ``set_custom_reduce_scatter``, for modules with one group.
    """
    for group in _groups_of(module._get_fsdp_state()):
        group._all_gather_comm, group._reduce_scatter_comm = gather, reduce


def shard_over(mesh: DeviceMesh) -> Any:
    """What ``shard_placement_fn`` returns for a parameter that is sharded over `mesh`, and not over that of its unit.

    Why: experts are sharded over fewer ranks than other parameters.

    Checked: torch 2.13 and 2.15.

    Public way: none; ``fully_shard`` documents the class, which has no public name.

    Args:
        mesh: of one dimension, or of two: replicas first.
    """
    if mesh.ndim == 1:
        return ShardPlacementResult(placement=None, mesh_info=FSDPMeshInfo(mesh, shard_mesh_dim=0))
    return ShardPlacementResult(placement=None, mesh_info=HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0))


def watch_reduced(group: Any, change: Callable[[torch.Tensor], object]) -> None:
    """Calls `change` with the reduced gradients of a group, a flat tensor that it may change in place.

    Why: the sum of experts' gradients is divided by another number than that of the ranks that it is reduced over.

    Checked: torch 2.13 and 2.15.

    Public way: ``FSDPModule.set_all_reduce_hook``, for all groups of a module together; ``set_gradient_divide_factor``
    divides twice where one rank has the whole parameter and gradients are in fp16 or fp64.
    """
    group._all_reduce_hook = change


def members(group: Any) -> list[Any]:
    """FSDP2's objects for the parameters of a group.

    Why: each knows the sharded parameter, the gathered one, and the gradient that is not reduced yet.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    return group.fsdp_params  # type: ignore[no-any-return]


def sharded_parameter(member: Any) -> Any:
    """The DTensor that the optimizer has, for one of a group's :func:`members`.

    Why: between a forward and its backward the modules show gathered parameters.

    Checked: torch 2.13 and 2.15.

    Public way: ``model.parameters()``, while nothing is gathered.
    """
    return member.sharded_param


def has_gradient(member: Any) -> bool:
    """Whether this rank has a gradient that is not reduced yet, for one of a group's :func:`members`.

    Why: a rank that did not use a parameter sends zeros, and the ranks count those that did.

    Checked: torch 2.13 and 2.15.

    Public way: none; between micro-batches FSDP2 keeps the gradient where only its own objects find it.
    """
    full = unsharded_parameter(member)
    return member.unsharded_accumulated_grad is not None or (full is not None and full.grad is not None)


def reduces_gradients(group: Any) -> bool:
    """Whether the next backward of a group reduces its gradients.

    Why: only then are missing gradients filled with zeros.

    Checked: torch 2.13 and 2.15.

    Public way: none that reads what ``FSDPModule.set_requires_gradient_sync`` has set.
    """
    return bool(group.reduce_grads)


def surround_reduction(group: Any, around: Callable[..., None]) -> None:
    """Calls ``around(group, original, *args)`` in place of what reduces a group's gradients.

    Why: before that, missing gradients are filled; after it, reduced ones are taken.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    group.post_backward = partial(around, group, group.post_backward)


def unsharded_parameter(member: Any) -> torch.Tensor | None:
    """The full parameter that autograd sees, for one of a group's :func:`members`; None if it was never gathered.

    Why: its gradient is filled with zeros where a rank has none.

    Checked: torch 2.13 and 2.15.

    Public way: the module's own parameter, between a forward and its backward.
    """
    return getattr(member, "_unsharded_param", None)


def shard_version(member: Any) -> int:
    """How often this rank's shard was changed in place, for one of a group's :func:`members`.

    Why: a gathered copy of a shard that was written since is gathered again.

    Checked: torch 2.13 and 2.15.

    Public way: none. The autograd notes name versions, but they have no public name.
    """
    return member._sharded_param_data._version  # type: ignore[no-any-return]


def refresh_dtypes(group: Any) -> None:
    """Sets the types in which a group's gradients are reduced, if it trains parameters now and did not before.

    Why: FSDP2 asks in the first forward which parameters are trained.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    if group._reduce_dtype is None and any(p.sharded_param.requires_grad for p in group.fsdp_params):
        group._init_mp_dtypes()


def padded_shards(group: Any) -> dict[nn.Parameter, torch.Tensor]:
    """This rank's shards of a group's parameters, flat and padded to the size that all ranks have.

    Why: FSDP2 gathers these tensors, so offloading has to keep them elsewhere.

    Checked: torch 2.13 and 2.15.

    Public way: none; the parameters' ``to_local()`` has no padding.
    """
    return {fsdp_param.sharded_param: fsdp_param._sharded_param_data for fsdp_param in group.fsdp_params}


def replace_shards(group: Any, shards: Sequence[torch.Tensor]) -> None:
    """Replaces a group's shards by `shards`, as :func:`padded_shards` gives them. The old ones are freed.

    Why: a parameter whose shard is on disk uses memory that is mapped to the file.

    Checked: torch 2.13 and 2.15.

    Public way: ``CPUOffloadPolicy``, which only supports host memory.
    """
    for fsdp_param, flat in zip(group.fsdp_params, shards, strict=True):
        local = fsdp_param.sharded_param._local_tensor
        fsdp_param._sharded_param_data = flat
        fsdp_param.sharded_param._local_tensor = flat[: local.numel()].view(local.shape)


def gather_from(group: Any, shards: Callable[[bool], AbstractContextManager[Sequence[torch.Tensor]]]) -> None:
    """Makes every gather of `group` take its shards from a context, which ends when they have been copied.

    Why: shards that are not in memory are read for the gather, and dropped after it.

    Checked: torch 2.13 and 2.15. With one rank, ``wait_for_unshard`` copies the shards; else ``unshard`` does.

    Public way: ``fsdp_pre_all_gather`` of a tensor subclass, which every parameter would have to be.

    Args:
        shards: called with whether the gather is for backward. It gives tensors as :func:`padded_shards` does.
    """
    alone = group._all_gather_process_group.size() == 1
    name = "wait_for_unshard" if alone else "unshard"
    original = getattr(group, name)

    def gather(*args: Any, **kwargs: Any) -> None:
        begun = group._all_gather_result is not None
        if group.is_unsharded or begun is not alone:
            original(*args, **kwargs)
            return
        kept = [fsdp_param._sharded_param_data for fsdp_param in group.fsdp_params]
        with shards(group._training_state == TrainingState.PRE_BACKWARD) as values:
            try:
                for fsdp_param, value in zip(group.fsdp_params, values, strict=True):
                    fsdp_param._sharded_param_data = value
                original(*args, **kwargs)
            finally:
                for fsdp_param, before in zip(group.fsdp_params, kept, strict=True):
                    fsdp_param._sharded_param_data = before

    setattr(group, name, gather)


def reset_iteration(root: nn.Module) -> None:
    """Prepares a model for the next forward after an error in a forward or a backward. Gradients are dropped.

    Why: FSDP2 would think that the backward was still going on, and never reduce another gradient.

    Checked: torch 2.13 and 2.15.

    Public way: ``FSDPModule.reset_iter_state()``, which is called here, too. In torch 2.13 it keeps gradients that no
    rank reduced yet.
    """
    assert isinstance(root, FSDPModule)
    state: Any = root._get_fsdp_state()
    if state._is_root is None:  # never called yet
        return
    for group in parameter_groups(root):
        for fsdp_param in group.fsdp_params:
            if "unsharded_accumulated_grad" in vars(fsdp_param):  # before torch 2.15; then it is the gradient below
                fsdp_param.unsharded_accumulated_grad = None
            full = unsharded_parameter(fsdp_param)
            if full is not None:
                full.grad = None
    root.reset_iter_state()


def takes_gradient(hook: Any) -> bool:
    """Whether `hook`, set on an output, looks at the gradient. The one by which FSDP learns that backward begins does
    not, nor do those that say so by ``takes_gradient = False``.

    Why: an output that may never be computed has to call FSDP's hook when backward reaches what it would be made from.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    return getattr(hook, "takes_gradient", not isinstance(getattr(hook, "__self__", None), FSDPState))


def forget_fully_shard(module: nn.Module) -> None:
    """Undoes the state that ``fully_shard`` keeps of `module` elsewhere. Class and attributes were restored before.

    Why: if a plan is refused, the module is the user's again, and can be sharded another time.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    _module_state_mapping.pop(module, None)


def _groups_of(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


@contextmanager
def one_chunk_at_a_time() -> Iterator[None]:
    """Inside, ``fully_shard`` only makes a view of the shard that it keeps, and none of the other ranks' shards.

    Why: for 1,024 ranks it makes that many views of each parameter, twice, and uses two of them. On fake tensors, that
    is most of the time of trying a plan for many ranks.

    Checked: torch 2.13 and 2.15. Where a version has no function by this name, nothing is changed.

    Public way: none.
    """
    original = getattr(_fsdp_param, "_chunk_with_empty", None)
    if original is None:
        yield
        return
    _fsdp_param._chunk_with_empty = _Chunks  # type: ignore[assignment]
    try:
        yield
    finally:
        _fsdp_param._chunk_with_empty = original


class _Chunks:
    """What ``torch.chunk`` returns, followed by empty tensors. Each is made when it is asked for."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, num_chunks, dim

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= self._count:
            raise IndexError(index)
        size = self._tensor.size(self._dim)
        length = -(-size // self._count)
        start = index * length
        if start >= size and index:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(length, size - start))
