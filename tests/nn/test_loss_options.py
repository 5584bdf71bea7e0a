"""softcap, token scaling, log-sum-exps and accuracy of both losses, against plain PyTorch in fp64."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard

import tensorshard as ts
import tensorshard.distributed as tsd
from rank_pool import RankError
from tensorshard.comm.marks import register_parallel_dim
from tensorshard.comm.sharding import distribute
from tensorshard.loss import split_cross_entropy, tiles
from tensorshard.nn import ArcFace, CrossEntropyOutput, ParallelCrossEntropyLoss, ParallelLinearCrossEntropy
from tensorshard.nn.functional import parallel_cross_entropy, parallel_linear_cross_entropy


def reference(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    weight: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
    softcap: float | None,
    use_token_scaling: bool,
) -> CrossEntropyOutput:
    """The same in plain PyTorch."""
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    valid = targets != ignore_index
    options: Any = dict(weight=weight, ignore_index=ignore_index, label_smoothing=label_smoothing)
    losses, lse = F.cross_entropy(logits, targets, reduction="none", **options), logits.logsumexp(1)
    squares = z_loss * lse.square() * valid
    if use_token_scaling:
        chosen = targets.where(valid, 0)[:, None]
        probability = logits.softmax(1).gather(1, chosen)[:, 0].detach()
        losses, squares = losses * probability, squares * probability
    hits = ((logits.argmax(1) == targets) & valid).float()
    if reduction == "none":
        return CrossEntropyOutput(losses + squares, lse, hits)
    accuracy = hits.sum() / valid.sum()
    if reduction == "sum":
        return CrossEntropyOutput((losses + squares).sum(), lse, accuracy)
    normalizer = valid.sum() if weight is None else weight[targets[valid]].sum()
    return CrossEntropyOutput(losses.sum() / normalizer + squares.sum() / valid.sum(), lse, accuracy)


def _settings() -> Any:
    """Every pair of options among them, over uneven numbers of classes."""
    each = itertools.product((23, 4), (None, 2.5), (False, True), (0.0, 0.1), (0.0, 1e-2), ("mean", "sum", "none"))
    for index, (classes, softcap, scaled, smoothing, z_loss, reduction) in enumerate(each):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(7, 5, generator=generator).double()
        w = torch.randn(classes, 5, generator=generator).double()
        targets = (x @ w.t()).argmax(1)  # some right, some not
        targets[1::2] = torch.randint(classes, (3,), generator=generator)
        ignore_index = (-100, 1)[index % 2]  # outside the classes, and one of them
        targets[2] = ignore_index
        weight = torch.rand(classes, generator=generator).double() + 0.5 if index % 3 else None
        options = dict(
            softcap=softcap,
            use_token_scaling=scaled,
            label_smoothing=smoothing,
            z_loss=z_loss,
            reduction=reduction,
            ignore_index=ignore_index,
        )
        yield x, w, targets, weight, options


def _mixed(found: CrossEntropyOutput) -> torch.Tensor:
    """A number in which loss and log-sum-exps take part, unevenly."""
    seed = torch.linspace(0.3, 1.7, found.lse.numel(), dtype=torch.float64)
    return (found.loss * (seed if found.loss.ndim else 1.3)).sum() + 0.2 * (found.lse * seed).square().sum()


def _compare(size: int) -> None:
    tsd.init_process_group(size)
    rank = tsd.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "tile_width", lambda *_: 3)
        patch.setattr(split_cross_entropy, "_CPU_TILE", 24)
        for x, w, targets, weight, options in _settings():
            leaves = [t.clone().requires_grad_() for t in (x, w)]
            logits = F.linear(*leaves)
            expected = reference(logits, targets, weight=weight, **options)
            *of_leaves, of_logits = torch.autograd.grad(_mixed(expected), [*leaves, logits])
            asked = dict(return_lse=True, return_token_accuracy=True)

            part = tsd.scatter(logits.detach()).requires_grad_()
            register_parallel_dim(part, -1, size=len(w))
            found = parallel_cross_entropy(part, targets, weight, **options, **asked)
            _check(found, expected)
            (grad,) = torch.autograd.grad(_mixed(found), part)
            torch.testing.assert_close(grad, tsd.scatter(of_logits), rtol=1e-11, atol=1e-12)

            rows = distribute(w, tsd.get_mesh()["tp"], [Shard(0)]).detach().requires_grad_()
            features = x.clone().requires_grad_()
            found = parallel_linear_cross_entropy(features, rows, targets, class_weight=weight, **options, **asked)
            _check(found, expected)
            grads = torch.autograd.grad(_mixed(found), [features, rows])
            torch.testing.assert_close(grads[0], of_leaves[0], rtol=1e-10, atol=1e-12)
            own = ts.slice(of_leaves[1], size, 0)[rank]
            torch.testing.assert_close(grads[1].to_local(), own, rtol=1e-10, atol=1e-12)


def _check(found: CrossEntropyOutput, expected: CrossEntropyOutput) -> None:
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(found.lse, expected.lse, rtol=1e-12, atol=1e-13)
    assert torch.equal(found.token_accuracy, expected.token_accuracy)
    assert not found.token_accuracy.requires_grad


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_values_and_gradients(ranks, size):
    ranks(size, _compare, size)


def test_gradcheck_without_a_process_group():
    x, w, b = (torch.randn(*shape).double().requires_grad_() for shape in ((4, 3), (11, 3), (11,)))
    targets = torch.tensor([0, 10, 5, -100])
    options: Any = dict(softcap=1.5, label_smoothing=0.2, z_loss=0.1, return_lse=True)

    def head(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
        return parallel_linear_cross_entropy(x, w, targets, b, **options)[:2]

    def loss(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
        return parallel_cross_entropy(F.linear(x, w, b), targets, **options)[:2]

    assert torch.autograd.gradcheck(head, (x, w, b)) and torch.autograd.gradcheck(loss, (x, w, b))
    for got, want in zip(head(x, w, b), loss(x, w, b), strict=True):
        torch.testing.assert_close(got, want)


def test_accuracy_is_without_the_margin_and_takes_the_first_of_equal_logits():
    torch.manual_seed(0)
    x, w = torch.randn(50, 4), torch.randn(9, 4)
    cosines = F.linear(F.normalize(x, dim=1), F.normalize(w, dim=1))
    targets = cosines.argmax(1)
    targets[:20] = torch.randint(9, (20,))
    options: Any = dict(normalize=True, scale=8.0, return_token_accuracy=True)
    found = parallel_linear_cross_entropy(x, w, targets, margin=ArcFace(), **options)
    torch.testing.assert_close(found.token_accuracy, (cosines.argmax(1) == targets).float().mean())
    assert found.lse is None
    tied = torch.zeros(3, 6)
    for right, target in ((1.0, 0), (0.0, 5)):
        targets = torch.full((3,), target)
        assert parallel_cross_entropy(tied, targets, return_token_accuracy=True).token_accuracy == right
        head = parallel_linear_cross_entropy(tied, torch.ones(6, 6), targets, return_token_accuracy=True)
        assert head.token_accuracy == right


def test_nothing_but_ignored_targets():
    nothing = torch.full((3,), -100)
    options: Any = dict(return_token_accuracy=True, use_token_scaling=True, reduction="sum")
    x, w = torch.randn(3, 5) * 500, torch.randn(7, 5)
    for found in (
        parallel_cross_entropy((x @ w.t()).requires_grad_(), nothing, **options),
        parallel_linear_cross_entropy(x.requires_grad_(), w, nothing, **options),
    ):
        assert found.token_accuracy.isnan() and found.loss == 0
        found.loss.backward()
    assert not x.grad.any()


def test_shapes_and_types():
    text, w, targets = torch.randn(2, 3, 5).bfloat16(), torch.randn(20, 5).bfloat16(), torch.randint(20, (2, 3))
    asked: Any = dict(return_lse=True, return_token_accuracy=True)
    for reduction, shape in (("none", (2, 3)), ("mean", ())):
        for found in (
            parallel_linear_cross_entropy(text, w, targets, reduction=reduction, **asked),
            parallel_cross_entropy((text @ w.t()).movedim(-1, 1), targets, reduction=reduction, **asked),
        ):
            assert found.loss.shape == found.token_accuracy.shape == shape and found.lse.shape == (2, 3)
            assert {tensor.dtype for tensor in found} == {torch.float32}
    only = parallel_cross_entropy(torch.randn(3, 5), torch.tensor([0, 1, 2]), return_lse=True)
    assert only.token_accuracy is None and isinstance(only, CrossEntropyOutput)


def test_modules():
    torch.manual_seed(0)
    options: Any = dict(softcap=2.0, use_token_scaling=True, return_lse=True, return_token_accuracy=True, z_loss=1e-2)
    head = ParallelLinearCrossEntropy(5, 17, True, dtype=torch.float64, **options)
    loss = ParallelCrossEntropyLoss(**options)
    x, targets = torch.randn(8, 5).double(), torch.randint(17, (8,))
    plain = F.linear(x, head.weight, head.bias)
    expected = reference(plain, targets, weight=None, ignore_index=-100, label_smoothing=0.0, reduction="mean",
                         softcap=2.0, use_token_scaling=True, z_loss=1e-2)  # fmt: skip
    for found in (head(x, targets), loss(plain, targets)):
        _check(found, expected)
    capped = 2.0 * torch.tanh(plain / 2.0)
    torch.testing.assert_close(head.logits(x), capped)
    torch.testing.assert_close(head.topk(x, 3)[0], capped.topk(3).values)
    torch.testing.assert_close(head.accuracy(x, targets), expected.token_accuracy)
    assert "softcap=2.0" in repr(head)


def test_update_in_backward():
    """The same weights as SGD makes of the gradients, with a part of the loss in the log-sum-exps."""
    torch.manual_seed(0)
    options: Any = dict(softcap=2.0, use_token_scaling=True, return_lse=True, dtype=torch.float64, bias=True)
    plain = ParallelLinearCrossEntropy(5, 17, **options)
    updated = ParallelLinearCrossEntropy(5, 17, update=dict(lr=0.1, momentum=0.9), **options)
    updated.load_state_dict(plain.state_dict())
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        x, targets = torch.randn(6, 5).double(), torch.randint(17, (6,))
        losses = []
        for head in (plain, updated):
            found = head(x, targets)
            losses.append(found.loss + 0.1 * found.lse.square().mean())
            losses[-1].backward()
        torch.testing.assert_close(losses[1], losses[0])
        sgd.step()
        sgd.zero_grad()
        updated.optimizer.step()
    for got, want in zip(updated.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.detach(), want.detach(), rtol=1e-12, atol=1e-13)


def test_a_tile_of_logits_at_a_time(monkeypatch):
    """The largest tensor of either pass is a gradient of the weight: no room is made for all logits."""
    monkeypatch.setattr(tiles, "tile_width", lambda *_: 64)
    x, w = torch.randn(512, 16, requires_grad=True), torch.randn(4096, 16, requires_grad=True)
    targets = torch.randint(4096, (512,))
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = parallel_linear_cross_entropy(
            x, w, targets, softcap=3.0, use_token_scaling=True, return_lse=True, return_token_accuracy=True
        )
        (found.loss + found.lse.mean()).backward()
    assert max(event.self_cpu_memory_usage for event in profile.events()) <= w.numel() * 4 < 512 * 4096


def _train_under_a_plan(tp: int) -> list[float]:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Linear(6, 8)
            self.head = ParallelLinearCrossEntropy(8, 13, softcap=5.0, return_lse=True, return_token_accuracy=True)

        def forward(self, x: torch.Tensor, targets: torch.Tensor) -> Any:
            return self.head(torch.relu(self.body(x)), targets)

    engine = ts.parallelize(
        Model,
        ts.Plan(tp=tp, dp_shard=1, zero=0),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        loss_fn=lambda found, targets: found.loss + 1e-2 * found.lse.square().mean(),
        sample_inputs=(torch.randn(4, 6), torch.randint(13, (4,))),
    )
    torch.manual_seed(7)
    x, targets = torch.randn(4, 6), torch.randint(13, (4,))
    losses = [engine.step((x, targets), targets).item() for _ in range(3)]
    accuracy = engine.predict((x, targets)).token_accuracy
    return [*losses, accuracy.item()]


def test_under_a_plan(ranks):
    (one,), (two, _) = ranks(1, _train_under_a_plan, 1), ranks(2, _train_under_a_plan, 2)
    torch.testing.assert_close(torch.tensor(two), torch.tensor(one), rtol=1e-5, atol=1e-6)
    assert one[0] > one[2]


def _refused() -> None:
    tsd.init_process_group(2)
    part = register_parallel_dim(torch.randn(3, 4), -1, size=8)
    parallel_cross_entropy(part, torch.rand(3, 8), softcap=1.0)


def test_class_probabilities_are_refused(ranks):
    with pytest.raises(RankError, match=r"class probabilities need whole logits and no options but those of F\."):
        ranks(2, _refused)
    for option in ({"softcap": 1.0}, {"use_token_scaling": True}, {"return_lse": True}):
        with pytest.raises(ValueError, match="class probabilities need whole logits and no options but those of F"):
            parallel_cross_entropy(torch.randn(3, 4), torch.rand(3, 4), **option)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softcap": 0.0}, r"softcap=0.0 was given: use a number above 0, or None for no cap"),
        ({"softcap": float("inf")}, "softcap=inf was given"),
        ({"softcap": 3.0, "margin": ArcFace()}, r"softcap=3.0 was given with ArcFace\(margin=0.5\): a margin changes"),
        ({"softcap": 3.0, "keep_logits": True}, "keep_logits=True was given with softcap=3.0"),
        ({"sample_rate": 0.5, "return_token_accuracy": True}, "return_token_accuracy=True was given with sample_rate"),
        ({"sample_rate": 0.5, "label_smoothing": 0.1}, "label_smoothing=0.1 was given with sample_rate"),
        ({"z_loss": -1.0}, "z_loss=-1.0 was given: use 0 or more"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ParallelLinearCrossEntropy(5, 12, **options)
    if set(options) <= {"softcap", "z_loss"}:
        with pytest.raises(ValueError, match=message):
            parallel_cross_entropy(torch.randn(3, 4), torch.tensor([0, 1, 2]), **options)
