"""What is changed in torch while a world of groups stands, and that it is changed back."""

from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad

import tensorshard as ts


def _torch_is_left_as_it_was() -> None:
    def places():
        return [
            ZeroRedundancyOptimizer.__init__,
            DistributedDataParallel.__init__,
            torch.optim.Optimizer.load_state_dict,
            clip_grad._get_total_norm,
            torch.amp.GradScaler._unscale_grads_,
        ]

    ts.distributed.destroy_process_group()  # what earlier tests left in this process
    before = places()
    assert all("tensorshard" not in place.__module__ for place in before)
    ts.init_process_group(2)
    assert all(now is not then for now, then in zip(places(), before, strict=True))
    plain = ZeroRedundancyOptimizer(nn.Linear(2, 2).parameters(), torch.optim.SGD, lr=0.1)
    assert type(plain) is ZeroRedundancyOptimizer and not hasattr(plain, "split_optim")
    overlapping = ZeroRedundancyOptimizer(nn.Linear(2, 2).parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    assert overlapping._overlap_with_ddp
    ts.distributed.destroy_process_group()
    assert places() == before


def _torch_ends_the_world() -> None:
    ts.distributed.destroy_process_group()
    original = clip_grad._get_total_norm
    ts.init_process_group(2)
    ours = clip_grad._get_total_norm
    assert ours is not original
    dist.destroy_process_group()  # torch's: nobody tells us
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.full((1,), 3.0)
    assert nn.utils.clip_grad_norm_(parameter, 1.0) == 3.0
    assert clip_grad._get_total_norm is original
    assert ours([parameter.grad]) == parameter.grad  # who kept ours has torch's


def _somebody_wraps_in_turn() -> None:
    ts.distributed.destroy_process_group()
    original = clip_grad._get_total_norm
    ts.init_process_group(2)
    ours = clip_grad._get_total_norm

    def theirs(*args):
        return ours(*args)

    with mock.patch.object(clip_grad, "_get_total_norm", theirs):
        ts.distributed.destroy_process_group()
        assert clip_grad._get_total_norm is theirs
        assert theirs([torch.ones(4)]) == 2.0
    clip_grad._get_total_norm = original


def test_torch_is_left_as_it_was(ranks):
    ranks(2, _torch_is_left_as_it_was)
    ranks(2, _torch_ends_the_world)
    ranks(2, _somebody_wraps_in_turn)
    ranks(2, ts.init_process_group, 2)  # and leaves its world with the groups in it
    ranks(2, _torch_is_left_as_it_was)
