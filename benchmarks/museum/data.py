"""Silent faults of data loading and of resumed runs."""

import shutil
import tempfile
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmarks.museum.collectives import own_part
from benchmarks.museum.exhibit import Exhibit
from benchmarks.museum.language_model import (
    Built,
    FeedForwardModel,
    adamw,
    batch,
    build,
    cross_entropy,
    feed_forward_reference,
    trained,
)

ROWS_A_RANK = 4
RANKS = 2


class Sentences(Dataset[tuple[Tensor, Tensor]]):
    """24 pairs of tokens and labels."""

    def __init__(self) -> None:
        self.pairs = batch(0, rows=24)

    def __len__(self) -> int:
        return len(self.pairs[0])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.pairs[0][index], self.pairs[1][index]


def _loader(rank: int, seed: int = 0, epoch: int = 0) -> DataLoader[tuple[Tensor, Tensor]]:
    data = Sentences()
    sampler: Any = DistributedSampler(data, num_replicas=RANKS, rank=rank, seed=seed)
    sampler.set_epoch(epoch)
    return DataLoader(data, batch_size=ROWS_A_RANK, sampler=sampler)


def _reference(epoch: int = 0) -> Built:
    """The batches of both ranks' loaders."""
    model = build(FeedForwardModel)
    batches = list(zip(*(_loader(rank, epoch=epoch) for rank in range(RANKS)), strict=True))

    def loss(i: int) -> Tensor:
        tokens, labels = (torch.cat(parts) for parts in zip(*batches[i], strict=True))
        return cross_entropy(model(tokens), labels)

    return trained(model, loss)


def _seeds(fault: bool) -> Built:
    model = DistributedDataParallel(build(FeedForwardModel))
    batches = list(_loader(dist.get_rank(), seed=17 * dist.get_rank() if fault else 0))

    def loss(i: int) -> Tensor:
        tokens, labels = batches[i]
        return cross_entropy(model(tokens), labels)

    return trained(model, loss)


def _resumed(fault: bool) -> Built:
    """The run stops after the first step of its second epoch, and goes on with a loader that skips one batch."""
    model = DistributedDataParallel(build(FeedForwardModel))
    batches = iter(_loader(dist.get_rank(), epoch=1))

    def loss(i: int) -> Tensor:
        nonlocal batches
        if i == 1:
            batches = islice(_loader(dist.get_rank(), epoch=0 if fault else 1), 1, None)
        tokens, labels = next(batches)
        return cross_entropy(model(tokens), labels)

    return trained(model, loss)


def _optimizer_resumed(fault: bool) -> Built:
    """After the first step, the optimizer's state goes to a checkpoint, and from there into a new optimizer."""
    model = build(FeedForwardModel)
    fully_shard(model)
    optimizer = adamw(model.parameters())

    def resume() -> None:
        nonlocal optimizer
        folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(folder)
        saved = optimizer.state_dict() if fault else get_optimizer_state_dict(model, optimizer)
        dcp.save({"optimizer": saved}, checkpoint_id=folder[0])
        optimizer = adamw(model.parameters())
        template = optimizer.state_dict() if fault else get_optimizer_state_dict(model, optimizer)
        dcp.load({"optimizer": template}, checkpoint_id=folder[0])
        if fault:
            optimizer.load_state_dict(template)
        else:
            set_optimizer_state_dict(model, optimizer, template)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0])

    def step(i: int) -> Tensor:
        optimizer.zero_grad()
        if i == 1:
            resume()
        tokens, labels = (own_part(tensor, 0) for tensor in batch(i))
        loss = cross_entropy(model(tokens), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, step


EXHIBITS = [
    Exhibit(
        name="samplers whose seeds differ by rank",
        report="NVlabs/LongLive#71",
        said="Each rank seeded its DistributedSampler by its rank. Every one took its share of another permutation, so"
        " that some samples came twice and others not at all.",
        reference=_reference,
        parallel=partial(_seeds, fault=True),
        correct=partial(_seeds, fault=False),
        kinds=frozenset({"other samples"}),
    ),
    Exhibit(
        name="a resumed epoch in the order of the first",
        report="huggingface/accelerate#4071",
        said="The loader that skips what had been trained on began at epoch 0: a run resumed within a later epoch"
        " skipped, and then read, another permutation.",
        reference=partial(_reference, epoch=1),
        parallel=partial(_resumed, fault=True),
        correct=partial(_resumed, fault=False),
        kinds=frozenset({"other samples"}),
    ),
    Exhibit(
        name="moments that a checkpoint has and a resume drops",
        report="KempnerInstitute/KempnerForge#115",
        said="A checkpoint was read into the state of a new optimizer, which has no moments before its first step: the"
        " saved ones had no place to go, and Adam began anew.",
        reference=feed_forward_reference,
        parallel=partial(_optimizer_resumed, fault=True),
        correct=partial(_optimizer_resumed, fault=False),
        kinds=frozenset({"update"}),
    ),
]
