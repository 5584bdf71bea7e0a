"""parallel_linear_cross_entropy against plain PyTorch in fp64."""

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import tensorshard as ts
import tensorshard.distributed as tsd
from bounds import assert_within
from rank_pool import RankError
from tensorshard.comm import primitives
from tensorshard.comm.sharding import distribute
from tensorshard.loss import tiles
from tensorshard.nn import ArcFace, CosFace
from tensorshard.nn.functional import parallel_linear_cross_entropy

WORLDS = [
    pytest.param(1, 1, id="1 rank"),
    pytest.param(2, 2, id="2 ranks"),
    pytest.param(4, 4, id="4 ranks"),
    pytest.param(4, 2, id="2 groups of 2"),
]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """Tiles of 8 classes in this process, so that small heads have several and a last one that is smaller."""
    monkeypatch.setattr(tiles, "tile_width", lambda *_: 8)


def reference(
    input: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    class_weight: torch.Tensor | None = None,
    z_loss: float = 0.0,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    margin: Any = None,
    scale: float = 1.0,
    normalize: bool = False,
) -> torch.Tensor:
    """The same in plain PyTorch, with all logits at once."""
    if normalize:
        input, weight = F.normalize(input, dim=-1), F.normalize(weight, dim=1)
    logits = F.linear(input, weight, bias)
    valid = targets != ignore_index
    if margin is not None:
        chosen = F.one_hot(targets.where(valid, 0), len(weight)).bool() & valid[:, None]
        if isinstance(margin, ArcFace):
            angle = logits.clamp(-1 + 1e-7, 1 - 1e-7).acos() + margin.margin
            changed = torch.where(angle <= torch.pi, angle.cos(), logits - margin.margin * math.sin(margin.margin))
        else:
            changed = logits - margin.margin
        logits = torch.where(chosen, changed, logits)
    logits = logits * scale
    loss = F.cross_entropy(
        logits,
        targets,
        class_weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )
    squares = logits.logsumexp(1).square() * z_loss
    if z_loss == 0:
        return loss
    if reduction == "none":
        return loss + squares * valid
    return loss + (squares[valid].mean() if reduction == "mean" else squares[valid].sum())


def _compare(group_size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "tile_width", lambda *_: 8)
        _compare_all(group_size)


def _compare_all(group_size: int) -> None:
    tsd.init_process_group(group_size)
    torch.manual_seed(tsd.get_data_parallel_rank())
    settings = itertools.product((37, 3), (False, True), (0.0, 0.1), (0.0, 1e-2), ("mean", "sum", "none"))
    for index, (classes, weighted, label_smoothing, z_loss, reduction) in enumerate(settings):
        x, w = torch.randn(6, 5).double(), torch.randn(classes, 5).double()
        bias = torch.randn(classes).double() if index % 3 else None
        targets = torch.randint(classes, (6,))
        targets[2] = -1
        options = dict(
            class_weight=torch.rand(classes).double() + 0.5 if weighted else None,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            reduction=reduction,
            ignore_index=-1,
        )
        leaves = [t.clone().requires_grad_() for t in (x, w, bias) if t is not None]
        expected = reference(leaves[0], leaves[1], targets, *leaves[2:], **options)
        seed = torch.randn_like(expected)
        expected_grads = torch.autograd.grad(expected, leaves, seed)
        mesh = tsd.get_mesh()["tp"]
        parts = [x.clone().requires_grad_()]
        for whole in (w, bias):
            if whole is not None:
                parts.append(distribute(whole, mesh, [dist.tensor.Shard(0)]).detach().requires_grad_())
        if index % 2:  # the local rows, of which nobody says of how many classes they are
            parts[1:] = [part.to_local().detach().requires_grad_() for part in parts[1:]]
        loss = parallel_linear_cross_entropy(parts[0], parts[1], targets, *parts[2:], **options, keep_logits=False)
        grads = torch.autograd.grad(loss, parts, seed)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(grads[0], expected_grads[0], rtol=1e-11, atol=1e-12)
        for got, want in zip(grads[1:], expected_grads[1:], strict=True):
            local = got.to_local() if isinstance(got, DTensor) else got
            part = ts.slice(want, tsd.get_group_size(), 0)[tsd.get_rank()]
            torch.testing.assert_close(local, part, rtol=1e-11, atol=1e-12)


@pytest.mark.slow_cases("4 ranks", "2 groups of 2")
@pytest.mark.parametrize(("world_size", "group_size"), WORLDS)
def test_value_and_gradients(ranks, world_size, group_size):
    ranks(world_size, _compare, group_size)


@pytest.mark.parametrize("margin", [None, ArcFace(0.5), ArcFace(2.8), CosFace(0.35)])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-3}])
def test_margins(margin, options):
    torch.manual_seed(0)
    x, w = torch.randn(7, 5).double().requires_grad_(), torch.randn(37, 5).double().requires_grad_()
    targets = torch.randint(37, (7,))
    targets[3] = -100
    options = dict(margin=margin, scale=9.0, normalize=True, **options)
    expected = reference(x, w, targets, **options)
    loss = parallel_linear_cross_entropy(x, w, targets, **options)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for got, want in zip(torch.autograd.grad(loss, (x, w)), torch.autograd.grad(expected, (x, w)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_gradcheck():
    x, w, b = (torch.randn(*shape).double().requires_grad_() for shape in ((4, 3), (11, 3), (11,)))
    targets = torch.tensor([0, 10, 5, -100])

    def loss(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return parallel_linear_cross_entropy(x, w, targets, b, label_smoothing=0.2, z_loss=0.1, keep_logits=False)

    assert torch.autograd.gradcheck(loss, (x, w, b))


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize(
    "case", ["plain", "one sample", "all of one class", "large logits", "separate", "one class", "no samples"]
)
def test_fp32_within_a_millionth(case, monkeypatch):
    monkeypatch.undo()  # the tiles that are used
    torch.manual_seed(0)
    samples, classes = {"one sample": (1, 3000), "one class": (5, 1), "no samples": (0, 9)}.get(case, (64, 3000))
    # Small logits, of which half a unit in the last place is far below what is allowed.
    x, w = torch.randn(samples, 32), torch.randn(classes, 32) * 0.02
    targets = torch.randint(classes, (samples,))
    if case == "all of one class":
        targets[:] = classes - 1
    if case == "large logits":  # +-1e4, and exact in fp32, so that what is compared is not the product
        x, w = torch.randint(-1, 2, (64, 32)).float() * 8, torch.randint(-1, 2, (3000, 32)).float() * 80
        targets = (x @ w.t()).topk(2).indices[:, 1]
    if case == "separate":  # a target that is all but certain
        w[targets] = x * 2
    exact = [t.double().requires_grad_() for t in (x, w)]
    ours = [t.requires_grad_() for t in (x, w)]
    expected = reference(*exact, targets)
    loss = parallel_linear_cross_entropy(*ours, targets, keep_logits=False)
    assert loss.dtype == torch.float32
    if case == "no samples":
        assert loss.isnan() and expected.isnan()
        return
    if case == "large logits":
        assert (x @ w.t()).abs().max() > 1e4
    # What fp32 logits do not say, such as how far from certain a certain target is, nor does the plain layer.
    plain = reference(*ours, targets)
    torch.testing.assert_close(
        loss.double(), expected, rtol=1e-6, atol=max(1e-8, 1.2 * (plain - expected).abs().item())
    )
    all_grads = (torch.autograd.grad(value, of) for value, of in ((loss, ours), (plain, ours), (expected, exact)))
    for got, of_plain, want in zip(*all_grads, strict=True):
        if want.norm() > 0:
            assert_within(_relative(got, want), max(1e-6, 1.2 * _relative(of_plain, want)), case)
            assert case not in ("plain", "all of one class", "large logits") or _relative(got, want) < 1e-6


def test_everything_ignored():
    x, w = torch.randn(4, 5, requires_grad=True), torch.randn(20, 5, requires_grad=True)
    nothing = torch.full((4,), -100)
    loss = parallel_linear_cross_entropy(x, w, nothing)
    loss.backward()
    assert loss.isnan() and not x.grad.any() and not w.grad.any()
    assert parallel_linear_cross_entropy(x, w, nothing, reduction="sum", z_loss=1.0).item() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("keep", [False, True])
def test_sums_of_narrow_types_are_wide(dtype, keep):
    torch.manual_seed(0)
    x, w = torch.randn(32, 16).to(dtype).requires_grad_(), torch.randn(500, 16).to(dtype).requires_grad_()
    targets = torch.randint(500, (32,))
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    expected = reference(*exact, targets)
    loss = parallel_linear_cross_entropy(x, w, targets, keep_logits=keep)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)
    for got, want in zip(torch.autograd.grad(loss, (x, w)), torch.autograd.grad(expected, exact), strict=True):
        assert got.dtype == dtype
        limit = 2.0**-8 if dtype == torch.bfloat16 or keep else 2.0**-10
        assert_within(_relative(got, want), limit, "ours")


def test_kept_logits():
    """Kept exactly they change nothing, in bf16 no more than its rounding; and the targets' slopes stay exact."""
    torch.manual_seed(0)
    x, w = torch.randn(2, 64).requires_grad_(), (torch.randn(300, 64) * 0.1).requires_grad_()
    targets = torch.randint(300, (2,))
    grads = {}
    for keep in (False, None, True):
        loss = parallel_linear_cross_entropy(x, w, targets, label_smoothing=0.1, keep_logits=keep)
        saved = sum(t.numel() == 600 for t in loss.grad_fn.saved_tensors if t is not None)
        assert saved == (keep is not False)  # None keeps 2 samples, fewer than half of 64 features
        grads[keep] = torch.autograd.grad(loss, (x, w))
    for exact, kept, rounded in zip(grads[False], grads[None], grads[True], strict=True):
        assert_within(_relative(kept, exact.double()), 1e-6, "kept logits")
        assert 1e-6 < _relative(rounded, exact.double()) < 2.0**-8
    for samples, kept in ((32, True), (33, False)):
        x = torch.randn(samples, 64, requires_grad=True)
        loss = parallel_linear_cross_entropy(x, w, torch.randint(300, (samples,)))
        saved = [t for t in loss.grad_fn.saved_tensors if t is not None]
        assert any(t.numel() == samples * 300 for t in saved) == kept
    with torch.no_grad():
        assert parallel_linear_cross_entropy(x, w, torch.randint(300, (33,)), keep_logits=True).grad_fn is None


def test_shapes_and_accumulation():
    w = torch.randn(20, 5, requires_grad=True)
    text, targets = torch.randn(2, 3, 5), torch.randint(20, (2, 3))
    expected = F.cross_entropy(F.linear(text, w).flatten(0, 1), targets.flatten(), reduction="none").view(2, 3)
    torch.testing.assert_close(parallel_linear_cross_entropy(text, w, targets, reduction="none"), expected)
    one = parallel_linear_cross_entropy(text[0, 0], w, targets[0, 0])
    torch.testing.assert_close(one, expected[0, 0])
    for part in range(2):
        parallel_linear_cross_entropy(text[part], w, targets[part], reduction="sum").backward()
    (whole,) = torch.autograd.grad(expected.sum(), w)
    torch.testing.assert_close(w.grad, whole)


@pytest.mark.slow
def test_under_autocast_checkpoint_and_compile():
    torch.manual_seed(0)
    x, w = torch.randn(8, 5, requires_grad=True), torch.randn(20, 5, requires_grad=True)
    targets = torch.randint(20, (8,))
    expected = parallel_linear_cross_entropy(x, w, targets)
    grads = torch.autograd.grad(expected, (x, w))

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return parallel_linear_cross_entropy(x * 1, w, targets)

    for run in (lambda x, w: checkpoint(loss, x, w, use_reentrant=False), torch.compile(loss, backend="aot_eager")):
        found = run(x, w)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found, (x, w)), grads)
    with torch.autocast("cpu", torch.bfloat16):
        found = parallel_linear_cross_entropy(x.bfloat16(), w, targets)
        assert found.dtype == torch.float32
        inner = torch.autograd.grad(found, (x, w))  # backward inside, too
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(inner, grads, rtol=5e-2, atol=1e-2)
    assert inner[1].dtype == torch.float32


def test_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, w = torch.randn(8, 5, requires_grad=True), torch.randn(50, 5, requires_grad=True)
        loss = parallel_linear_cross_entropy(x, w, torch.randint(50, (8,)), label_smoothing=0.1)
        loss.backward()
    assert w.grad.shape == w.shape and x.grad.shape == x.shape and loss.shape == ()


def _count_bytes(classes: int) -> list[int]:
    tsd.init_process_group(2)
    sent = []

    def counted(original: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.numel() * tensor.element_size())
        return original(tensor, *args, **kwargs)

    w = distribute(torch.randn(classes, 8), tsd.get_mesh()["tp"], [dist.tensor.Shard(0)]).requires_grad_()
    x = torch.randn(16, 8, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("gather_flat", "all_reduce"):
            patch.setattr(primitives, name, partial(counted, getattr(primitives, name)))
        parallel_linear_cross_entropy(x, w, torch.randint(classes, (16,)), label_smoothing=0.1).backward()
    return sent


def test_communication_does_not_grow_with_the_classes(ranks):
    few, many = ranks(2, _count_bytes, 100)[0], ranks(2, _count_bytes, 10_000)[0]
    assert few == many == [3 * 16 * 8, 16 * 8 * 4]  # three fp64 numbers a sample; the input's gradient


def _bad(case: str) -> None:
    tsd.init_process_group(2)
    dist.barrier()
    x, targets = torch.randn(4, 5), torch.randint(12, (4,))
    w = distribute(torch.randn(12, 5), tsd.get_mesh()["tp"], [dist.tensor.Shard(0)])
    if case == "replicated":
        parallel_linear_cross_entropy(x, w.redistribute(placements=[dist.tensor.Replicate()]), targets)
    elif case == "whole":
        parallel_linear_cross_entropy(x, w.full_tensor(), targets, num_classes=12)
    elif case == "class weight":
        parallel_linear_cross_entropy(x, w, targets, class_weight=torch.ones(6))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("replicated", r"placements \(Replicate\(\),\) was given: a head's classes are split"),
        ("whole", r"a weight of 12 rows was given to rank 0 of 2, which holds 6 of 12 classes: it seems to be whole"),
        ("class weight", r"class_weight \[6\] was given for 12 classes: expected \[12\]"),
    ],
)
def test_parts_that_do_not_fit(ranks, case, message):
    with pytest.raises(RankError, match=message):
        ranks(2, _bad, case)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"target": torch.tensor([3, 12, 40])}, IndexError, "target 12, number 1 of 3, is outside the 12 classes"),
        ({"target": torch.tensor([-1, 2, 3])}, IndexError, "use 0 to 11, or -100 for what is to be ignored"),
        ({"target": torch.zeros(3)}, ValueError, "targets of type torch.float32"),
        ({"target": torch.zeros(2, dtype=torch.long)}, ValueError, r"targets \[2\] were given for an input \[3, 5\]"),
        ({"input": torch.randn(3, 4)}, ValueError, r"expected \[\*, 5\]"),
        ({"input": torch.randn(3, 5).bfloat16()}, ValueError, "input of bfloat16, weight of float32 were given"),
        ({"bias": torch.randn(11)}, ValueError, r"a bias \[11\] was given for 12 classes"),
        ({"class_weight": torch.ones(11)}, ValueError, r"class_weight \[11\] was given for 12 classes"),
        ({"reduction": "avg"}, ValueError, "reduction='avg' was given: use 'none', 'mean' or 'sum'"),
        ({"label_smoothing": 2.0}, ValueError, "use a number from 0 to 1"),
        ({"scale": 0.0}, ValueError, "scale=0.0 was given"),
        ({"z_loss": -1.0}, ValueError, "z_loss=-1.0 was given: use 0 or more"),
        ({"margin": ArcFace()}, ValueError, "without normalize=True"),
        (
            {"margin": CosFace(), "normalize": True, "bias": torch.randn(12)},
            ValueError,
            "a bias was given with CosFace",
        ),
        ({"num_classes": 13}, ValueError, "a weight of 12 rows was given to rank 0 of 1, which holds 13 of 13 classes"),
    ],
)
def test_bad_arguments(change, error, message):
    arguments = dict(input=torch.randn(3, 5), weight=torch.randn(12, 5), target=torch.randint(12, (3,))) | change
    with pytest.raises(error, match=message):
        parallel_linear_cross_entropy(**arguments)
    with pytest.raises(ValueError, match=r"use an angle from 0 to pi"):
        ArcFace(4.0)
    with pytest.raises(ValueError, match=r"use a number from 0 to 2"):
        CosFace(-1.0)
