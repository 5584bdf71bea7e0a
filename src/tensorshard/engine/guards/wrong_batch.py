"""Explains torch's and Python's short errors about a batch that does not fit the model or the loss, and losses that
are not finite because of their batch.

This happens only after an error, so a batch that fits costs nothing.

Also here: a guard that finds ranks with different batches, among ranks that compute the same samples together.

Those are the ranks that differ only along pp, cp or tp. With different batches they would train on one rank's samples
and another rank's targets, or on halves of different samples.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.comm.collectives import all_gather_into
from tensorshard.comm.world import world
from tensorshard.model.model_errors import describe_batch, failed_module
from tensorshard.model.whole_sequences import is_part
from tensorshard.plan.mesh import Mesh
from tensorshard.torch_private.process_groups import group_device
from tensorshard.torch_private.pytree import tree_flatten, tree_map, tree_tensors

_AXES = ("pp", "cp", "tp")
_BITS = 62  # of a digest, as an int64
_FLOATING_TARGETS = (
    "expected scalar type Long",
    "expected target of type Long",
    "expected target dtype",
    "not implemented for 'Float'",
)


class OutOfRangeError(IndexError):
    """A batch has token ids or class numbers that the model does not have."""


@contextmanager
def explained_loss(output: Any, targets: Any) -> Iterator[None]:
    """A context for a call of a loss function.

    Raises:
        OutOfRangeError, RuntimeError: the targets are the cause; the message says so, in place of torch's.
        Exception: any other error, with a note of what the loss function was called with.
    """
    try:
        yield
    except Exception as error:
        tensors = tree_tensors(targets)
        text = str(error)
        integers = [t for t in tensors if not t.is_floating_point() and t.numel()]
        if isinstance(error, IndexError) and "out of bounds" in text and integers:
            shapes = ", ".join(str(list(t.shape)) for t in tree_tensors(output))
            raise OutOfRangeError(
                f"the targets of this batch do not fit the loss: {text} They are {_ranges(integers)}, for an output of "
                f"shape {shapes}: class numbers are 0 to the number of classes minus 1, or the loss's ignore_index"
            ) from error
        floating = [t for t in tensors if t.is_floating_point()]
        if isinstance(error, RuntimeError) and floating and any(sign in text for sign in _FLOATING_TARGETS):
            raise RuntimeError(
                f"the targets of this batch do not fit the loss: {text.splitlines()[0]}. They are {floating[0].dtype} "
                f"of shape {list(floating[0].shape)}: class numbers are int64 (targets.long())"
            ) from error
        error.add_note(
            f"loss_fn was called with an output of {describe_batch(output)} and targets of {describe_batch(targets)}"
        )
        raise


@contextmanager
def explained_forward(model: nn.Module, inputs: Any) -> Iterator[None]:
    """A context for a forward of `model`.

    Raises:
        OutOfRangeError: an embedding has too few rows for the inputs.
        Exception: any other error, with a note of the inputs.
    """
    try:
        yield
    except Exception as error:
        sentence = _missing_rows(error, model, inputs)
        if sentence is not None:
            raise OutOfRangeError(sentence) from error
        note_inputs(error, model, inputs)
        raise


def note_inputs(error: BaseException, model: nn.Module, inputs: Any) -> None:
    """Adds a note to an `error` of a forward: which module raised it on which rank, what the inputs were and, if known,
    what is wrong with them."""
    sentence = _missing_rows(error, model, inputs)
    called = f"{type(model).__name__} was called with inputs of {describe_batch(inputs)}"
    error.add_note(sentence or f"{called}{_on_rank()}{failed_module(error, model)}")
    if any(tensor.dim() and not tensor.size(0) for tensor in tree_tensors(inputs)):
        error.add_note(
            "this rank has no sample of the batch, and the model does not run without one: engine.step runs one in its "
            "place, and engine.loader(drop_last=True) leaves an epoch's last, smaller batch out"
        )


def _on_rank() -> str:
    return f" on rank {dist.get_rank()}" if dist.is_initialized() and dist.get_world_size() > 1 else ""


def _missing_rows(error: BaseException, model: nn.Module, inputs: Any) -> str | None:
    """What is wrong with `inputs`, if the `error` is that an embedding has too few rows; None for other errors."""
    if not isinstance(error, IndexError) or "index out of range" not in str(error):
        return None
    integers = [t for t in tree_tensors(inputs) if not t.is_floating_point() and t.numel()]
    largest = max((int(t.max()) for t in integers), default=0)
    least = min((int(t.min()) for t in integers), default=0)
    tables = {n: m.num_embeddings for n, m in model.named_modules() if isinstance(m, nn.Embedding)}
    small = {name: rows for name, rows in tables.items() if least < 0 or largest >= rows}
    if not small:
        return None
    listing = ", ".join(f"{name} has {rows} rows" for name, rows in small.items())
    return (
        f"an embedding of the model was asked for a row that it does not have: the integer inputs of this batch "
        f"are {_ranges(integers)}; of the embeddings, {listing}. Tokens must be within the vocabulary "
        f"that the model was built for"
    )


def _ranges(tensors: list[torch.Tensor]) -> str:
    return " and ".join(f"{int(t.min())} to {int(t.max())}" for t in tensors)


def cause_in_batches(
    mesh: Mesh, inputs: Any = None, targets: Any = None, micro_batches: int = 1, losses: Sequence[torch.Tensor] = ()
) -> str | None:
    """What makes a loss NaN or infinite, if it stands in some rank's batch, and what would work. Collective: all ranks.

    Args:
        inputs, targets: of this rank.
        losses: of this rank's micro-batches, where the targets are not known.
    """
    mine = _without_number(inputs, targets, micro_batches), [loss.item() for loss in losses]
    reports: list[Any] = [mine] * mesh.world_size
    if mesh.world_size > 1:
        dist.all_gather_object(reports, mine, group=mesh.world_group)
    for rank, (found, _) in enumerate(reports):
        if found is not None:
            return str(found) if mesh.world_size == 1 else f"On rank {rank}: {found}"
    bad = [rank for rank, (_, values) in enumerate(reports) if not all(map(math.isfinite, values))]
    if not bad or len(bad) == mesh.world_size:
        return None
    return (
        f"The loss of rank {bad[0]} is not finite, and that of rank {min({*range(mesh.world_size)} - {*bad})} is: look "
        f"at its batch. {_NO_LABEL}"
    )


_NO_LABEL = (
    "A mean over nothing is nan, such as that of a batch without a label that counts: give the loss as (sum, count) "
    "instead, of cross_entropy(..., reduction='sum') and (targets != -100).sum() for instance, or take "
    "loss_fn=ts.model_loss for a model that computes its own loss"
)


def _without_number(inputs: Any, targets: Any, micro_batches: int) -> str | None:
    for what, batch in (("inputs", inputs), ("targets", targets)):
        for tensor in tree_tensors(batch):
            # -inf is what masks hold.
            wrong = int((tensor.isnan() | (tensor == math.inf)).sum()) if tensor.is_floating_point() else 0
            if wrong:
                return (
                    f"the {what} hold nan or infinity in {wrong} of {tensor.numel()} elements (of "
                    f"{describe_batch(tensor)}). Mend these samples, or leave them out"
                )
    for tensor in tree_tensors(inputs if targets is None else targets):
        is_label = not tensor.is_floating_point() and not tensor.is_complex() and tensor.dim()
        for part in tensor.tensor_split(micro_batches) if is_label else ():
            if part.numel() and int(part.max()) == int(part.min()) < 0:
                of_part = f" in one of {micro_batches} micro-batches" if micro_batches > 1 else ""
                return f"no target counts{of_part}: all are {int(part.max())}. {_NO_LABEL}"
    return None


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
            ValueError: on all these ranks, if the batches differ in structure, shapes, types or values; or if one has a
                nested tensor, which no axis of them cuts.
        """
        if self._groups and any(tensor.layout == torch.jagged for tensor in tree_tensors((inputs, targets))):
            raise ValueError(
                f"engine.{call} was given a nested tensor of jagged layout under {' and '.join(self._axes)}, where "
                f"layers and messages have one shape: pad the sequences (torch.nested.to_padded_tensor) and mask what "
                f"is added, or take a plan of data ranks alone, with zero=1 to 3"
            )
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
    leaves, structure = tree_flatten(tree_map(_plain, batch))
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


def _plain(leaf: Any) -> Any:
    """A nested tensor as its values and where its samples begin."""
    is_nested = isinstance(leaf, torch.Tensor) and leaf.layout == torch.jagged
    return (leaf.values(), leaf.offsets()) if is_nested else leaf  # type: ignore[attr-defined]


def _described(inputs: Any) -> str:
    shapes = [str(list(leaf.shape)) for leaf in tree_flatten(inputs)[0] if isinstance(leaf, torch.Tensor)]
    return ", ".join(shapes) or "no tensors"
