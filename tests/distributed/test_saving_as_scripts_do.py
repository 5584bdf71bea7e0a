"""TorchShard's scripts save `optimizer.state_dict()` of the first rank: what all ranks resume from is right."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import tensorshard as ts
from article import SGD, STEPS, article_optimizer, assert_same_weights, converted_net, train_article


def _train(group_size: int, dim: int, zero: bool, path: str, start: int, stop: int) -> dict[str, torch.Tensor]:
    """As projects/imagenet of TorchShard does it."""
    ts.distributed.init_process_group(group_size=group_size)
    model = DistributedDataParallel(converted_net(dim))
    optimizer = article_optimizer(model.parameters(), zero, **SGD)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    if start:
        checkpoint = torch.load(path)
        model.load_state_dict(ts.relocate_state_dict(model, checkpoint["state_dict"]))
        optimizer.load_state_dict(checkpoint["optimizer"])
    train_article(model, optimizer, scaler, start, stop)
    state_dict = model.state_dict()
    state_dict = ts.collect_state_dict(model, state_dict)
    if dist.get_rank() == 0:
        torch.save({"state_dict": state_dict, "optimizer": optimizer.state_dict()}, path)
        if not zero:
            momenta = [state["momentum_buffer"].shape for state in optimizer.state_dict()["state"].values()]
            assert torch.Size([7, 4]) in momenta
            train_one = next(p for p in optimizer.param_groups[0]["params"] if ts.get_parallel_dim(p) is not None)
            assert optimizer.state[train_one]["momentum_buffer"].shape == train_one.shape  # its own is what it was
    return state_dict


@pytest.mark.parametrize("zero", [False, True])
def test_resuming_from_what_a_script_saved(ranks, tmp_path, zero):
    path = str(tmp_path / "checkpoint.pt")
    expected = ranks(2, _train, 2, 1, zero, path, 0, STEPS)
    ranks(2, _train, 2, 1, zero, path, 0, 2)
    for state in ranks(2, _train, 2, 1, zero, path, 2, STEPS):
        assert_same_weights(state, expected[0], tolerance=1e-6)
