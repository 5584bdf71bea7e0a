"""torch's ZeroRedundancyOptimizer over split and replicated parameters: saved, resumed, grouped, refused."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import seeds
import tensorshard as ts
from article import CLASSES, STEPS, ArticleNet, article_samples, assert_same_weights, converted_net, train_article
from rank_pool import RankError


def _zero_save(group_size: int, optimizer_class, path: str) -> None:
    ts.init_process_group(group_size)
    model = DistributedDataParallel(converted_net(1))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class, lr=0.05)
    assert isinstance(optimizer, ZeroRedundancyOptimizer) and len(optimizer.param_groups[0]["params"]) == 6
    held = [len(local.state_dict()["param_groups"][0]["params"]) for local in (optimizer.optim, optimizer.split_optim)]
    assert held[0] < 4 and held[1] == 2  # some of the whole parameters, this rank's part of the split ones
    train_article(model, optimizer, torch.amp.GradScaler("cpu", enabled=False), 0, 3)
    if dist.get_rank() == 0:
        optimizer.consolidate_state_dict()
        consolidated = optimizer.state_dict()
    else:
        optimizer.consolidate_state_dict()
        with pytest.raises(RuntimeError, match="not been consolidated"):
            optimizer.state_dict()
    states = {
        "model": ts.collect_state_dict(model.module),
        "optimizer": ts.collect_state_dict(optimizer, rank0_only=True),
    }
    assert bool(states["optimizer"]) == (dist.get_rank() == 0)
    if dist.get_rank() == 0:
        assert states["optimizer"]["state"].keys() == consolidated["state"].keys() == set(range(6))
        shapes = (
            [s["exp_avg"].shape for s in consolidated["state"].values()] if "exp_avg" in str(consolidated) else None
        )
        assert shapes is None or shapes[4] == (CLASSES, 4)
        torch.save(states, path)


def _zero_resume(group_size: int, optimizer_class, path: str, zero: bool, how: str) -> dict[str, torch.Tensor]:
    ts.init_process_group(group_size)
    model = converted_net(1)
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    model = DistributedDataParallel(model)
    if zero:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class, lr=0.7)
    else:
        optimizer = optimizer_class(model.parameters(), lr=0.7)
    state = saved["optimizer"]
    if how == "relocated":
        state = ts.relocate_state_dict(optimizer, state if dist.get_rank() % group_size == 0 else None)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.05
    train_article(model, optimizer, torch.amp.GradScaler("cpu", enabled=False), 3, STEPS)
    return ts.collect_state_dict(model.module, rank0_only=False)


def _adam_reference() -> dict[str, torch.Tensor]:
    seeds.seed(0)
    model = ArticleNet(parallel=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(STEPS):
        images, targets = article_samples(step, 6)
        nn.functional.cross_entropy(model(images), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize(("zero", "how"), [(True, "whole"), (True, "relocated"), (False, "relocated")])
def test_zero_saves_and_resumes(ranks, tmp_path, zero, how):
    path = str(tmp_path / "state.pt")
    ranks(2, _zero_save, 2, torch.optim.AdamW, path)
    plain = torch.optim.AdamW(ArticleNet(parallel=False).parameters())
    plain.load_state_dict(torch.load(path, weights_only=True)["optimizer"])  # that of a model that is not parallel
    for state in ranks(2, _zero_resume, 2, torch.optim.AdamW, path, zero, how):
        assert_same_weights(state, _adam_reference())


def _zero_groups_and_buckets() -> None:
    ts.init_process_group(2)
    results = []
    for zero in (False, True):
        model = DistributedDataParallel(converted_net(1))
        whole = [p for name, p in model.named_parameters() if "fc" not in name]
        groups = [{"params": whole, "lr": 0.1}, {"params": list(model.module.fc.parameters())[:1], "lr": 0.3}]
        if zero:
            optimizer = ZeroRedundancyOptimizer(groups, torch.optim.SGD, parameters_as_bucket_view=True, lr=9.0)
        else:
            optimizer = torch.optim.SGD(groups, lr=9.0)
        optimizer.add_param_group({"params": list(model.module.fc.parameters())[1:], "lr": 0.2})
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        train_article(model, optimizer, scaler, 0, 2)
        for group in optimizer.param_groups:  # as a schedule would
            group["lr"] *= 0.5
        train_article(model, optimizer, scaler, 2, 4)
        results.append(ts.collect_state_dict(model.module, rank0_only=False))
    assert_same_weights(results[1], results[0], tolerance=1e-7)


def test_zero_with_groups_schedules_and_buckets(ranks):
    ranks(2, _zero_groups_and_buckets)


def _zero_with_errors(what: str) -> None:
    ts.init_process_group(2)
    model = converted_net(1)
    if what == "overlap":
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    state = optimizer.param_groups[0] | {"params": list(range(6))}
    optimizer.load_state_dict({"state": {4: {"momentum_buffer": torch.ones(3, 3)}}, "param_groups": [state]})


def test_zero_refuses(ranks):
    with pytest.raises(RankError, match="overlap_with_ddp=True was given for a model with split parameters"):
        ranks(2, _zero_with_errors, "overlap")
    with pytest.raises(
        RankError, match=r"momentum_buffer of parameter 4: a tensor of shape \[3, 3\] was given where \[7, 4\]"
    ):
        ranks(2, _zero_with_errors, "shape")
