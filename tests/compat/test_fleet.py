"""Paddle's fleet around modules of torch: a script's loop trains as on one process."""

from typing import Any

import pytest
import torch
from torch import nn

import parity
from rank_pool import RankError
from tensorshard.compat import fleet
from toys import Regular, data, squares


def _strategy(fields: dict[str, Any]) -> fleet.DistributedStrategy:
    strategy = fleet.DistributedStrategy()
    for name, value in fields.items():
        setattr(strategy, name, value)
    return strategy


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def _script(fields: dict[str, Any], optimizer_first: bool, data_ranks: int) -> dict[str, Any]:
    """As in Paddle's documentation, in either order."""
    fleet.init(is_collective=True, strategy=_strategy(fields))
    model = Regular()
    optimizer = _optimizer(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    if optimizer_first:
        optimizer = fleet.distributed_optimizer(optimizer)
        model = fleet.distributed_model(model)
    else:
        model = fleet.distributed_model(model)
        optimizer = fleet.distributed_optimizer(optimizer)
    scaler = fleet.distributed_scaler()
    mesh, losses = fleet.engine().mesh, []
    for step in range(4):
        inputs, targets = (t.chunk(data_ranks)[mesh.dp_rank] for t in data(step))
        if hasattr(model, "train_batch"):
            loss = model.train_batch((inputs, targets), optimizer, scheduler)
        else:
            loss = squares(model(inputs), targets)
            if step % 2:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            optimizer.clear_grad()
            scheduler.step()
        losses.append(fleet.engine().mean(loss.detach()).item())
    return {"losses": losses, "state": fleet.engine().full_state_dict(), "zero": int(fleet.engine().plan.zero)}


def _alone() -> dict[str, Any]:
    model, losses = Regular(), []
    optimizer = _optimizer(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(4):
        loss = squares(model(data(step)[0]), data(step)[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return {"losses": losses, "state": model.state_dict()}


@pytest.mark.parametrize(
    ("fields", "optimizer_first", "data_ranks", "zero"),
    [
        pytest.param({}, True, 2, 0, id="data parallel, optimizer first"),
        pytest.param(
            {"hybrid_configs": {"sharding_degree": 2}, "sharding_configs": {"stage": 3}}, False, 2, 3,
            id="sharding stage 3", marks=pytest.mark.slow,
        ),
        pytest.param(
            {"hybrid_configs": {"mp_degree": 2, "dp_degree": 1}}, False, 1, 0, id="mp", marks=pytest.mark.slow
        ),
    ],
)  # fmt: skip
def test_a_script_trains_as_on_one_process(ranks, fields, optimizer_first, data_ranks, zero):
    alone = _alone()
    found = ranks(2, _script, fields, optimizer_first, data_ranks)
    for one in found:
        assert one["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert one["zero"] == zero
    parity.assert_same_state({**found[0]["state"], "calls": alone["state"]["calls"]}, alone["state"], 1e-5)


class _Chain(nn.Sequential):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(2)
        super().__init__(*(nn.Linear(6, 6) for _ in range(4)))
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator) / 3


def _pipeline(fields: dict[str, Any] | None) -> list[float]:
    model, generator, losses = _Chain(), torch.Generator().manual_seed(3), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.randn(2, 8, 6, generator=generator) for _ in range(4)]
    if fields is not None:
        fleet.init(is_collective=True, strategy=_strategy(fields))
        model = fleet.distributed_model(model, loss_fn=nn.functional.mse_loss)
        optimizer = fleet.distributed_optimizer(optimizer)
        losses = [model.train_batch(batch, optimizer).item() for batch in batches[:3]]
        return [*losses, model.eval_batch(batches[3]).item()]
    for inputs, labels in batches:
        loss = nn.functional.mse_loss(model(inputs), labels)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.slow
def test_a_pipeline_trains_by_train_batch(ranks):
    fields = {"hybrid_configs": {"pp_degree": 2}, "pipeline_configs": {"accumulate_steps": 2}}
    assert ranks(2, _pipeline, fields)[0] == pytest.approx(_pipeline(None), rel=1e-5)


def _used(how: str) -> None:
    strategy = fleet.DistributedStrategy()
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if how == "servers":
        fleet.init()
    if how == "merge":
        strategy.gradient_merge = True
    if how == "misspelt":
        strategy.hybrid_config = {"mp_degree": 2}
    if how == "key":
        strategy.hybrid_configs = {"mp_degre": 2}
    if how == "degree":
        strategy.hybrid_configs = {"mp_degree": 3}
    fleet.init(is_collective=True, strategy=strategy)
    if how == "forward":
        fleet.distributed_model(model)
        model(torch.ones(1, 2))
    if how == "second":
        fleet.distributed_optimizer(optimizer)
        fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    if how == "engine":
        fleet.engine()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("servers", "pass is_collective=True and no role_maker"),
        ("merge", "DistributedStrategy.gradient_merge=True is not there: divide the loss by k_steps"),
        ("misspelt", "DistributedStrategy has no 'hybrid_config'; did you mean hybrid_configs?"),
        ("key", "has the key 'mp_degre', which nobody knows; did you mean mp_degree?"),
        ("degree", "3"),
        ("forward", "is laid out once its optimizer is there"),
        ("second", "was given a second optimizer"),
        ("engine", r"fleet.engine\(\) was called before distributed_model"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(ranks, how, message):
    with pytest.raises(RankError, match=message):
        ranks(1, _used, how)
