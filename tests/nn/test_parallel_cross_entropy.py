"""parallel_cross_entropy against torch's own on whole logits."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import tensorshard.distributed as tsd
from rank_pool import RankError
from tensorshard.comm.marks import get_parallel_dim, register_parallel_dim
from tensorshard.nn import ParallelCrossEntropyLoss, ParallelLinear
from tensorshard.nn.functional import parallel_cross_entropy

WORLDS = [
    pytest.param(2, 2, id="2 ranks"),
    pytest.param(4, 4, id="4 ranks"),
    pytest.param(4, 2, id="2 groups of 2"),
]


def _reference(logits: torch.Tensor, targets: torch.Tensor, z_loss: float, **options: object) -> torch.Tensor:
    loss = F.cross_entropy(logits, targets, **options)
    squares = logits.logsumexp(1).square() * z_loss
    valid = targets != options["ignore_index"]
    if options["reduction"] == "none":
        return loss + squares * valid
    return loss + (squares[valid].mean() if options["reduction"] == "mean" else squares[valid].sum())


def _compare(group_size: int) -> None:
    tsd.init_process_group(group_size)
    torch.manual_seed(tsd.get_data_parallel_rank())
    settings = itertools.product((8, 11, 3), (False, True), (0.0, 0.1), (0.0, 1e-2), ("mean", "sum", "none"))
    for index, (classes, weighted, label_smoothing, z_loss, reduction) in enumerate(settings):
        logits = (3 * torch.randn(6, classes, dtype=torch.float64)).requires_grad_()
        targets = torch.randint(classes, (6,))
        targets[2] = -1
        weight = torch.rand(classes, dtype=torch.float64) + 0.5 if weighted else None
        options = {
            "weight": weight,
            "ignore_index": -1,
            "reduction": reduction,
            "label_smoothing": label_smoothing,
        }
        expected = _reference(logits, targets, z_loss, **options)
        seed = torch.rand_like(expected)
        (expected_grad,) = torch.autograd.grad(expected, logits, seed)
        part = tsd.scatter(logits.detach()).requires_grad_()
        register_parallel_dim(part, -1, size=classes if index % 2 else None)  # known, or to be asked for
        loss = parallel_cross_entropy(part, targets, z_loss=z_loss, **options)
        (grad,) = torch.autograd.grad(loss, part, seed)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(grad, tsd.scatter(expected_grad), rtol=1e-12, atol=1e-13)


@pytest.mark.slow_cases("4 ranks")
@pytest.mark.parametrize(("world_size", "group_size"), WORLDS)
def test_value_and_gradient(ranks, world_size, group_size):
    ranks(world_size, _compare, group_size)


def _gradcheck() -> None:
    tsd.init_process_group(2)
    logits = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 4, 2, -100])
    weight = torch.rand(5, dtype=torch.float64)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        part = tsd.scatter(logits)
        return parallel_cross_entropy(part, targets, weight, label_smoothing=0.2, z_loss=0.1)

    assert torch.autograd.gradcheck(loss, logits)


def test_gradcheck(ranks):
    ranks(2, _gradcheck)


def _other_shapes() -> None:
    tsd.init_process_group(2)
    image, image_targets = torch.randn(2, 5, 3, 4, dtype=torch.float64), torch.randint(5, (2, 3, 4))
    part = register_parallel_dim(tsd.scatter(image, 1), 1)
    for reduction in ("none", "mean"):
        torch.testing.assert_close(
            parallel_cross_entropy(part, image_targets, reduction=reduction),
            F.cross_entropy(image, image_targets, reduction=reduction),
        )
    text, text_targets = torch.randn(2, 3, 5, dtype=torch.float64), torch.randint(5, (2, 3))
    expected = F.cross_entropy(text.flatten(0, 1), text_targets.flatten())
    torch.testing.assert_close(parallel_cross_entropy(tsd.scatter(text), text_targets), expected)
    torch.testing.assert_close(
        parallel_cross_entropy(tsd.scatter(text[0, 0]), text_targets[0, 0]),
        F.cross_entropy(text[0, 0], text_targets[0, 0]),
    )
    nothing = torch.full((2,), -100)
    part = tsd.scatter(text[0, :2]).requires_grad_()
    loss = parallel_cross_entropy(part, nothing)
    loss.backward()
    assert loss.isnan() and not part.grad.any()  # as torch's


def test_other_shapes(ranks):
    ranks(2, _other_shapes)


def _narrow_types() -> None:
    tsd.init_process_group(2)
    torch.manual_seed(1)
    for dtype in (torch.bfloat16, torch.float16):
        logits = (4 * torch.randn(64, 1000)).to(dtype)
        targets = torch.randint(1000, (64,))
        exact = logits.double().requires_grad_()
        expected = F.cross_entropy(exact, targets, label_smoothing=0.1)
        expected.backward()
        part = tsd.scatter(logits).requires_grad_()
        loss = parallel_cross_entropy(part, targets, label_smoothing=0.1)
        loss.backward()
        assert loss.dtype == torch.float32 and part.grad.dtype == dtype
        torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)
        # The gradient is computed in fp32 and rounded once.
        torch.testing.assert_close(part.grad, tsd.scatter(exact.grad).to(dtype), rtol=8e-3, atol=1e-9)


def test_sums_of_narrow_types_are_wide(ranks):
    ranks(2, _narrow_types)


def _largest_allocation() -> int:
    tsd.init_process_group(2)
    part = register_parallel_dim(torch.randn(512, 4096, requires_grad=True), -1, size=8192)
    targets = torch.randint(8192, (512,))
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss = parallel_cross_entropy(part, targets, label_smoothing=0.1)
    forward = max(event.cpu_memory_usage for event in profile.events())
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss.backward()
    backward = sorted(event.self_cpu_memory_usage for event in profile.events())
    assert backward[-1] == part.numel() * 4  # the gradient itself
    assert backward[-2] < part.numel()
    return forward


def test_memory(ranks):
    """Forward allocates tiles; backward the gradient of this rank's logits and tiles."""
    assert ranks(2, _largest_allocation)[0] < 512 * 4096


def _whole_logits() -> None:
    logits = torch.randn(4, 5, requires_grad=True)
    targets = torch.tensor([0, 4, 2, 1])
    loss = ParallelCrossEntropyLoss(label_smoothing=0.1)
    torch.testing.assert_close(loss(logits, targets), F.cross_entropy(logits, targets, label_smoothing=0.1))
    probabilities = torch.rand(4, 5)
    torch.testing.assert_close(loss(logits, probabilities), F.cross_entropy(logits, probabilities, label_smoothing=0.1))
    value = parallel_cross_entropy(logits, targets, z_loss=0.5)
    expected = F.cross_entropy(logits, targets) + 0.5 * logits.logsumexp(1).square().mean()
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(*(torch.autograd.grad(v, logits)[0] for v in (value, expected)))


def test_whole_logits():
    _whole_logits()  # no groups exist


def _after_a_parallel_layer() -> None:
    tsd.init_process_group(2)
    torch.manual_seed(3)
    whole = torch.nn.Linear(4, 7)
    layer = ParallelLinear.from_linear(whole, dim=-1)
    x, targets = torch.randn(5, 4), torch.tensor([6, 0, 3, 4, 2])
    logits = layer(x)
    assert get_parallel_dim(logits) == -1
    loss = ParallelCrossEntropyLoss()(logits, targets)
    expected = F.cross_entropy(whole(x), targets)
    torch.testing.assert_close(loss, expected)
    gathered = tsd.gather(logits)
    torch.testing.assert_close(ParallelCrossEntropyLoss()(gathered, targets), expected)
    loss.backward(retain_graph=True)
    first = layer.weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(layer.weight.grad, 2 * first)  # nothing saved was overwritten


def test_after_a_parallel_layer(ranks):
    ranks(2, _after_a_parallel_layer)


def _bad(case: str) -> None:
    tsd.init_process_group(2)
    dist.barrier()
    targets = torch.tensor([0, 1, 2])
    part = register_parallel_dim(torch.randn(3, 4), -1, size=8)
    if case == "target too large":
        parallel_cross_entropy(part, torch.tensor([0, 8, 2]))
    elif case == "target negative":
        parallel_cross_entropy(part, torch.tensor([0, -1, 2]))
    elif case == "whole":
        parallel_cross_entropy(register_parallel_dim(torch.randn(3, 8), -1, size=8), targets)
    elif case == "lost":
        logits = ParallelLinear(4, 8, dim=1)(torch.randn(1, 3, 4))
        parallel_cross_entropy(logits.float().view(-1, 4) / 0.7, targets)
    elif case == "shape":
        parallel_cross_entropy(part, targets[:2])
    elif case == "weight":
        parallel_cross_entropy(part, targets, torch.ones(4))
    elif case == "probabilities":
        parallel_cross_entropy(part, torch.rand(3, 4))
    elif case == "reduction":
        parallel_cross_entropy(part, targets, reduction="average")
    elif case == "smoothing":
        parallel_cross_entropy(part, targets, label_smoothing=1.5)
    elif case == "group":
        mine = tsd.get_group()
        other = next(g for g in [dist.new_group([0]), dist.new_group([1])] if dist.get_rank(g) >= 0)
        parallel_cross_entropy(register_parallel_dim(part, -1, group=mine), targets, group=other)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("target too large", "IndexError: target 8, number 1 of 3, is outside the 8 classes: use 0 to 7, or -100"),
        ("target negative", "IndexError: target -1, number 1 of 3, is outside the 8 classes"),
        (
            "whole",
            "split along dimension 1, were given to rank 0 of 2, which holds 4 of 8 classes: it seems to be whole",
        ),
        ("lost", "come from a layer that splits its output features, but do not say so"),
        ("shape", r"targets \[2\] were given for logits \[3, 4\].*expected \[3\]"),
        ("weight", r"weight \[4\] was given for 8 classes: expected \[8\]"),
        ("probabilities", "class probabilities need whole logits"),
        ("reduction", "reduction='average' was given: use 'none', 'mean' or 'sum'"),
        ("smoothing", "label_smoothing=1.5 was given: use a number from 0 to 1"),
        ("group", r"input is split over the ranks \[0, 1\], and group= names the ranks"),
    ],
)
def test_bad_input(ranks, case, message):
    with pytest.raises(RankError, match=message):
        ranks(2, _bad, case)
