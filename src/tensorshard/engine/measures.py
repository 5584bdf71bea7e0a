"""What every data rank has of its own, put together: outputs, means, and metrics over a loader.

Also here: the samples of all data ranks, for losses that compare samples with each other.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DistributedSampler

from tensorshard.comm.collectives import all_reduce_, on_the_wire
from tensorshard.comm.differentiable import gather_for_sum
from tensorshard.common.words import kind_of
from tensorshard.engine.last_batch import ShortBatches
from tensorshard.engine.loss import sum_and_count
from tensorshard.model.batches import batch_size, to_device
from tensorshard.model.tensors import map_tensors, take_apart
from tensorshard.plan.mesh import Mesh
from tensorshard.plan.plan import Plan
from tensorshard.torch_private.process_groups import is_alone


def gather(values: Any, mesh: Mesh, device: torch.device) -> Any:
    """See :meth:`tensorshard.Engine.gather`."""
    rows, structure = _rows(values, device)
    if mesh.dp_size == 1:
        return structure.build(rows)
    forms = _forms_of_all(rows, mesh)
    for rank, form in enumerate(forms):
        _check_form(forms[0], form, rank)
    return structure.build(_all_gathered(rows, forms, mesh))


def gathered_parts(values: Any, mesh: Mesh, device: torch.device) -> Iterator[Any]:
    """The values of all data ranks: together, or rank by rank where their samples are padded to different lengths."""
    rows, structure = _rows(values, device)
    if mesh.dp_size == 1:
        yield structure.build(rows)
        return
    forms = _forms_of_all(rows, mesh)
    forms_of_samples = [[(shape[1:], dtype) for shape, dtype in form] for form in forms]
    if all(form == forms_of_samples[0] for form in forms_of_samples):
        yield structure.build(_all_gathered(rows, forms, mesh))
        return
    for rank, form in enumerate(forms):
        if [dtype for _, dtype in form] != [dtype for _, dtype in forms[0]]:
            _check_form(forms[0], form, rank)
    for rank, form in enumerate(forms):
        sent = [_sent(row, shape, rank, mesh) for row, (shape, _) in zip(rows, form, strict=True)]
        if form[0][0][0]:  # a rank without samples has nothing to add
            yield structure.build(sent)


_Form = list[tuple[list[int], str]]  # of each tensor its shape and its type


def _rows(values: Any, device: torch.device) -> tuple[list[torch.Tensor], Any]:
    tensors, structure = take_apart(values)
    if not tensors:
        raise TypeError(
            f"engine.gather was given {type(values).__name__} without a tensor; it takes a tensor, or a tuple, list, "
            f"dict or dataclass of tensors whose first dimension is the samples"
        )
    rows = [to_device(tensor.detach(), device) for tensor in tensors]
    return [row if row.dim() else row[None] for row in rows], structure


def _forms_of_all(rows: list[torch.Tensor], mesh: Mesh) -> list[_Form]:
    forms: list[Any] = [None] * mesh.dp_size
    dist.all_gather_object(forms, [(list(row.shape), str(row.dtype)) for row in rows], group=mesh.dp_group)
    return forms


def _check_form(first: _Form, other: _Form, rank: int) -> None:
    def shown(form: _Form) -> str:
        return " and ".join(f"{dtype} {shape}" for shape, dtype in form)

    if [(shape[1:], dtype) for shape, dtype in first] != [(shape[1:], dtype) for shape, dtype in other]:
        raise ValueError(
            f"engine.gather was given {shown(first)} on data rank 0 and {shown(other)} on data rank {rank}; only the "
            f"first dimension, the samples, may differ: pad the others to one length"
        )


def _all_gathered(rows: list[torch.Tensor], forms: list[_Form], mesh: Mesh) -> list[torch.Tensor]:
    sizes = ([form[index][0][0] for form in forms] for index in range(len(rows)))
    return [_gathered(row, its_sizes, mesh) for row, its_sizes in zip(rows, sizes, strict=True)]


def _sent(mine: torch.Tensor, shape: list[int], dp_rank: int, mesh: Mesh) -> torch.Tensor:
    """The tensor of one data rank, which has `shape`, on all of them."""
    rows = mine.contiguous() if mesh.dp_rank == dp_rank else mine.new_empty(shape)
    dist.broadcast(on_the_wire(rows), group=mesh.dp_group, group_src=dp_rank)
    return rows


def _gathered(rows: torch.Tensor, sizes: list[int], mesh: Mesh) -> torch.Tensor:
    """The rows of all data ranks, of which each has as many as `sizes` says."""
    padded = rows.new_zeros(max(sizes), *rows.shape[1:])
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather([on_the_wire(part) for part in parts], on_the_wire(padded), group=mesh.dp_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def mean(values: Any, mesh: Mesh, device: torch.device) -> Any:
    """See :meth:`tensorshard.Engine.mean`."""
    named = values if isinstance(values, Mapping) else {"": values}
    totals = [torch.stack(_total(value, device)) for value in named.values()]
    if not totals:
        return {}
    everything = torch.stack(totals)
    if mesh.dp_size > 1:
        all_reduce_(everything, mesh.dp_group, what="the values of engine.mean")
    means = (everything[:, 0] / everything[:, 1]).unbind()
    by_name = {name: _like(values, one) for (name, values), one in zip(named.items(), means, strict=True)}
    return by_name if isinstance(values, Mapping) else by_name[""]


def _total(value: Any, device: torch.device) -> list[torch.Tensor]:
    """The sum of what a data rank was given, and the count that it is a sum over, in fp64."""
    if isinstance(value, torch.Tensor) and value.dim():
        value = value.detach().double().sum(), value.numel()
    elif isinstance(value, Real):
        value = torch.tensor(float(value))
    total, count = sum_and_count(value, device, "engine.mean was given", "be given")
    one = torch.ones((), dtype=torch.float64, device=device)
    return [total.detach().to(device, torch.float64), one if count is None else count.double()]


def _like(value: Any, computed: torch.Tensor) -> Any:
    if isinstance(value, Real):
        return computed.item()
    first = value[0] if isinstance(value, tuple) else value
    return computed.to(first.dtype if first.is_floating_point() else torch.float32)


class Metrics:
    """Metrics of a model's outputs over a loader, in which each sample counts once under any plan.

    Every rank gets the outputs and targets of all data ranks, and updates its own metrics with them. So these need
    neither know of other ranks nor be sums, and all ranks compute the same.

    Args:
        metrics: an object with ``update(outputs, targets)``, ``compute()`` and ``reset()``, or a dict of such.

    Raises:
        TypeError: they are something else.
    """

    def __init__(self, metrics: Any, device: torch.device) -> None:
        is_dict = isinstance(metrics, Mapping) and not _is_metric(metrics)
        self._named = dict(metrics) if is_dict else {"": metrics}
        self._is_dict = is_dict
        for name, metric in self._named.items():
            if not _is_metric(metric):
                what = f"metrics[{name!r}] is" if is_dict else "metrics are"
                raise TypeError(
                    f"{what} {kind_of(metric)}; engine.evaluate takes an object with update(outputs, targets), "
                    f"compute() and reset(), as torchmetrics has them, or a dict of such objects"
                )
            if isinstance(metric, nn.Module):
                metric.to(device)

    def evaluate(self, batches: Iterable[tuple[Any, Any]]) -> Any:
        """What they compute of `batches`: the outputs and targets of all data ranks."""
        metrics = self._named.values()
        for metric in metrics:
            metric.reset()
        try:
            with _alone(metrics):
                for outputs, targets in batches:
                    for metric in metrics:
                        metric.update(outputs, targets)
                values = {name: metric.compute() for name, metric in self._named.items()}
        finally:
            for metric in metrics:
                metric.reset()
        return values if self._is_dict else values[""]


def _is_metric(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("update", "compute", "reset"))


@contextmanager
def _alone(metrics: Iterable[Any]) -> Iterator[None]:
    """A context in which metrics of torchmetrics do not sum over ranks: each rank has seen all samples."""
    modules = [module for metric in metrics if isinstance(metric, nn.Module) for module in metric.modules()]
    asking = {module: vars(module)[_ASKS] for module in modules if _ASKS in vars(module)}
    for module in asking:
        setattr(module, _ASKS, lambda: False)
    try:
        yield
    finally:
        for module, function in asking.items():
            setattr(module, _ASKS, function)


_ASKS = "distributed_available_fn"  # torchmetrics' function that says whether there are other ranks


def gathered_batches(
    loader: Iterable[Any], predict: Callable[[Any], Any], split: ShortBatches, mesh: Mesh, device: torch.device
) -> Iterator[tuple[Any, Any]]:
    """The outputs and targets of all data ranks for each batch of `loader`, a rank's after another's where they are
    padded to different lengths. A collective.

    A rank whose batch is smaller than the others' computes other samples besides, and leaves their outputs out: all of
    them run the same number of micro-batches.
    """
    batches = iter(loader)
    while True:
        batch = next(batches, None)
        if batch is not None:
            batch = pair(batch)
        filled = split.filled_up(batch)
        if filled is None:
            return
        inputs, targets, size = filled
        total = batch_size(inputs)
        outputs = map_tensors(partial(_first_of, size, total), predict(inputs))
        yield from gathered_parts((outputs, targets), mesh, device)


def _first_of(size: int, total: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:size] if tensor.dim() and len(tensor) == total else tensor


def pair(batch: Any) -> tuple[Any, Any]:
    """The inputs and targets of a batch that a loader gave.

    Raises:
        TypeError: it is not a pair.
    """
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        given = f"{len(batch)} parts" if isinstance(batch, tuple | list) else type(batch).__name__
        raise TypeError(
            f"engine.evaluate was given a loader whose batches have the form of {given}; each must be (inputs, "
            f"targets): let its collate_fn make them, or call engine.evaluate(inputs, targets) for each batch"
        )
    inputs, targets = batch
    return inputs, targets


def is_loader(value: Any) -> bool:
    """Whether `value` gives batches, and is no batch itself."""
    return isinstance(value, Iterable) and not isinstance(value, torch.Tensor | tuple | list | Mapping)


def check_loader(loader: Any) -> None:
    """Checks what :meth:`tensorshard.Engine.evaluate` was given in place of inputs and targets.

    Raises:
        TypeError: it is one batch, or cannot be iterated.
        ValueError: it gives some samples twice.
    """
    if not is_loader(loader):
        raise TypeError(
            f"engine.evaluate was given {kind_of(loader)} alone; it takes (inputs, targets), or a loader of "
            f"such batches"
        )
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, DistributedSampler) and not sampler.drop_last:
        twice = sampler.total_size - len(sampler.dataset)  # type: ignore[arg-type]
        if twice:
            raise ValueError(
                f"engine.evaluate was given a DataLoader with a DistributedSampler, which gives {twice} of the "
                f"{len(sampler.dataset)} samples twice, to fill up {sampler.num_replicas} ranks: take "  # type: ignore[arg-type]
                f"engine.loader(dataset, batch_size, shuffle=False), in which each counts once"
            )


@dataclass(frozen=True)
class _Call:
    """A call of an Engine that is under way.

    Args:
        call: its name.
        counts: whether the samples at hand are this rank's own, and not one that stands in.
    """

    call: str
    plan: Plan
    mesh: Mesh
    counts: bool = True


_calls: list[_Call] = []  # not of a thread: backward recomputes in others


@contextmanager
def samples_of(call: str, plan: Plan, mesh: Mesh) -> Iterator[None]:
    """The context of a call of an Engine."""
    _calls.append(_Call(call, plan, mesh))
    try:
        yield
    finally:
        _calls.pop()


@contextmanager
def standing_in() -> Iterator[None]:
    """A context in which the sample at hand stands in where this rank has none."""
    _calls[-1] = replace(_calls[-1], counts=False)
    try:
        yield
    finally:
        _calls[-1] = replace(_calls[-1], counts=True)


def gather_samples(tensor: torch.Tensor, mesh: Mesh | None = None) -> torch.Tensor:
    """`tensor` of all data ranks, in the order of the batch, for a loss that compares samples: contrastive ones, say.

    It is called in a loss function or a forward, on every rank. Compute the loss of the whole batch from what it
    returns, as one process would: losses, gradients and weights are then those of one process under any plan. A loss of
    this rank's own samples against all of them is as exact, and cheaper. Backward sums what all ranks' losses ask of a
    rank's samples.

    Args:
        tensor: of this data rank's samples, the first dimension; features, labels or losses. Ranks may have different
            numbers.
        mesh: ``engine.mesh``, in a loop of your own. Within the calls of an Engine it is known.

    Returns:
        The samples of all data ranks, differentiable. In an epoch's last batch, samples that stand in are left out.

    Raises:
        RuntimeError: no Engine's call is under way, and there is no `mesh`.
        ValueError: the plan cuts the batch into micro-batches, so that samples of different ones cannot be compared;
            `tensor` is a scalar.

    Examples:
        >>> def loss_fn(features, _):
        ...     features = torch.nn.functional.normalize(ts.gather_samples(features))
        ...     scores = features @ features.T / 0.1
        ...     return torch.nn.functional.cross_entropy(scores, torch.arange(len(scores)))
        >>> adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
        >>> engine = ts.parallelize(torch.nn.Linear(16, 4), ts.Plan(zero=3), optimizer=adamw, loss_fn=loss_fn)
        >>> loss = engine.step(torch.randn(8, 16), torch.zeros(8))
    """
    if tensor.dim() == 0:
        raise ValueError(
            "gather_samples was given a scalar, which has no samples; give it a tensor whose first dimension is the "
            "samples, such as losses of reduction='none'"
        )
    if is_alone():  # the model is looked at, by a run on one rank
        return tensor
    if mesh is None:
        if not _calls:
            raise RuntimeError(
                "gather_samples was called outside of an Engine's calls, so it is not known which ranks share the "
                "batch: in a loop of your own call gather_samples(tensor, engine.mesh)"
            )
        call = _calls[-1]
        mesh = call.mesh
        if call.plan.micro_batches > 1 and (call.plan.pp > 1 or call.call in ("step", "replay")):
            raise ValueError(
                f"gather_samples was called under micro_batches={call.plan.micro_batches}: the loss would compare the "
                f"samples of one micro-batch alone, and depend on the number of ranks. Set micro_batches=1 "
                f"(recompute='full' spares memory; with pp take pp_schedule='gpipe'); or, if you want that, call "
                f"tensorshard.distributed.gather_for_sum(tensor, dim=0, group=engine.mesh.dp_group)"
            )
        if not call.counts:
            tensor = tensor[:0]
    return tensor if mesh.dp_size == 1 else gather_for_sum(tensor, 0, mesh.dp_group)
