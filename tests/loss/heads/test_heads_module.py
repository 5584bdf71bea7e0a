"""ParallelLinearCrossEntropy: initial weights, loss, largest logits, gathered inputs, states, margins, sampling."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_heads_functional import WORLDS, reference
from torch import nn

import tensorshard.distributed as tsd
from rank_pool import RankError
from shards import full
from tensorshard.compat.state import collect_state_dict, relocate_state_dict
from tensorshard.loss import tiles
from tensorshard.loss.heads import head_module
from tensorshard.nn import ArcFace, CosFace, ParallelLinearCrossEntropy


def _train(group_size: int) -> None:
    tsd.init_process_group(group_size)
    for classes, bias in ((37, True), (3, False)):
        torch.manual_seed(3)
        linear = nn.Linear(5, classes, bias)
        torch.manual_seed(3)
        head = ParallelLinearCrossEntropy(5, classes, bias)
        torch.manual_seed(tsd.get_data_parallel_rank())
        for name, value in linear.named_parameters():
            assert torch.equal(full(getattr(head, name)), value)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (linear, head)]
        for _ in range(3):
            inputs = [x := torch.randn(6, 5, requires_grad=True), x.detach().clone().requires_grad_()]
            targets = torch.randint(classes, (6,))
            losses = [F.cross_entropy(linear(inputs[0]), targets), head(inputs[1], targets)]
            for loss, optimizer in zip(losses, optimizers, strict=True):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            torch.testing.assert_close(losses[1], losses[0])
            torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
        for name, value in linear.named_parameters():
            torch.testing.assert_close(full(getattr(head, name)), value)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "group_size"), WORLDS)
def test_it_trains_as_a_linear_layer(ranks, world_size, group_size):
    ranks(world_size, _train, group_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_initial_weights_without_a_process_group(dtype, monkeypatch):
    monkeypatch.setattr(head_module, "_CHUNK", 64)  # several draws
    torch.manual_seed(1)
    linear = nn.Linear(7, 50, dtype=dtype)
    torch.manual_seed(1)
    head = ParallelLinearCrossEntropy(7, 50, True, dtype=dtype)
    assert torch.equal(head.weight, linear.weight) and torch.equal(head.bias, linear.bias)
    torch.manual_seed(1)
    parts = [head_module.initial_rows(7, 50, start, 17, False, None, dtype)[0] for start in (17,)]
    assert torch.equal(parts[0], linear.weight[17:34])
    assert type(head.weight) is nn.Parameter
    assert ParallelLinearCrossEntropy(7, 10**12, device="meta").weight.shape == (10**12, 7)


def _largest(group_size: int) -> None:
    tsd.init_process_group(group_size)
    for options in ({"bias": True}, {"normalize": True, "scale": 3.0}):
        torch.manual_seed(0)
        head = ParallelLinearCrossEntropy(5, 37, **options)
        x, targets = torch.randn(2, 4, 5), torch.randint(37, (2, 4))
        weight = full(head.weight).detach()
        if head.normalize:
            expected = F.linear(F.normalize(x, dim=-1), F.normalize(weight, dim=-1)) * 3.0
        else:
            expected = F.linear(x, weight, full(head.bias).detach())
        part = head.logits(x)
        logits = tsd.gather(part, -1, size=37)
        torch.testing.assert_close(logits, expected)
        for k in (1, 5, 37):
            values, classes = head.topk(x, k)
            want = expected.topk(k)
            torch.testing.assert_close(values, want.values)
            assert torch.equal(classes, want.indices)
            targets[0, 0] = -100
            hits = (want.indices == targets[..., None]).any(-1)
            torch.testing.assert_close(head.accuracy(x, targets, k), hits.sum() / 7)
        loss = head(x, targets)
        torch.testing.assert_close(loss, F.cross_entropy(expected.flatten(0, 1), targets.flatten()))
        part.square().sum().backward()  # logits are differentiable
        assert head.weight.grad is not None


@pytest.mark.parametrize(("world_size", "group_size"), WORLDS)
def test_logits_and_the_largest(ranks, world_size, group_size):
    ranks(world_size, _largest, group_size)


def test_largest_over_several_tiles(monkeypatch):
    monkeypatch.setattr(tiles, "tile_width", lambda *_: 4)
    head = ParallelLinearCrossEntropy(5, 37)
    x = torch.randn(6, 5)
    values, classes = head.topk(x, 9)
    want = F.linear(x, head.weight).topk(9)
    torch.testing.assert_close(values, want.values)
    assert torch.equal(classes, want.indices)


def _gathered(case: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = dist.device_mesh.init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    group, gather, replicas = {
        "over the classes": (dist.group.WORLD, True, 1),
        "over another axis": (dist.group.WORLD, mesh["dp"], 2),
        "groups of two": (mesh["tp"], mesh["dp"], 2),
    }[case]
    torch.manual_seed(0)
    backbone, linear = nn.Linear(4, 5), nn.Linear(5, 11)
    own = copy.deepcopy(backbone)
    head = ParallelLinearCrossEntropy.from_linear(linear, group=group, gather_inputs=gather, grad_scale=2.0)
    data_rank, data_size = rank // replicas, world // replicas
    sizes = [3 + i for i in range(data_size)]  # batches of several sizes
    x, targets = torch.randn(sum(sizes), 4), torch.randint(11, (sum(sizes),))
    expected = F.cross_entropy(linear(backbone(x)), targets)
    expected.backward()
    loss = head(own(x.split(sizes)[data_rank]), targets.split(sizes)[data_rank])
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for name, value in linear.named_parameters():
        torch.testing.assert_close(full(getattr(head, name).grad, getattr(head, name)), value.grad)
    for got, want in zip(own.parameters(), backbone.parameters(), strict=True):
        total = got.grad.clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total, 2.0 * replicas * want.grad)
    accuracy = head.accuracy(own(x.split(sizes)[data_rank]), targets.split(sizes)[data_rank], 3)
    hits = (linear(backbone(x)).topk(3).indices == targets[:, None]).any(1)
    torch.testing.assert_close(accuracy, hits.float().mean())


@pytest.mark.parametrize("case", ["over the classes", "over another axis", "groups of two"])
def test_gathered_inputs(ranks, case):
    ranks(4, _gathered, case)


def _states() -> None:
    tsd.init_process_group(2)
    torch.manual_seed(0)
    head = ParallelLinearCrossEntropy(5, 11, True, class_weight=torch.rand(11))
    whole = collect_state_dict(head, rank0_only=False)
    assert {name: value.shape for name, value in whole.items()} == {"weight": (11, 5), "bias": (11,)}
    nn.Linear(5, 11).load_state_dict(whole)
    for state in (whole, head.state_dict(), relocate_state_dict(head, whole)):
        other = ParallelLinearCrossEntropy(5, 11, True)
        other.load_state_dict(state)
        assert torch.equal(full(other.weight), whole["weight"]) and torch.equal(full(other.bias), whole["bias"])
    local = head.weight
    assert local.untyped_storage().nbytes() == local.numel() * 4


@pytest.mark.slow
def test_states(ranks):
    ranks(2, _states)


def _margins(group_size: int) -> None:
    tsd.init_process_group(group_size)
    for margin in (ArcFace(0.5), CosFace(0.3)):
        torch.manual_seed(0)
        linear = nn.Linear(5, 37, False, dtype=torch.float64)
        head = ParallelLinearCrossEntropy.from_linear(linear, margin=margin, scale=16.0)
        x = torch.randn(6, 5, dtype=torch.float64)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        targets = torch.randint(37, (6,))
        expected = reference(inputs[0], linear.weight, targets, margin=margin, scale=16.0, normalize=True)
        loss = head(inputs[1], targets)
        expected.backward()
        loss.backward()
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
        torch.testing.assert_close(full(head.weight.grad, head.weight), linear.weight.grad)


@pytest.mark.parametrize(("world_size", "group_size"), WORLDS[:3])
def test_margins_over_ranks(ranks, world_size, group_size):
    ranks(world_size, _margins, group_size)


def _sample(rate: float) -> list[int]:
    tsd.init_process_group(2)
    torch.manual_seed(0)
    head = ParallelLinearCrossEntropy(5, 200, sample_rate=rate)
    weight = full(head.weight).detach()
    x, targets = torch.randn(6, 5, requires_grad=True), torch.randint(200, (6,))
    loss = head(x, targets)
    loss.backward()
    trained = full(head.weight.grad, head.weight).abs().sum(1) > 0
    assert trained[targets].all()
    # It is the loss of a layer that has the sampled classes alone.
    chosen = trained.nonzero()[:, 0]
    part = weight[chosen].requires_grad_()
    again = x.detach().requires_grad_()
    expected = F.cross_entropy(F.linear(again, part), torch.searchsorted(chosen, targets))
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(x.grad, again.grad)
    torch.testing.assert_close(full(head.weight.grad, head.weight)[chosen], part.grad)
    torch.testing.assert_close(head.eval()(x, targets), F.cross_entropy(F.linear(x, weight), targets))
    return chosen.tolist()


def test_sampling(ranks):
    chosen = ranks(2, _sample, 0.1)[0]
    assert 20 <= len(chosen) <= 32 and sum(c < 100 for c in chosen) >= 10  # a tenth of each rank's, and the targets
    assert len(ranks(2, _sample, 0.01)[0]) <= 12  # no fewer than there are targets


def _bad(case: str) -> None:
    if "no group" not in case:
        tsd.init_process_group(1 if case == "replicas" else 2)
    dist.barrier()
    if case.startswith("replicas"):
        ParallelLinearCrossEntropy(5, 12, update=dict(lr=0.1))(torch.randn(3, 5), torch.tensor([1, 2, 3]))
    if case == "gathering, no group":
        ParallelLinearCrossEntropy(5, 12, gather_inputs=True)
    head = ParallelLinearCrossEntropy(5, 12)
    head(torch.randn(3, 5), torch.tensor([1, 12, 3]))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("replicas", "a head over 1 of 2 processes whose inputs are not gathered: its copies elsewhere"),
        ("replicas, no group", "a head over 1 of 2 processes whose inputs are not gathered: its copies elsewhere"),
        ("gathering, no group", "gathers over the ranks that hold the classes, but this head has no group: call"),
        ("target", "target 12, number 1 of 3, is outside the 12 classes"),
    ],
)
def test_refused_over_ranks(ranks, case, message):
    with pytest.raises(RankError, match=message):
        ranks(2, _bad, case)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bias": True, "margin": ArcFace()}, "a bias was given with ArcFace"),
        ({"margin": CosFace(), "normalize": False}, "without normalize=True"),
        ({"sample_rate": 0.0}, "sample_rate=0.0 was given: use a share of the classes, above 0 and at most 1"),
        ({"sample_rate": 1.5}, "sample_rate=1.5 was given"),
        ({"sample_rate": 0.5, "label_smoothing": 0.1}, "Use one of the two"),
        ({"class_weight": torch.ones(3)}, r"class_weight \[3\] was given for 12 classes"),
        ({"num_classes": 0}, "num_classes=0 were given"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        ParallelLinearCrossEntropy(**({"in_features": 5, "num_classes": 12} | options))


def test_bad_calls():
    head = ParallelLinearCrossEntropy(5, 12)
    with pytest.raises(ValueError, match="k=13 was given for 12 classes: use 1 to 12"):
        head.topk(torch.randn(2, 5), 13)
    with pytest.raises(ValueError, match=r"an input \[2, 4\] was given to a head of 5 features"):
        head.topk(torch.randn(2, 4), 1)
    with pytest.raises(RuntimeError, match="is for heads built with update="):
        head.accumulate()
