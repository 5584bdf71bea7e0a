"""The last, smaller batch of an epoch: the same on any number of data ranks, also where some get no sample of it."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import parity
import seeds
import tensorshard as ts
from engines import ADAMW, LEVELS, engine_of
from toys import Block, Regular, squares

BATCH, EPOCHS = 8, 2


class Normalized(nn.Module):
    """Batch normalizations, one with running statistics of each kind. In fp64: some biases have a gradient of rounding
    alone, by which Adam would divide."""

    def __init__(self) -> None:
        super().__init__()
        seeds.seed(3)
        self.inlet = nn.Conv1d(1, 4, 3)
        self.norm = nn.BatchNorm1d(4)
        self.samples = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
        self.average = nn.BatchNorm1d(4, momentum=None)
        self.out = nn.Linear(16, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x.double()[:, None])
        return self.out(torch.tanh(self.average(self.samples(self.norm(x)))).flatten(1))


class BatchNormalized(Normalized):
    """The same without an instance normalization, which torch does not compute of no sample."""

    def __init__(self) -> None:
        super().__init__()
        self.samples = nn.Identity()


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        seeds.seed(5)
        self.inlet = nn.Linear(6, 8)
        self.blocks = nn.ModuleList([Block(8) for _ in range(4)])
        self.outlet = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x)


def summed(output: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights = targets[:, 0].abs()
    return ((output - targets).square().mean(1) * weights).sum(), weights.sum()


def largest(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A mean loss that cannot be computed of no sample."""
    return (output - targets).square().mean() + 0.0 * (output.max() - targets.max())


def weighed(loss_fn: Any, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    found = loss_fn(output, targets)
    return found[0] / found[1] if isinstance(found, tuple) else found


def dataset(samples: int) -> TensorDataset:
    generator = seeds.generator(0)
    return TensorDataset(torch.randn(samples, 6, generator=generator), torch.randn(samples, 3, generator=generator))


def alone(model: nn.Module, loss_fn: Any, samples: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    optimizer = ADAMW(model.parameters())
    losses = []
    for _ in range(EPOCHS):
        for x, y in zip(*(t.split(BATCH) for t in dataset(samples).tensors), strict=True):
            loss = weighed(loss_fn, model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, model.state_dict()


def copied(loader: Any) -> Any:
    """Its batches, of which no tensor is the loader's."""
    return ((x.clone(), y.clone()) for x, y in loader)


def _trained(model: Any, loss_fn: Any, samples: int, read: Any, fields: dict[str, Any]) -> tuple:
    engine = engine_of(model(), loss_fn=loss_fn, **fields)
    loader = engine.loader(dataset(samples), BATCH, shuffle=False)
    assert len(loader) == -(-samples // BATCH)
    losses = [engine.step(x, y).item() for _ in range(EPOCHS) for x, y in read(loader)]
    return losses, engine.full_state_dict()


def check(
    ranks: Any, world: int, model: Any, loss_fn: Any, samples: int, tolerance: float = 1e-5, read: Any = iter, **fields
):
    losses, state = ranks(world, _trained, model, loss_fn, samples, read, fields)[0]
    expected, expected_state = alone(model(), loss_fn, samples)
    assert losses == pytest.approx(expected, rel=tolerance)
    if "calls" in state:
        state["calls"] = expected_state["calls"]
    parity.assert_same_state(state, expected_state, tolerance)


@pytest.mark.parametrize("samples", [pytest.param(9, marks=pytest.mark.slow), 11])
@pytest.mark.parametrize("level", LEVELS)
def test_ranks_may_have_no_sample(ranks, level, samples):
    check(ranks, 4, Regular, squares, samples, zero=level)


@pytest.mark.parametrize("loss_fn", [summed, largest])
def test_losses_of_other_forms(ranks, loss_fn):
    check(ranks, 2, Regular, loss_fn, 9, zero=3)


@pytest.mark.parametrize("level", LEVELS)
def test_batch_norms_count_no_sample_twice(ranks, level):
    check(ranks, 4, Normalized, squares, 10, zero=level)


@pytest.mark.parametrize(
    "world, fields",
    [
        (1, dict(micro_batches=4)),
        (2, dict(zero=1, micro_batches=4)),
        (2, dict(zero=3, micro_batches=2, recompute="full")),
        (4, dict(zero=3, dp_replicate=2, micro_batches=2)),
    ],
)
@pytest.mark.parametrize(
    "samples, read",
    [pytest.param(9, iter, marks=pytest.mark.slow), (11, copied), pytest.param(14, list, marks=pytest.mark.slow)],
)
def test_micro_batches_may_be_uneven(ranks, world, fields, samples, read):
    check(ranks, world, Regular, squares, samples, read=read, **fields)


@pytest.mark.parametrize("world, fields", [(1, dict(micro_batches=3)), (4, dict(pp=2, micro_batches=3, zero=1))])
def test_full_batches_may_be_uneven(ranks, world, fields):
    check(ranks, world, Blocks, squares, 12, read=list, **fields)


@pytest.mark.parametrize("fields", [dict(recompute="full"), dict(micro_batches=1), dict(zero=2)], ids=str)
def test_batch_norms_under_other_plans(ranks, fields):
    check(ranks, 2, Normalized, squares, 9, **fields)


@pytest.mark.slow
def test_split_blocks(ranks):
    check(ranks, 4, Blocks, squares, 9, tp=2, zero=1)


@pytest.mark.parametrize("fields", [dict(zero=1), dict(zero=3), dict(pp_schedule="interleaved_1f1b", zero=1)], ids=str)
@pytest.mark.parametrize("samples, read", [pytest.param(9, list, marks=pytest.mark.slow), (11, copied)])
def test_pipelines(ranks, samples, read, fields):
    check(ranks, 4, Blocks, squares, samples, read=read, pp=2, micro_batches=4, **fields)


def test_pipeline_alone(ranks):
    check(ranks, 2, Blocks, squares, 11, pp=2, micro_batches=4)


def _compared(output: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Each sample is compared with all of the batch."""
    everyone = ts.distributed.gather_for_sum(output, 0, torch.distributed.group.WORLD)
    return torch.cdist(output, everyone, 1).sum() + (output - targets).square().sum(), len(output)


def _coupled(samples: int) -> tuple:
    engine = engine_of(Regular(), loss_fn=_compared, zero=1)
    losses = [engine.step(x, y).item() for x, y in engine.loader(dataset(samples), BATCH, shuffle=False)]
    return losses, engine.full_state_dict()


def test_losses_that_gather_get_the_samples_alone(ranks):
    (losses, state), (expected, expected_state) = ranks(4, _coupled, 11)[0], ranks(1, _coupled, 11)[0]
    assert losses == pytest.approx(expected, rel=1e-5)
    parity.assert_same_state(state, expected_state, 1e-5)


def _evaluated(fields: dict[str, Any]) -> list[float]:
    engine = engine_of(Blocks(), **fields)
    return [engine.evaluate(x, y).item() for x, y in engine.loader(dataset(11), BATCH, shuffle=False)]


@pytest.mark.parametrize("fields", [dict(zero=3), dict(pp=2, micro_batches=4, zero=3), dict(tp=2)], ids=str)
def test_evaluations(ranks, fields):
    parts = zip(*(t.split(BATCH) for t in dataset(11).tensors), strict=True)
    expected = [squares(Blocks()(x), y).item() for x, y in parts]
    for found in ranks(4, _evaluated, fields):
        assert found == pytest.approx(expected, rel=1e-5)


def _own_loop(samples: int, form: str, read: Any = iter) -> Any:
    engine = engine_of(BatchNormalized(), zero=1)
    losses = []
    for x, y in read(engine.loader(dataset(samples), BATCH, shuffle=False)):
        output = engine.model(x)
        total = (output - y).square().sum() / 3
        try:
            engine.backward((total, len(x)) if form == "sum" else total / max(len(x), 1))
        except ValueError as error:
            return str(error)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        losses.append(total.item())
    return engine.full_state_dict()


def test_loops_of_ones_own_give_sums(ranks):
    parity.assert_same_state(ranks(4, _own_loop, 10, "sum")[0], _alone_once(10), 1e-5)


def _alone_once(samples: int) -> dict[str, torch.Tensor]:
    model = BatchNormalized()
    optimizer = ADAMW(model.parameters())
    for x, y in zip(*(t.split(BATCH) for t in dataset(samples).tensors), strict=True):
        squares(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("read", [iter, pytest.param(list, marks=pytest.mark.slow)])
def test_loops_of_ones_own_weigh_means_by_their_samples(ranks, read):
    parity.assert_same_state(ranks(2, _own_loop, 11, "mean", read)[0], _alone_once(11), 1e-5)


def _mean_losses() -> list[float]:
    """Of a loop of one's own, with a penalty, which counts once."""
    engine = engine_of(Regular(), zero=1)
    losses = []
    for x, y in engine.loader(dataset(9), BATCH, shuffle=False):
        loss = squares(engine.model(x), y) + 1e-2 * sum(p.square().sum() for p in engine.model.parameters())
        losses.append(engine.backward(loss).item())
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return [*losses, engine.grad_norm]


def test_ranks_without_samples_count_nothing_in_means(ranks):
    expected = ranks(1, _mean_losses)[0]
    for found in ranks(4, _mean_losses):
        assert found == pytest.approx(expected, rel=1e-5)


def test_loops_of_ones_own_refuse_means_of_tensors_that_are_not_the_loaders(ranks):
    for rank, message in enumerate(ranks(2, _own_loop, 11, "mean", copied)):
        assert f"the mean of this rank's {2 - rank} of the epoch's last 3 samples" in message
        assert "not called with that batch alone" in message
        assert "(sum, count)" in message and "drop_last=True" in message


def _without_samples() -> str:
    try:
        engine_of(Normalized()).model(torch.zeros(0, 6))
    except IndexError as error:
        return "".join(error.__notes__)
    return "nothing was raised"


def test_models_that_cannot_run_without_samples_say_so(ranks):
    message = ranks(1, _without_samples)[0]
    assert "this rank has no sample of the batch" in message and "drop_last=True" in message


def _packed(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    return torch.cat([x for x, _ in samples])


def _refused() -> list[str]:
    found = []
    plan = ts.Plan(zero=1, pp=2, micro_batches=2)
    engine = ts.parallelize(Normalized(), plan, optimizer=ADAMW, loss_fn=squares, sample_inputs=torch.randn(2, 6))
    try:
        engine.loader(dataset(11), BATCH)
    except ValueError as error:
        found.append(str(error))
    engine.loader(dataset(12), BATCH)
    engine.loader(dataset(11), BATCH, drop_last=True)
    packed = engine_of(Regular()).loader(
        dataset(9), BATCH, collate_fn=lambda samples: torch.cat([x for x, _ in samples])
    )
    few = engine_of(Regular(), micro_batches=4)
    try:
        few.step(*next(iter(few.loader(dataset(12), 12))))
    except ValueError as error:
        found.append(str(error))
    try:
        list(packed)
    except TypeError as error:
        found.append(str(error))
    return found


def test_what_cannot_be_cut_is_refused(ranks):
    for norm, few, packed in ranks(4, _refused):
        assert "each of 4 data ranks 3 samples, fewer than micro_batches=4" in few and "at least 16" in few
        assert "3 samples, too few for micro_batches=2 on 2 data ranks" in norm
        assert "'norm' (BatchNorm1d)" in norm and "drop_last=True" in norm
        assert "cannot be cut to none" in packed


def _resumed() -> list[int]:
    engine = engine_of(Regular(), partial(torch.optim.SGD, lr=0.1))
    loader = engine.loader(dataset(11), BATCH, shuffle=False)
    loader.load_state_dict({"epoch": 0, "samples_consumed": 8})
    return [len(x) for x, _ in loader]


def test_an_epoch_may_go_on_with_its_last_batch(ranks):
    assert ranks(4, _resumed) == [[1], [1], [1], [0]]
