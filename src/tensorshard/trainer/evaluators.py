"""What to measure on data that is not trained on."""

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tensorshard.engine.engine import Engine
from tensorshard.model.batches import to_device
from tensorshard.trainer.records import BatchSize

if TYPE_CHECKING:
    from torchmetrics import Metric


class Evaluator(Protocol):
    """Measures something. Collective: every rank has its own share of the data, in as many batches."""

    def evaluate(self, engine: Engine) -> dict[str, float]:
        """The results by name (``val_...``), the same on every rank."""


class LossEvaluator:
    """The mean loss: for a language model, in nats a token.

    Batches are weighted by their samples over all data ranks, so a smaller last batch counts less.

    Args:
        loader: this data rank's batches of ``(inputs, targets)``, the same ones in each evaluation.
        max_batches: how many to use, or None for all.
        name: of the result.
    """

    def __init__(self, loader: Iterable[Any], max_batches: int | None = None, name: str = "val_loss") -> None:
        self.loader = loader
        self.max_batches = max_batches
        self.name = name

    def evaluate(self, engine: Engine) -> dict[str, float]:
        losses: list[Tensor] = []
        samples: list[int] = []
        for inputs, targets in islice(self.loader, self.max_batches):
            losses.append(engine.evaluate(inputs, targets))
            samples.append(BatchSize.of(inputs).samples)
        weights = torch.tensor(samples, device=engine.device)
        dist.all_reduce(weights, group=engine.mesh.dp_group)
        return {self.name: float((torch.stack(losses).double() * weights).sum() / weights.sum())}


class MetricEvaluator:
    """Any ``torchmetrics`` metrics of outputs against targets, such as the accuracy of a classifier.

    Args:
        loader: this data rank's batches of ``(inputs, targets)``, the same ones in each evaluation.
        metrics: by the name of the result; each is updated with ``(outputs, targets)`` and sums over ranks
            itself.
        max_batches: how many to use, or None for all.
    """

    def __init__(self, loader: Iterable[Any], metrics: Mapping[str, "Metric"], max_batches: int | None = None) -> None:
        self.loader = loader
        self.metrics = dict(metrics)
        self.max_batches = max_batches

    @torch.no_grad()
    def evaluate(self, engine: Engine) -> dict[str, float]:
        metrics = {name: metric.to(engine.device) for name, metric in self.metrics.items()}
        for batch in islice(self.loader, self.max_batches):
            inputs, targets = batch
            outputs, targets = engine.predict(inputs), to_device(targets, engine.device)
            for metric in metrics.values():
                metric.update(outputs, targets)
        results = {name: float(metric.compute()) for name, metric in metrics.items()}
        for metric in metrics.values():
            metric.reset()
        return results
