"""What a ``loss_fn(model, batch)`` returns: terms of the loss, and values that are averaged beside it."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist

from tensorshard.comm.collectives import all_reduce_
from tensorshard.comm.world import world
from tensorshard.common.words import kind_of
from tensorshard.engine.loss import sum_and_count
from tensorshard.model.batches import listed_samples
from tensorshard.plan.mesh import Mesh
from tensorshard.torch_private.pytree import tree_tensors

MODEL = "model"
"""The name of a loss function's first parameter, by which it asks for the model."""


def takes_model(loss_fn: Callable[..., Any]) -> bool:
    """Whether `loss_fn` is called as ``loss_fn(model, batch)``: its first parameter is called ``model``.

    Raises:
        TypeError: it has a parameter ``model`` without a default in another place.
    """
    try:
        parameters = list(inspect.signature(getattr(loss_fn, "forward", loss_fn)).parameters.values())
    except (TypeError, ValueError):  # of functions in C
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if positional and positional[0].name == MODEL:
        return True
    needed = next((p for p in parameters if p.name == MODEL and p.default is p.empty and p in positional), None)
    if needed is not None:
        listing = ", ".join(parameter.name for parameter in parameters)
        raise TypeError(
            f"loss_fn takes ({listing}); one that calls the model takes it first, as loss_fn(model, batch), and others "
            f"are called as loss_fn(output, targets): let `model` be the first parameter, or give it another name"
        )
    return False


@dataclass(frozen=True)
class LossTerm:
    """A term of a loss with its weight, as a value in the dict that ``loss_fn(model, batch)`` returns.

    Args:
        value: a scalar tensor, the mean over the samples; or a tuple (sum, count) of the number of samples or tokens
            that it is a sum over.
        weight: the loss has the global mean of the term times this. ``engine.metrics`` has the mean itself.

    Examples:
        >>> def loss_fn(model, batch):
        ...     output = model(batch["x"])
        ...     fit = torch.nn.functional.mse_loss(output, batch["y"])
        ...     return {"fit": fit, "size": ts.LossTerm(output.square().mean(), weight=0.01)}
        >>> adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
        >>> engine = ts.parallelize(torch.nn.Linear(16, 4), ts.Plan(), optimizer=adamw, loss_fn=loss_fn)
        >>> loss = engine.step({"x": torch.randn(8, 16), "y": torch.randn(8, 4)})
        >>> sorted(engine.metrics)
        ['fit', 'size']
    """

    value: Any
    weight: float | torch.Tensor = 1.0


@dataclass(frozen=True)
class LossOfTerms:
    """The loss of a (micro-)batch on this rank.

    Args:
        sums: of each term times its weight, with their graph: [terms].
        counts: that they are sums over: [terms].
        shown: sums and counts by name of what is averaged beside the loss: terms of a dict, without weights, and
            metrics; in fp64.
        mean: the sum of those terms that are means over the samples; None if there are none.
        samples: that `mean` is a mean over.
    """

    sums: torch.Tensor
    counts: torch.Tensor
    shown: dict[str, tuple[torch.Tensor, torch.Tensor]]
    mean: torch.Tensor | None = None
    samples: int = 0

    def of_none(self) -> "LossOfTerms":
        """Of a sample that stands in, for no samples: zeros, of counts of zero."""
        shown = {name: (total.new_zeros(()), count.new_zeros(())) for name, (total, count) in self.shown.items()}
        return LossOfTerms(self.sums.nan_to_num(0.0, 0.0, 0.0) * 0, torch.zeros_like(self.counts), shown)


def read_loss(returned: Any, batch: Any, device: torch.device) -> LossOfTerms:
    """The terms of a loss that ``loss_fn(model, batch)`` has `returned`.

    Raises:
        TypeError: it has none of the forms, or a value in it has none.
        ValueError: a term is a mean over the samples of a `batch` that has no number of samples.
    """
    metrics: Mapping[str, Any] = {}
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
        returned, metrics = returned
    is_dict = isinstance(returned, Mapping)
    if is_dict and not returned:
        raise TypeError("loss_fn returned a dict without a term; it must have at least one")
    samples = 0
    sums, counts, means = [], [], []
    shown: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, value in (returned if is_dict else {"": returned}).items():
        term = value if isinstance(value, LossTerm) else LossTerm(value)
        what = f"loss_fn returned for the term {name!r}" if is_dict else "loss_fn returned"
        total, count = sum_and_count(term.value, device, what, "return")
        if count is None:
            samples = _samples(batch, what)
            means.append(total * term.weight)
            total, count = total * samples, torch.tensor(float(samples), device=device)
        total = total if total.dtype in (torch.float32, torch.float64) else total.float()
        sums.append(total * term.weight)
        counts.append(count)
        if is_dict:
            shown[str(name)] = total.detach().double(), count.double()
    for name, value in metrics.items():
        if name in shown:
            raise ValueError(f"loss_fn returned {name!r} as a term of the loss and as a metric; give them two names")
        shown[str(name)] = _metric(name, value, batch, device)
    widest = torch.float64 if any(total.dtype == torch.float64 for total in sums) else torch.float32
    stacked = torch.stack([total.to(device, widest) for total in sums])
    mean = torch.stack([value.to(device, widest) for value in means]).sum() if means else None
    return LossOfTerms(stacked, torch.stack(counts), shown, mean, samples)


def number_of_samples(batch: Any) -> int | None:
    """The first dimension of the tensors in `batch`, or how many entries its lists of samples have; None if they have
    different ones, or there are none."""
    listed = listed_samples(batch)
    if listed is not None:
        return listed
    sizes = {tensor.size(0) for tensor in tree_tensors(batch) if tensor.dim()}
    return sizes.pop() if len(sizes) == 1 else None


def _samples(batch: Any, what: str) -> int:
    samples = number_of_samples(batch)
    if samples:
        return samples
    if samples == 0:
        raise ValueError(
            f"{what} the mean over the samples of this rank's batch, which has none: give at least one on every rank, "
            f"take the batches of engine.loader(dataset, batch_size), or return (sum, count)"
        )
    sizes = sorted({tensor.size(0) for tensor in tree_tensors(batch) if tensor.dim()})
    shown = ", ".join(map(str, sizes))
    given = f"tensors of first dimensions {shown}" if sizes else f"no tensors ({kind_of(batch)})"
    raise ValueError(
        f"{what} a mean over the samples, but the batch has {given}, so it is not known how many these are: return "
        f"(sum, count) of what it is a mean over"
    )


def _metric(name: Any, value: Any, batch: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum and the count of a metric, in fp64."""
    if isinstance(value, torch.Tensor) and value.dim():
        value = value.detach().double().sum(), value.numel()
    elif isinstance(value, Real):
        value = torch.tensor(float(value))
    elif isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], Real):
        value = torch.tensor(float(value[0])), value[1]
    total, count = sum_and_count(value, device, f"loss_fn returned for the metric {name!r}", "return")
    total = total.detach().to(device, torch.float64)
    if count is None:  # as the loss: a mean over the samples
        samples = number_of_samples(batch)
        samples = 1 if samples is None else samples
        return (total * samples if samples else torch.zeros_like(total)), total.new_tensor(float(samples))
    return total, count.double()


class MetricTotals:
    """Sums and counts over micro-batches and data ranks of what is :attr:`LossOfTerms.shown`.

    The first step of training, and of evaluation, lets the ranks agree on the names. A rank may leave some out later.
    """

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self._mesh = mesh
        self._device = device
        self._names: dict[str, list[str]] = {}
        self._sums: dict[str, torch.Tensor] = {}  # [sum, count] of each

    def begin(self) -> None:
        """Forgets the micro-batches so far."""
        self._sums = {}

    def add(self, shown: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Adds a micro-batch."""
        for name, pair in shown.items():
            added = torch.stack(pair)
            self._sums[name] = self._sums[name] + added if name in self._sums else added

    def totals(self, kind: str) -> dict[str, torch.Tensor]:
        """The global sum and count of each, [2] in fp64. A collective of the data ranks.

        Args:
            kind: "step" or "evaluate", which may have different names.

        Raises:
            ValueError: there is a name that the first call of this kind had on no rank.
        """
        names = self._names.get(kind)
        if names is None:
            names = self._names[kind] = self._agreed()
        if unknown := [name for name in self._sums if name not in names]:
            raise ValueError(
                f"loss_fn returned {unknown[0]!r}, which the first call of engine.{kind} did not have on any rank (it "
                f"had {', '.join(map(repr, names)) or 'no terms by name and no metrics'}): return the same names from "
                f"the first one on"
            )
        if not names:
            return {}
        nothing = torch.zeros(2, dtype=torch.float64, device=self._device)
        everything = torch.stack([self._sums.get(name, nothing) for name in names])
        if self._mesh.dp_size > 1:
            all_reduce_(everything, self._mesh.dp_group, what="the metrics of loss_fn")
        return dict(zip(names, everything.unbind(), strict=True))

    def _agreed(self) -> list[str]:
        """The names that any data rank has, in one order."""
        if self._mesh.dp_size == 1 or world().is_simulated or dist.get_backend(self._mesh.dp_group) == "fake":
            return list(self._sums)
        lists: list[Any] = [None] * self._mesh.dp_size
        dist.all_gather_object(lists, list(self._sums), group=self._mesh.dp_group)
        return list(dict.fromkeys(name for names in lists for name in names))
