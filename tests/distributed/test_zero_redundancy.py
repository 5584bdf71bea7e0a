"""torch's ``ZeroRedundancyOptimizer`` given split parameters, where the article's examples do not reach."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import tensorshard as ts
from rank_pool import RankError
from shards import full


def _layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 6)


def _split_layer() -> nn.Module:
    layers = nn.Sequential(_layer())
    ts.nn.ParallelLinear.convert_parallel_linear(layers, dim=1)
    return layers[0]


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        input = torch.randn(5, 4, generator=generator)

        def loss(input: torch.Tensor = input) -> torch.Tensor:
            optimizer.zero_grad()
            output = model(input)
            if output.size(-1) < 6:
                output = ts.distributed.gather(output, dim=-1)
            result = output.square().mean()
            result.backward()
            return result

        optimizer.step(loss)


def _of_split_parameters_alone() -> None:
    ts.init_process_group(2)
    whole = nn.Sequential(_layer())
    _steps(whole, torch.optim.AdamW(whole.parameters(), lr=0.1))
    model = nn.Sequential(_split_layer())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    _steps(model, optimizer)
    assert calls == ["before", "after"] * 3
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
    for found, expected in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(full(found), expected)
    optimizer.consolidate_state_dict()
    if dist.get_rank() == 0:
        state = optimizer.state_dict()
        assert state["param_groups"][0]["params"] == [0, 1] and state["state"][0]["exp_avg"].shape == (6, 4)


def test_of_split_parameters_alone(ranks):
    ranks(2, _of_split_parameters_alone)


def _with_a_parameter_twice() -> None:
    ts.init_process_group(2)
    model = nn.Sequential(_layer(), _split_layer())
    optimizer = ZeroRedundancyOptimizer(model[0].parameters(), torch.optim.SGD, lr=0.1)
    assert not hasattr(optimizer, "split_optim")
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    before = [list(group["params"]) for group in optimizer.param_groups]
    try:
        optimizer.add_param_group({"params": list(model[1].parameters())})
    finally:
        assert [group["params"] for group in optimizer.param_groups] == before


def test_refuses_a_split_parameter_in_two_groups(ranks):
    with pytest.raises(RankError, match="some parameters appear in more than one parameter group"):
        ranks(2, _with_a_parameter_twice)


def _with_a_mixture() -> None:
    ts.init_process_group(2)
    layer = _split_layer()
    ZeroRedundancyOptimizer([layer.weight, {"params": [layer.bias]}], torch.optim.SGD, lr=0.1)


def test_leaves_it_to_torch_to_refuse_parameters_beside_groups(ranks):
    with pytest.raises(RankError, match="should be an iterable of Tensors or dicts"):
        ranks(2, _with_a_mixture)
