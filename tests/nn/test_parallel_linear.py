"""ParallelLinear against nn.Linear, and converting a model's layers."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import tensorshard.distributed as tsd
from rank_pool import RankError
from shards import full
from tensorshard.comm.marks import get_parallel_dim, register_parallel_dim
from tensorshard.compat.state import collect_state_dict, relocate_state_dict
from tensorshard.nn import ParallelLinear, RegisterParallelDim, init
from tensorshard.nn.functional import parallel_linear

WORLDS = [
    pytest.param(2, 2, id="2 ranks"),
    pytest.param(4, 4, id="4 ranks"),
    pytest.param(4, 2, id="2 groups of 2"),
]


def _assert_same(parallel: torch.Tensor, whole: torch.Tensor, parameter: torch.Tensor | None = None) -> None:
    torch.testing.assert_close(full(parallel, parameter), whole, rtol=1e-12, atol=1e-13)


def _compare(group_size: int) -> None:
    tsd.init_process_group(group_size)
    for dim in (0, 1, -1):
        for bias in (True, False):
            for in_features, out_features, shape in ((8, 12, (5,)), (7, 9, (2, 3)), (3, 5, ())):
                torch.manual_seed(7)
                whole = nn.Linear(in_features, out_features, bias, dtype=torch.float64)
                torch.manual_seed(7)
                layer = ParallelLinear(in_features, out_features, bias, dim, dtype=torch.float64)
                _assert_same(layer.weight, whole.weight)
                torch.manual_seed(tsd.get_data_parallel_rank())
                x = torch.randn(*shape, in_features, dtype=torch.float64)
                inputs = [x.clone().requires_grad_() for _ in range(2)]
                expected = whole(inputs[0])
                output = layer(inputs[1])
                assert get_parallel_dim(output) == (None if dim == 0 else -1)
                if dim != 0:
                    output = tsd.gather(output, size=out_features)
                torch.testing.assert_close(output, expected)
                expected.square().sum().backward()
                output.square().sum().backward()
                torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-12, atol=1e-13)
                _assert_same(layer.weight.grad, whole.weight.grad, layer.weight)
                if bias:
                    _assert_same(layer.bias, whole.bias)
                    _assert_same(layer.bias.grad, whole.bias.grad, layer.bias)
                else:
                    assert layer.bias is None


@pytest.mark.slow_cases("4 ranks")
@pytest.mark.parametrize(("world_size", "group_size"), WORLDS)
def test_weights_values_and_gradients(ranks, world_size, group_size):
    ranks(world_size, _compare, group_size)


def _build_mlp(dims: tuple[int | None, int | None]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        ParallelLinear(6, 10, dim=dims[0]),
        nn.GELU(),
        RegisterParallelDim(-1),
        ParallelLinear(10, 6, dim=dims[1]),
    )


def _train_mlp(marked: bool) -> None:
    tsd.init_process_group(2)
    model = _build_mlp((1, 0))
    if not marked:
        model[2] = nn.Identity()
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Identity(), nn.Linear(10, 6))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, reference)]
    for _ in range(5):
        x = torch.randn(4, 6)
        for network, optimizer in zip((model, reference), optimizers, strict=True):
            optimizer.zero_grad()
            network(x).square().mean().backward()
            optimizer.step()
    for parallel, whole in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(parallel), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("marked", [True, False])
def test_an_mlp_trains_as_on_one_device(ranks, marked):
    ranks(2, _train_mlp, marked)


def _parameters() -> None:
    tsd.init_process_group(2)
    column, row = ParallelLinear(6, 10, dim=1), ParallelLinear(6, 10, dim=0)
    for parameter in (column.weight, column.bias, row.weight, row.bias):
        assert type(parameter) is nn.Parameter
    assert [tuple(p.shape) for p in (column.weight, column.bias, row.weight, row.bias)] == [
        (5, 6),
        (5,),
        (10, 3),
        (10,),
    ]
    assert [get_parallel_dim(p) for p in (column.weight, column.bias, row.weight, row.bias)] == [1, 1, 0, 0]
    assert row.weight.untyped_storage().nbytes() == row.weight.numel() * 4  # the whole weight is not kept alive
    duplicate = copy.deepcopy(nn.Sequential(column))
    torch.testing.assert_close(duplicate(torch.ones(1, 6)), column(torch.ones(1, 6)))
    assert "in_features=6, out_features=10, bias=True, dim=1" in repr(column)
    torch.manual_seed(dist.get_rank())  # ranks that forgot to agree on a seed still hold one bias
    bias = ParallelLinear(6, 10, dim=0).bias
    others = [torch.empty(10) for _ in range(2)]
    dist.all_gather(others, bias.detach())
    assert torch.equal(*others)


def test_parameters_are_plain_shards(ranks):
    ranks(2, _parameters)


def test_without_a_dim_it_is_a_linear_layer():
    torch.manual_seed(0)
    plain = nn.Linear(3, 4)
    torch.manual_seed(0)
    layer = ParallelLinear(3, 4)
    x = torch.randn(2, 3)
    assert torch.equal(layer(x), plain(x))
    assert type(layer.weight) is nn.Parameter
    assert torch.equal(parallel_linear(x, plain.weight, plain.bias), plain(x))
    with pytest.raises(RuntimeError, match="dim=None: it splits nothing and has no group"):
        _ = layer.group


def _functional_on_local_parts() -> None:
    tsd.init_process_group(2)
    weight, bias, x = torch.randn(8, 6), torch.randn(8), torch.randn(3, 6)
    expected = nn.functional.linear(x, weight, bias)
    columns = parallel_linear(x, tsd.scatter(weight, 0), tsd.scatter(bias, 0), dim=1)
    torch.testing.assert_close(tsd.gather(columns), expected)
    for input in (x, tsd.scatter(x)):
        torch.testing.assert_close(parallel_linear(input, tsd.scatter(weight, 1), bias, dim=0), expected)


def test_the_functional_form_takes_local_parts(ranks):
    ranks(2, _functional_on_local_parts)


def _under_autocast() -> None:
    tsd.init_process_group(2)
    whole = nn.Linear(6, 8)
    x = torch.randn(4, 6, requires_grad=True)
    for dim in (0, 1):
        layer = ParallelLinear.from_linear(whole, dim)
        with torch.autocast("cpu", torch.bfloat16):
            output = layer(x)
            assert output.dtype == torch.bfloat16
        output.sum().backward()
        assert layer.weight.grad.dtype == torch.float32 and x.grad.dtype == torch.float32


def test_autocast(ranks):
    ranks(2, _under_autocast)


def _on_explicit_groups() -> None:
    torch.manual_seed(0)
    whole = nn.Linear(6, 9)
    x = torch.randn(2, 6)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    pair = [dist.new_group([0, 3]), dist.new_group([1, 2])][dist.get_rank() in (1, 2)]
    for group in (mesh["tp"], mesh["dp"], pair):
        layer = ParallelLinear.from_linear(whole, 1, group)
        torch.testing.assert_close(tsd.gather(layer(x), -1, group), whole(x))
    assert layer.group is pair
    dist.barrier()
    parallel_linear(x, layer.weight, dim=1, group=mesh["tp"])


def test_explicit_groups(ranks):
    with pytest.raises(
        RankError, match=r"weight is split over the ranks \[0, 3\], and group= names the ranks \[0, 1\]"
    ):
        ranks(4, _on_explicit_groups)


def _bad(case: str) -> None:
    tsd.init_process_group(2)
    dist.barrier()
    x = torch.randn(2, 6)
    column, row = ParallelLinear(6, 8, dim=1), ParallelLinear(6, 8, dim=0)
    if case == "part to column":
        column(tsd.scatter(x))
    elif case == "output to column":
        ParallelLinear(8, 4, dim=1)(column(x))
    elif case == "unmarked shard to column":
        column(x[:, :3])
    elif case == "shard to full":
        ParallelLinear(3, 4)(tsd.scatter(x))
    elif case == "whole marked as part":
        row(register_parallel_dim(x, -1))
    elif case == "neither":
        row(x[:, :4])


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "part to column",
            r"marked as split along its last dimension was given to a layer that splits its output",
        ),
        ("output to column", r"put it together with tensorshard.distributed.gather\(x, dim=-1\)"),
        ("unmarked shard to column", "needs its full input"),
        ("shard to full", "given to parallel_linear with dim=None, which needs the full input"),
        (
            "whole marked as part",
            r"\[2, 6\] marked as split along its last dimension was given to rank 0 of 2",
        ),
        ("neither", "needs all 6 input features, or its shard of 3"),
    ],
)
def test_whole_and_split_inputs_are_told_apart(ranks, case, message):
    with pytest.raises(RankError, match=message):
        ranks(2, _bad, case)


def test_bad_arguments():
    with pytest.raises(ValueError, match="dim=3 was given for ParallelLinear"):
        ParallelLinear(2, 2, dim=3)
    with pytest.raises(RuntimeError, match="no model-parallel group exists yet"):
        ParallelLinear(2, 2, dim=1)
    with pytest.raises(TypeError, match="RegisterParallelDim was given a str: it marks tensors"):
        RegisterParallelDim(1)("x")


def _initialise_as_one_device_would() -> None:
    tsd.init_process_group(2)
    layer = ParallelLinear(6, 9, dim=1)
    for parameter in (layer.weight, layer.weight.data):
        torch.manual_seed(5)
        init.shard_init_helper_(nn.init.xavier_normal_, parameter, gain=2.0)
        torch.manual_seed(5)
        expected = nn.init.xavier_normal_(torch.empty(9, 6), gain=2.0)
        torch.testing.assert_close(full(layer.weight), expected)
    plain = torch.empty(3)
    assert init.shard_init_helper_(nn.init.constant_, plain, 4.0).tolist() == [4.0] * 3


def test_init(ranks):
    ranks(2, _initialise_as_one_device_would)


def _watch_backward() -> list[str]:
    tsd.init_process_group(2)
    layer = ParallelLinear(256, 256, dim=1)
    output = layer(torch.randn(64, 256, requires_grad=True)).sum()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        output.backward()
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events if event.name in ("aten::mm", "aten::add_") or "gloo" in event.name]


def test_the_input_gradient_travels_while_the_weight_gradient_is_computed(ranks):
    names = ranks(2, _watch_backward)[0]
    sent = next(i for i, name in enumerate(names) if "gloo" in name)
    assert names[:sent] == ["aten::mm"] and "aten::mm" in names[sent:]


def _under_fsdp() -> None:
    tsd.init_process_group(2)
    model = nn.Sequential(nn.LayerNorm(6), *_build_mlp((1, 0)))
    torch.manual_seed(0)
    reference = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 10), nn.GELU(), nn.Identity(), nn.Linear(10, 6))
    fully_shard(model, mesh=tsd.get_mesh()["dp"])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, reference)]
    for step in range(4):
        torch.manual_seed(step)
        x = torch.randn(2, 3, 6)
        mine = x[tsd.get_data_parallel_rank()]
        for network, optimizer, batch in zip((model, reference), optimizers, (mine, x), strict=True):
            optimizer.zero_grad()
            network(batch).square().mean().backward()
            optimizer.step()
    state = collect_state_dict(model, rank0_only=False)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
    fresh = {name: torch.randn_like(value) for name, value in reference.state_dict().items()}
    dist.broadcast_object_list(sent := [fresh], src=0)
    model.load_state_dict(relocate_state_dict(model, sent[0]))
    for name, value in collect_state_dict(model, rank0_only=False).items():
        torch.testing.assert_close(value, sent[0][name])


def test_under_fsdp2(ranks):
    ranks(4, _under_fsdp)
