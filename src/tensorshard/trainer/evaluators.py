"""What to measure on data that is not trained on."""

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from tensorshard.engine.engine import Engine

if TYPE_CHECKING:
    from torchmetrics import Metric


class Evaluator(Protocol):
    """Measures something. Collective: every rank has its own share of the data, in as many batches."""

    def evaluate(self, engine: Engine) -> dict[str, float]:
        """The results by name (``val_...``), the same on every rank."""


class LossEvaluator:
    """The mean loss: for a language model, in nats a token.

    It is that of all samples (or tokens, where the loss counts them), so a smaller last batch counts less.

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
        return {self.name: float(engine.evaluate(islice(self.loader, self.max_batches)))}


class MetricEvaluator:
    """Any ``torchmetrics`` metrics of outputs against targets, such as the accuracy of a classifier.

    Args:
        loader: this data rank's batches of ``(inputs, targets)``, the same ones in each evaluation.
        metrics: by the name of the result; each is updated with the outputs and targets of all ranks, see
            :meth:`tensorshard.Engine.evaluate`.
        max_batches: how many to use, or None for all.
    """

    def __init__(self, loader: Iterable[Any], metrics: Mapping[str, "Metric"], max_batches: int | None = None) -> None:
        self.loader = loader
        self.metrics = {name: _OfLogits(metric) for name, metric in metrics.items()}
        self.max_batches = max_batches

    def evaluate(self, engine: Engine) -> dict[str, float]:
        found = engine.evaluate(islice(self.loader, self.max_batches), metrics=self.metrics)
        return {name: float(value) for name, value in found.items()}


class _OfLogits(nn.Module):
    """A metric of the logits, if the model's output is an object that has them, as those of transformers are."""

    def __init__(self, metric: "Metric") -> None:
        super().__init__()
        self.metric = metric

    def update(self, outputs: Any, targets: Any) -> None:
        self.metric.update(getattr(outputs, "logits", outputs), targets)

    def compute(self) -> Any:
        return self.metric.compute()

    def reset(self) -> None:
        self.metric.reset()
