"""Means, gathered outputs and metrics: what one process computes, in which each sample counts once."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics.classification import MulticlassAUROC, MulticlassConfusionMatrix

import seeds
from engines import engine_of
from toys import Block

CLASSES, SAMPLES, BATCH = 3, 13, 8
ENTROPY = nn.functional.cross_entropy


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        seeds.seed(5)
        self.inlet = nn.Linear(6, 8)
        self.blocks = nn.ModuleList([Block(8) for _ in range(4)])
        self.outlet = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x)


class Seen:
    """A metric that knows nothing of ranks: the targets in their order, and the largest output."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.targets: list[int] = []
        self.largest = 0.0

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        assert len(outputs) == len(targets)
        self.targets += targets.tolist()
        self.largest = max(self.largest, outputs.max().item())

    def compute(self) -> tuple[list[int], float]:
        return self.targets, self.largest


def counted(output: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A mean over the samples of two classes alone."""
    counts = targets != 0
    return (ENTROPY(output, targets, reduction="none") * counts).sum(), counts.sum()


def dataset() -> TensorDataset:
    generator = seeds.generator(0)
    inputs = torch.randn(SAMPLES, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(0, CLASSES, (SAMPLES,), generator=generator))


def _metrics() -> dict[str, Any]:
    confusion, area = MulticlassConfusionMatrix(CLASSES), MulticlassAUROC(CLASSES)
    return {"seen": Seen(), "confusion": confusion, "area": area}


def _evaluated(fields: dict[str, Any]) -> tuple[dict[str, Any], float, float]:
    engine = engine_of(Net(), loss_fn=counted, **fields)
    loader = engine.loader(dataset(), BATCH, shuffle=False)
    found = engine.evaluate(loader, metrics=_metrics())
    shares = torch.utils.data.Subset(dataset(), range(engine.mesh.dp_rank, SAMPLES, engine.mesh.dp_size))
    other = engine.evaluate(DataLoader(shares, 2), metrics=MulticlassAUROC(CLASSES))
    return (
        {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in found.items()},
        (engine.evaluate(loader).item()),
        other.item(),
    )


@pytest.mark.parametrize("fields", [dict(zero=3), dict(tp=2), dict(pp=2, micro_batches=2, zero=3)], ids=str)
def test_a_loader_is_evaluated_as_by_one_process(ranks, fields):
    inputs, targets = dataset().tensors
    outputs = Net()(inputs).detach()
    total, count = counted(outputs, targets)
    for found, loss, area in ranks(4, _evaluated, fields):
        assert found["seen"] == (targets.tolist(), pytest.approx(outputs.max().item(), rel=1e-5))
        for name in ("confusion", "area"):
            metric = _metrics()[name]
            metric.update(outputs, targets)
            torch.testing.assert_close(torch.tensor(found[name]), metric.compute())
        assert area == pytest.approx(found["area"])  # a loader of one's own, of which ranks have different numbers
        assert loss == pytest.approx((total / count).item(), rel=1e-5)


class Padded(nn.Module):
    """A number for each position, of sequences that ranks pad to different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x


class SumOfPositions(Seen):
    def update(self, outputs: torch.Tensor, targets: dict[str, torch.Tensor]) -> None:
        assert outputs.shape == targets["mask"].shape
        self.targets += targets["length"].tolist()
        self.largest += (outputs * targets["mask"]).sum().item()


def _padded(rows: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    x = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=9.0)
    length = torch.tensor([len(row) for row in rows])
    return x, {"mask": torch.arange(x.size(1)) < length[:, None], "length": length}


def _metric_of_padded() -> Any:
    engine = engine_of(Padded(), zero=1)
    rows: Any = [torch.full((1 + index % 5,), float(index)) for index in range(9)]  # the last batch: one sample
    return engine.evaluate(engine.loader(rows, 4, shuffle=False, collate_fn=_padded), metrics=SumOfPositions())


def test_ranks_may_pad_to_different_lengths(ranks):
    for lengths, total in ranks(2, _metric_of_padded):
        assert sorted(lengths) == sorted(1 + index % 5 for index in range(9))
        assert total == 2 * sum(index * (1 + index % 5) for index in range(9))


def _put_together() -> Any:
    engine = engine_of(Net(), zero=1)
    rank = engine.mesh.dp_rank
    rows = torch.arange(rank, dtype=torch.bfloat16) + 10 * rank
    gathered = engine.gather({"rows": rows[:, None], "flags": [rows > 10], "one": torch.tensor(rank)})
    values = {"samples": torch.full((rank, 2), float(rank)), "scalar": torch.tensor(float(rank)), "number": rank}
    means = engine.mean({**values, "counted": (torch.tensor(1.0), rank)})
    return gathered, means, engine.mean(rank), engine.gather(torch.ones(2, 2)).shape


def test_values_of_all_ranks(ranks):
    for gathered, means, number, shape in ranks(4, _put_together):
        assert gathered["rows"].flatten().tolist() == [10, 20, 21, 30, 31, 32]
        assert gathered["rows"].dtype == torch.bfloat16 and gathered["rows"].shape == (6, 1)
        assert gathered["flags"][0].tolist() == [False] + 5 * [True] and gathered["one"].tolist() == [0, 1, 2, 3]
        assert means["samples"].item() == pytest.approx((1 + 4 + 9) / 6) and means["samples"].dtype == torch.float32
        assert means["scalar"].item() == means["number"] == number == 1.5 and isinstance(number, float)
        assert means["counted"].item() == pytest.approx(4 / 6)
        assert shape == (8, 2)


def _losses(fields: dict[str, Any], counts: bool) -> list[float]:
    engine = engine_of(Net(), **fields)
    found = []
    for inputs, targets in engine.loader(dataset(), 4, shuffle=False, drop_last=True):
        with engine.accumulate():
            loss = ENTROPY(engine.model(inputs), targets, reduction="sum")
            given = (loss, len(inputs)) if counts else loss / len(inputs)
            mean = engine.backward(given)
            assert not mean.requires_grad
            found.append(mean.item())
            engine.optimizer.step()
            engine.optimizer.zero_grad()
    return [*found, engine.grad_norm]


@pytest.mark.slow
@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("fields", [dict(zero=3), dict(zero=1, micro_batches=3), dict(tp=2, micro_batches=3)], ids=str)
def test_backward_returns_what_one_process_prints(ranks, fields, counts):
    alone = {name: value for name, value in fields.items() if name == "micro_batches"}
    (expected,) = ranks(1, _losses, alone, counts)
    for found in ranks(4, _losses, fields, counts):
        assert found == pytest.approx(expected, rel=1e-5)
        assert isinstance(found[-1], float) and f"{found[-1]:.3f}"


def _norms() -> list[Any]:
    engine = engine_of(Net(), loss_fn=ENTROPY, zero=2)
    inputs, targets = next(iter(engine.loader(dataset(), 8, shuffle=False)))
    before = engine.grad_norm
    engine.step(inputs, targets)
    return [before, engine.grad_norm]


def test_the_norm_is_a_number_where_nothing_is_clipped(ranks):
    model = Net()
    inputs, targets = (torch.stack(parts) for parts in zip(*(dataset()[i] for i in range(8)), strict=True))
    ENTROPY(model(inputs), targets).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    for before, after in ranks(2, _norms):
        assert before is None and isinstance(after, float) and after == pytest.approx(expected, rel=1e-5)


def _refused() -> list[str]:
    engine = engine_of(Net(), loss_fn=ENTROPY)
    padded = DataLoader(dataset(), 2, sampler=DistributedSampler(dataset(), 2, 0))
    alone = torch.ones(2, 6)
    rank = engine.mesh.rank
    calls = [
        partial(engine.evaluate, alone),
        partial(engine.evaluate, padded),
        partial(engine.evaluate, DataLoader(alone)),
        partial(engine.evaluate, DataLoader(dataset()), metrics={"accuracy": torch.argmax}),
        partial(engine.evaluate, alone, alone, metrics=Seen()),
        partial(engine.gather, "text"),
        partial(engine.gather, torch.ones(2, 2 + rank)),
        partial(engine.mean, "text"),
    ]
    found = []
    for call in calls:
        try:
            call()
        except (TypeError, ValueError) as error:
            found.append(str(error))
    return found


def test_what_cannot_be_measured_is_refused(ranks):
    expected = [
        "was given a Tensor alone; it takes (inputs, targets), or a loader",
        "gives 1 of the 13 samples twice, to fill up 2 ranks: take engine.loader",
        "batches have the form of Tensor; each must be (inputs, targets)",
        "metrics['accuracy'] is a builtin_function_or_method; engine.evaluate takes an object with update",
        "was given targets and metrics",
        "engine.gather was given str without a tensor",
        "torch.float32 [2, 2] on data rank 0 and torch.float32 [2, 3] on data rank 1; only the first dimension",
        "engine.mean was given 'text'",
    ]
    for found in ranks(2, _refused):
        assert len(found) == len(expected)
        for message, part in zip(found, expected, strict=True):
            assert part in message
