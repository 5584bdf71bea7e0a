"""Telling ranks of a pipeline that were given different batches, which would train on samples with others' targets."""

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from tensorshard.torch_private.fake_tensors import detect_fake_mode
from tensorshard.torch_private.pytree import tree_flatten


def check_same_batch(call: str, inputs: Any, targets: Any, group: dist.ProcessGroup) -> None:
    """A collective of a pipeline's ranks.

    Args:
        call: the Engine's method that was given the batch.

    Raises:
        ValueError: on every rank, if the batches differ in structure, shapes, types or values.
    """
    if dist.get_backend(group) == "fake" or detect_fake_mode(tree_flatten((inputs, targets))[0]) is not None:
        return
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, (_digest((inputs, targets)), _described(inputs)), group=group)
    differing = next((rank for rank, (digest, _) in enumerate(found) if digest != found[0][0]), None)
    if differing is None:
        return
    ranks = dist.get_process_group_ranks(group)
    raise ValueError(
        f"engine.{call} was given different batches on ranks {ranks[0]} and {ranks[differing]} (inputs of "
        f"{found[0][1]} and {found[differing][1]}), which are of one pipeline: its ranks pass the same batch. Draw it "
        f"by engine.mesh.dp_rank of engine.mesh.dp_size, as in DistributedSampler(dataset, num_replicas="
        f"engine.mesh.dp_size, rank=engine.mesh.dp_rank)"
    )


def _digest(batch: Any) -> str:
    leaves, structure = tree_flatten(batch)
    digest = hashlib.blake2b(str(structure).encode())
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            digest.update(f"{tuple(leaf.shape)} {leaf.dtype}".encode())
            flat = leaf.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
        elif isinstance(leaf, bool | int | float | complex | str | bytes | None):
            digest.update(repr(leaf).encode())
    return digest.hexdigest()


def _described(inputs: Any) -> str:
    shapes = [str(list(leaf.shape)) for leaf in tree_flatten(inputs)[0] if isinstance(leaf, torch.Tensor)]
    return ", ".join(shapes) or "no tensors"
