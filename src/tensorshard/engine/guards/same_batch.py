"""Finds ranks with different batches, among ranks that compute the same samples together.

Those are the ranks that differ only along pp, cp or tp. With different batches they would train on one rank's samples
and another rank's targets, or on halves of different samples.
"""

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from tensorshard.comm.collectives import all_gather_into
from tensorshard.comm.world import world
from tensorshard.model.whole_sequences import is_part
from tensorshard.plan.mesh import Mesh
from tensorshard.torch_private.process_groups import group_device
from tensorshard.torch_private.pytree import tree_flatten

_AXES = ("pp", "cp", "tp")
_BITS = 62  # of a digest, as an int64


class SameBatch:
    """Compares the ranks' batches: their shapes before every call, their values where the shapes are new.

    Comparing shapes takes one message of 24 bytes. Comparing values needs a copy to the host, and a wrong sampler shows
    at the first batch.

    Messages go over the groups' half for the CPU where there is one, so that nothing waits for a GPU.

    Args:
        mesh: where the ranks are.
        device: of this rank.
    """

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self._axes = [axis for axis in _AXES if mesh.degrees[axis] > 1]
        self._groups = [mesh.group(axis) for axis in self._axes]
        self._device = group_device(self._groups[0], torch.device("cpu")) if self._groups else device
        self._compared: set[tuple[str, int]] = set()

    def check(self, call: str, inputs: Any, targets: Any) -> None:
        """A collective of the ranks that should have the same batch.

        Args:
            call: the Engine's method that was given the batch.

        Raises:
            ValueError: on all these ranks, if the batches differ in structure, shapes, types or values.
        """
        if not self._groups or dist.get_backend(self._groups[0]) == "fake" or world().is_simulated:
            return
        shapes = batch_digest((call, inputs, targets), values=False)
        rows = self._gathered([dist.get_rank(), shapes, int((call, shapes) not in self._compared)])
        equal = len({row[1] for row in rows}) == 1
        if equal and any(row[2] for row in rows):
            rows = self._gathered([dist.get_rank(), batch_digest((inputs, targets), values=True), 0])
            equal = len({row[1] for row in rows}) == 1
        if not equal:
            self._refuse(call, rows, inputs)
        self._compared.add((call, shapes))

    def _gathered(self, row: list[int]) -> list[list[int]]:
        """Every rank's `row`."""
        rows = torch.tensor([row], device=self._device)
        for group in self._groups:
            everyone = rows.new_empty((group.size() * rows.size(0), rows.size(1)))
            all_gather_into(everyone.view(-1), rows.view(-1), group, what="the batches' shapes")
            rows = everyone
        return rows.tolist()

    def _refuse(self, call: str, rows: list[list[int]], inputs: Any) -> None:
        described: list[Any] = [(dist.get_rank(), _described(inputs))]
        for group in self._groups:
            gathered: list[Any] = [None] * group.size()
            dist.all_gather_object(gathered, described, group=group)
            described = [entry for entries in gathered for entry in entries]
        inputs_of = dict(described)
        first = rows[0]
        other = next(row for row in rows if row[1] != first[1])
        raise ValueError(
            f"engine.{call} was given different batches on ranks {first[0]} and {other[0]} (inputs of "
            f"{inputs_of[first[0]]} and {inputs_of[other[0]]}), which differ only along {' and '.join(self._axes)}: "
            f"such ranks pass the same batch. Draw it by engine.mesh.dp_rank of engine.mesh.dp_size, as in "
            f"DistributedSampler(dataset, num_replicas=engine.mesh.dp_size, rank=engine.mesh.dp_rank)"
        )


def batch_digest(batch: Any, *, values: bool) -> int:
    """A number that is the same for equal batches; without `values`, for those of equal structure and shapes."""
    leaves, structure = tree_flatten(batch)
    digest = hashlib.blake2b(str(structure).encode(), digest_size=8)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            digest.update(f"{tuple(leaf.shape)} {leaf.dtype}".encode())
            if values and not is_part(leaf):  # ranks of a loader that cuts sequences have different parts
                flat = leaf.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
                digest.update(flat.view(torch.uint8).numpy().data)
        elif values and isinstance(leaf, bool | int | float | complex | str | bytes | None):
            digest.update(repr(leaf).encode())
    return int.from_bytes(digest.digest(), "big") % 2**_BITS


def _described(inputs: Any) -> str:
    shapes = [str(list(leaf.shape)) for leaf in tree_flatten(inputs)[0] if isinstance(leaf, torch.Tensor)]
    return ", ".join(shapes) or "no tensors"
