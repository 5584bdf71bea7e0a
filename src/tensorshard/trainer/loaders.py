"""Batches of a dataset, cut into the data ranks' shares."""

import copy
from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from tensorshard.data import ShardedBatchSampler
from tensorshard.engine.engine import Engine
from tensorshard.engine.loader import is_stream
from tensorshard.plan.mesh import Mesh
from tensorshard.trainer.interruption import ignore_stop_signals


def training_loader(
    dataset: Dataset[Any],
    engine: Engine,
    *,
    global_batch_size: int,
    seed: int,
    samples_consumed: int = 0,
    num_workers: int = 0,
) -> Iterable[Any]:
    """Shuffled batches without end, beginning after the samples that a resumed run has consumed.

    A stream is read in its own order, and an epoch's last, smaller batch is left out. Its place is in the Engine's
    checkpoints.
    """
    if is_stream(dataset):
        workers = {"num_workers": num_workers, "worker_init_fn": ignore_stop_signals}
        return engine.loader(dataset, global_batch_size, shuffle=False, drop_last=True, name="train", **workers)
    mesh = engine.mesh
    sampler = ShardedBatchSampler(
        len(dataset),  # type: ignore[arg-type]
        global_batch_size,
        dp_rank=mesh.dp_rank,
        dp_size=mesh.dp_size,
        seed=seed,
        samples_consumed=samples_consumed,
    )
    return _loader(dataset, sampler, num_workers)


def evaluation_loader(
    dataset: Dataset[Any], mesh: Mesh, *, global_batch_size: int, shuffle: bool, num_workers: int = 0
) -> DataLoader[Any]:
    """The dataset once, in the same batches each time. With `shuffle`, the first few batches are a random sample of
    it."""
    sampler = ShardedBatchSampler(
        len(dataset),  # type: ignore[arg-type]
        global_batch_size,
        dp_rank=mesh.dp_rank,
        dp_size=mesh.dp_size,
        shuffle=shuffle,
        num_epochs=1,
        drop_last=False,
    )
    return _loader(dataset, sampler, num_workers)


def sample_inputs(dataset: Dataset[Any]) -> Any:
    """The inputs of a batch of two samples, as a loader gives them."""
    if is_stream(dataset):
        inputs, _ = default_collate(list(islice(iter(copy.deepcopy(dataset)), 2)))
        return inputs
    inputs, _ = default_collate([dataset[0], dataset[min(1, len(dataset) - 1)]])  # type: ignore[arg-type]
    return inputs


def _loader(dataset: Dataset[Any], sampler: ShardedBatchSampler, num_workers: int) -> DataLoader[Any]:
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=num_workers,
        pin_memory=torch.cuda.is_available(),
        worker_init_fn=ignore_stop_signals,
        # A generator of its own: a DataLoader draws from its generator at each pass, and training's random numbers must
        # not depend on how often a run was resumed or evaluated.
        generator=torch.Generator(),
    )
