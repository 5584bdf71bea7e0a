"""Samples that stand in where a rank has none, in an epoch's last, smaller batch.

Such a batch may have fewer samples than there are data ranks, or than micro-batches. All ranks still run every
micro-batch, since forward and backward hold collectives. A rank without a sample runs one that counts for nothing: it
is in no loss, gradient or batch statistic.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.engine.loader import EngineLoader, EngineLoaders
from tensorshard.model.batches import batch_size, listed_samples, split_batch, split_into, split_unevenly, to_device
from tensorshard.model.parameters import STATISTICS
from tensorshard.plan.mesh import Mesh
from tensorshard.plan.plan import Plan
from tensorshard.torch_private.modules import BatchNormBase, own_buffers
from tensorshard.torch_private.pytree import tree_map, tree_tensors


@dataclass(frozen=True)
class MicroBatch:
    """What the model runs at once.

    Args:
        inputs, targets: of this rank's samples, or of one that stands in.
        none: the targets of no sample, if a sample stands in; else None.
        counts: whether these are the rank's own samples.
    """

    inputs: Any
    targets: Any
    none: Any = None
    counts: bool = True

    def on_device(self, device: torch.device, *, targets: bool = True) -> "MicroBatch":
        """This micro-batch on `device`; its targets only if `targets` are needed."""
        inputs = to_device(self.inputs, device)
        if not targets:
            return replace(self, inputs=inputs)
        return replace(self, inputs=inputs, targets=to_device(self.targets, device), none=to_device(self.none, device))


class ShortBatches:
    """Cuts batches into micro-batches, also an epoch's last one.

    Args:
        loaders: the Engine's. They know, on every rank at the same time, how many samples each rank has of a batch.
        stand_ins: called, on every rank, before a step in which a sample stands in on some rank.
    """

    def __init__(self, mesh: Mesh, loaders: EngineLoaders, stand_ins: Callable[[], None]) -> None:
        self._stand_ins = stand_ins
        self._mesh = mesh
        self._loaders = loaders

    def split(self, inputs: Any, targets: Any, micro_batches: int, *, all_of_them: bool) -> list[MicroBatch]:
        """The micro-batches of a step. For an epoch's last batch this may be a collective of the data ranks.

        Args:
            all_of_them: whether there must be that many, also of a smaller batch.

        Raises:
            ValueError: a batch that no loader handed out cannot be cut into equal parts; a loader's full batch has too
                few samples.
        """
        shares, is_short = self._shares(inputs, targets)
        if shares and not is_short and min(shares) < micro_batches:
            raise ValueError(
                f"a batch of engine.loader gives each of {len(shares)} data ranks {min(shares)} samples, fewer than "
                f"micro_batches={micro_batches}: give it a batch_size of at least {len(shares) * micro_batches}, or "
                f"set micro_batches to at most {min(shares)}"
            )
        if not shares:
            return [MicroBatch(*part) for part in split_batch(inputs, targets, micro_batches)]
        if not all_of_them:
            micro_batches = min(micro_batches, max(shares))
        if min(shares) < micro_batches:
            self._stand_ins()
        return self._filled(inputs, targets, micro_batches, self._sample(inputs, targets, shares))

    def need_stand_ins(self, inputs: Any, targets: Any, micro_batches: int) -> bool:
        """Whether a rank has too few samples of a batch for as many micro-batches. For an epoch's last batch this may
        be a collective of the data ranks."""
        shares, _ = self._shares(inputs, targets)
        return bool(shares) and min(shares) < micro_batches

    def split_for_evaluation(self, inputs: Any, targets: Any, micro_batches: int) -> list[MicroBatch]:
        """At most `micro_batches`, whose sizes differ by one at most. For an epoch's last batch this may be a
        collective of the data ranks."""
        shares, _ = self._shares(inputs, targets)
        if not shares:
            return [MicroBatch(*part) for part in split_unevenly(inputs, targets, micro_batches)]
        parts = max(1, min(micro_batches, max(shares)))
        return self._filled(inputs, targets, parts, self._sample(inputs, targets, shares))

    def split_nest(self, batch: Any, micro_batches: int, *, evenly: bool = True) -> list[MicroBatch]:
        """The micro-batches of a batch of any structure, as inputs without targets. For an epoch's last batch this may
        be a collective of the data ranks.

        Args:
            evenly: whether their sizes must be equal, unless a loader handed out the batch.

        Raises:
            ValueError: its tensors have different first dimensions, so that it cannot be cut into several; or it
                cannot be cut into equal parts.
        """
        if self._can_be_cut(batch):
            if not evenly:
                return self.split_for_evaluation(batch, None, micro_batches)
            return self.split(batch, None, micro_batches, all_of_them=False)
        if micro_batches == 1:
            return [MicroBatch(batch, None)]
        sizes = sorted({tensor.size(0) for tensor in tree_tensors(batch) if tensor.dim()})
        raise ValueError(
            f"a batch whose tensors have the first dimensions {', '.join(map(str, sizes)) or 'of nothing'} was given "
            f"under micro_batches={micro_batches}, which cuts all tensors along their samples: let the first dimension "
            f"of each be the samples, or set micro_batches=1"
        )

    def _can_be_cut(self, batch: Any) -> bool:
        """Whether the tensors of a batch have the samples as their first dimension, on every data rank."""
        can = isinstance(batch, torch.Tensor | tuple | list | dict) and (
            listed_samples(batch) is not None
            or len({tensor.size(0) for tensor in tree_tensors(batch) if tensor.dim()}) == 1
        )
        is_last = any(loader.uneven is not None for loader in self._loaders.by_name.values())
        if not is_last or self._loaders.known((batch, None)) is not None or self._mesh.dp_size == 1:
            return can
        answers: list[Any] = [can] * self._mesh.dp_size
        dist.all_gather_object(answers, can, group=self._mesh.dp_group)
        return all(answers)

    def filled_up(self, batch: Any) -> tuple[Any, Any, int] | None:
        """Inputs of as many samples as the data rank with the most has, this rank's targets, and the number of its
        own samples. None if no rank has a batch. A collective of the data ranks.

        Args:
            batch: (inputs, targets); None if this rank has no further one.
        """
        size = 0 if batch is None else batch_size(batch[0])
        shares: list[Any] = [size] * self._mesh.dp_size
        if self._mesh.dp_size > 1:
            dist.all_gather_object(shares, size, group=self._mesh.dp_group)
        missing = max(shares) - size
        if not any(shares):
            return None
        inputs, targets = batch or (None, None)
        sample = self._sample(inputs, targets, shares)
        if batch is None:
            targets = tree_map(_none, sample[1])
        if missing:
            inputs = tree_map(partial(_extended, missing), inputs if size else tree_map(_none, sample[0]), sample[0])
        return inputs, targets, size

    def _shares(self, inputs: Any, targets: Any) -> tuple[list[int], bool]:
        """How many samples each data rank has of a batch that a loader handed out, nothing for other batches; and
        whether it is an epoch's last, smaller one."""
        known = self._loaders.known((inputs, targets))
        if known is not None:
            loader, shares = known
            return list(shares), sum(shares) < loader.batch_size
        if all(loader.uneven is None for loader in self._loaders.by_name.values()):
            return [], False
        # Its tensors were replaced on the way, by augmentation for example.
        sizes: list[Any] = [batch_size(inputs)] * self._mesh.dp_size
        if self._mesh.dp_size > 1:
            dist.all_gather_object(sizes, batch_size(inputs), group=self._mesh.dp_group)
        return sizes, True

    def _sample(self, inputs: Any, targets: Any, shares: list[int]) -> Any:
        """One sample: of this rank, if it has any, else of another."""
        sample = tree_map(_first, (inputs, targets)) if shares[self._mesh.dp_rank] else None
        if 0 in shares and any(shares):
            source = next(rank for rank, held in enumerate(shares) if held)
            sent = [to_device(sample, torch.device("cpu")) if self._mesh.dp_rank == source else None]
            dist.broadcast_object_list(sent, group=self._mesh.dp_group, group_src=source)
            sample = sample or sent[0]
        return sample

    def _filled(self, inputs: Any, targets: Any, parts: int, sample: Any) -> list[MicroBatch]:
        return [
            MicroBatch(part, its_targets) if batch_size(part) else MicroBatch(sample[0], sample[1], its_targets, False)
            for part, its_targets in split_into(inputs, targets, parts, known=True)
        ]


def check_last_batch(samples: int, plan: Plan, model: nn.Module) -> None:
    """Refuses an epoch's last batch of which a stage would normalize a sample that stands in.

    Args:
        samples: of that batch, over all data ranks; 0 if all batches are full.
        model: the whole model, for its modules.

    Raises:
        ValueError: `model` takes statistics of its batch, and a rank of the plan's pipeline would have fewer samples
            than micro-batches.
    """
    data_ranks = plan.dp_replicate * plan.dp_shard
    if plan.pp == 1 or not samples or samples // data_ranks >= plan.micro_batches:
        return
    for name, module in model.named_modules():
        if isinstance(module, BatchNormBase) or own_buffers(module).keys() & set(STATISTICS):
            raise ValueError(
                f"the epoch's last batch has {samples} samples, too few for micro_batches={plan.micro_batches} on "
                f"{data_ranks} data ranks, and module {name!r} ({type(module).__name__}) takes statistics of each "
                f"micro-batch in a pipeline (pp={plan.pp}): leave that batch out with engine.loader(drop_last=True)"
            )


class BatchShares:
    """How much the mean loss of this rank's samples counts, in a loop of one's own: the data ranks may have different
    numbers of an epoch's last samples."""

    def __init__(self, loaders: EngineLoaders, mesh: Mesh) -> None:
        self._loaders = loaders
        self._mesh = mesh
        # Batches that the model was given since the last backward.
        self._seen: set[tuple[EngineLoader, tuple[int, ...]]] = set()

    def note_inputs(self, inputs: Any) -> None:
        """Notes what the model is called with."""
        known = self._loaders.known(inputs)
        if known is not None:
            self._seen.add(known)

    def weight(self, loss: Any) -> float:
        """What a mean `loss` that is about to go backward counts, where 1 is the average of the data ranks.

        Raises:
            ValueError: on every rank. It is a mean, but not known to be that of one batch of a loader.
        """
        seen, self._seen = self._seen, set()
        if not isinstance(loss, torch.Tensor):
            return 1.0
        if len(seen) == 1:
            ((_, shares),) = seen
            return shares[self._mesh.dp_rank] * self._mesh.dp_size / sum(shares)
        loaders = self._loaders.by_name.values()
        for loader, shares in seen or {(loader, loader.uneven) for loader in loaders if loader.uneven is not None}:
            if len(set(shares)) > 1:
                if sum(shares) == loader.batch_size:
                    which, cannot, without = "a batch of", "do not", "leave out lengths"
                else:
                    which, cannot = "the epoch's last", "cannot"
                    without = "leave that batch out with engine.loader(drop_last=True)"
                raise ValueError(
                    f"engine.backward was given the mean of this rank's {shares[self._mesh.dp_rank]} of {which} "
                    f"{sum(shares)} samples, which {self._mesh.dp_size} data ranks {cannot} have in equal numbers, and "
                    f"the model was not called with that batch alone, as engine.loader gave it, so it is not known how "
                    f"much this rank's mean counts: give engine.backward((sum, count)), such as (loss of "
                    f"reduction='sum', len(x)), or {without}"
                )
        return 1.0


def _first(leaf: Any) -> Any:
    return leaf[:1] if _has_samples(leaf) else leaf


def _none(leaf: Any) -> Any:
    return leaf[:0] if _has_samples(leaf) else leaf


def _extended(missing: int, leaf: Any, sample: Any) -> Any:
    """`leaf`, and after it so many times the `sample`."""
    if not _has_samples(leaf):
        return leaf
    return torch.cat([leaf, sample.to(leaf.device).expand(missing, *sample.shape[1:])])


def _has_samples(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0
