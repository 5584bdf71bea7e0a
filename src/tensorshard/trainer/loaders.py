"""Batches of a dataset, cut into the data ranks' shares."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from omegaconf import DictConfig
from torch.utils.data import DataLoader, Dataset, default_collate

from tensorshard.config import ConfigError, instantiate
from tensorshard.data import ShardedBatchSampler
from tensorshard.engine.engine import Engine
from tensorshard.engine.loader import is_stream
from tensorshard.plan.mesh import Mesh
from tensorshard.trainer.trainer import ignore_stop_signals


@dataclass(frozen=True)
class Collate:
    """Makes a batch (inputs, targets) of samples.

    Args:
        function: the config's ``collate``, from a list of samples to a batch; None to stack them, as torch does.

    Raises:
        ConfigError: the samples cannot be stacked, or the batch is no pair.
    """

    function: Callable[[list[Any]], Any] | None = None

    @classmethod
    def of(cls, config: DictConfig) -> "Collate":
        return cls(instantiate(config.collate) if config.get("collate") is not None else None)

    def __call__(self, samples: list[Any]) -> Any:
        if self.function is not None:
            batch, what, remedy = self.function(samples), "collate returned", "let it return"
        else:
            try:
                batch = default_collate(samples)
            except (RuntimeError, TypeError) as error:
                raise ConfigError(
                    f"the dataset's samples cannot be stacked to a batch ({error}): let it give tensors of one shape, "
                    f"or write a function collate(samples) in the config, which returns a batch (inputs, targets)"
                ) from error
            what = "the dataset's samples have the form of"
            remedy = "let it give pairs, or write a function collate(samples) in the config, which returns"
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            given = f"{len(batch)} parts" if isinstance(batch, tuple | list) else type(batch).__name__
            raise ConfigError(f"{what} {given}, and a batch has two parts: {remedy} (inputs, targets)")
        return batch


_STACKED = Collate()


def training_loader(
    dataset: Dataset[Any],
    engine: Engine,
    *,
    global_batch_size: int,
    seed: int,
    samples_consumed: int = 0,
    num_workers: int = 0,
    collate: Collate = _STACKED,
) -> Iterable[Any]:
    """Shuffled batches without end, beginning after the samples that a resumed run has consumed.

    A stream is read in its own order, and an epoch's last, smaller batch is left out. Its place is in the Engine's
    checkpoints.
    """
    if is_stream(dataset):
        options: dict[str, Any] = {
            "num_workers": num_workers,
            "worker_init_fn": ignore_stop_signals,
            "collate_fn": collate,
        }
        return engine.loader(dataset, global_batch_size, shuffle=False, drop_last=True, name="train", **options)
    mesh = engine.mesh
    sampler = ShardedBatchSampler(
        len(dataset),  # type: ignore[arg-type]
        global_batch_size,
        dp_rank=mesh.dp_rank,
        dp_size=mesh.dp_size,
        seed=seed,
        samples_consumed=samples_consumed,
    )
    return _loader(dataset, sampler, num_workers, collate, engine.mesh)


def evaluation_loader(
    dataset: Dataset[Any],
    mesh: Mesh,
    *,
    global_batch_size: int,
    shuffle: bool,
    num_workers: int = 0,
    collate: Collate = _STACKED,
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
    return _loader(dataset, sampler, num_workers, collate, mesh)


def sample_inputs(dataset: Dataset[Any], collate: Collate) -> Any:
    """The inputs of a batch of two samples, as a loader gives them."""
    if is_stream(dataset):
        inputs, _ = collate(list(islice(iter(copy.deepcopy(dataset)), 2)))
        return inputs
    inputs, _ = collate([dataset[0], dataset[min(1, len(dataset) - 1)]])  # type: ignore[arg-type]
    return inputs


def _loader(
    dataset: Dataset[Any], sampler: ShardedBatchSampler, num_workers: int, collate: Collate, mesh: Mesh
) -> DataLoader[Any]:
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=num_workers,
        collate_fn=collate,
        pin_memory=mesh.device_mesh.device_type == "cuda",  # a context on a GPU in no rank that computes on the CPU
        worker_init_fn=ignore_stop_signals,
        # A generator of its own: a DataLoader draws from its generator at each pass, and training's random numbers must
        # not depend on how often a run was resumed or evaluated.
        generator=torch.Generator(),
    )
