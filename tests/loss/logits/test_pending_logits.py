"""Logits that look whole and are not computed: exact whatever is done with them, tiles where a loss takes these."""

import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from own_operations import SumOfSquares
from tensorshard.loss import tiled_loss, tiles
from tensorshard.loss.logits.deferred_logits import DeferredLogits, Source
from tensorshard.loss.logits.linear_logits import LinearLogits
from tensorshard.loss.logits.output_layers import defer_linear
from tensorshard.loss.loss_arguments import ClassShard
from tensorshard.nn.functional import parallel_cross_entropy

FEATURES, CLASSES = 6, 23
TARGETS = torch.randint(0, CLASSES, (3, 5), generator=torch.Generator().manual_seed(0))
TARGETS[0, 1] = -100
FLAT = TARGETS.flatten()
CLASS_WEIGHTS = torch.linspace(0.5, 2, CLASSES, dtype=torch.float64)


@pytest.fixture(autouse=True)
def several_tiles(monkeypatch):
    """Tiles of 4 classes, and 6 rows at once, so that a few of each make up these logits."""
    monkeypatch.setattr(tiles, "tile_width", lambda *_: 4)
    monkeypatch.setattr(tiled_loss, "rows_at_once", lambda *_: 6)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, CLASSES)


def _loss(x: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(_rows(x), FLAT, **options)


def _as_causal_models_do(x: torch.Tensor) -> torch.Tensor:
    shifted = x.double()[..., :-1, :].contiguous().view(-1, CLASSES)
    return F.cross_entropy(shifted.to("cpu"), TARGETS[:, 1:].reshape(-1), reduction="sum") / 7


def _with_z_loss(x: torch.Tensor) -> torch.Tensor:
    return _loss(x) + 1e-2 * x.logsumexp(-1).square().mean()


def _our_loss(x: torch.Tensor) -> torch.Tensor:
    found = parallel_cross_entropy(
        _rows(x), FLAT, z_loss=1e-2, label_smoothing=0.1, return_lse=True, return_token_accuracy=True
    )
    return found.loss + found.lse.square().mean() + found.token_accuracy


def _after_a_metric(x: torch.Tensor) -> torch.Tensor:
    right = (x.detach().argmax(-1) == TARGETS).double().mean()
    with torch.no_grad():
        best = x.topk(3, dim=-1).indices
    return _loss(x) * (1 + right) + (x.max(-1)[1] * best[..., 2]).sum()


def _values_of_topk(x: torch.Tensor) -> torch.Tensor:
    values, classes = (torch.tanh(x / 5) * 5 + 2).topk(4)
    return (values * classes).sum() + x.max(dim=-1, keepdim=True).values.sum()


TILED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flat": _loss,
    "its module": lambda x: nn.CrossEntropyLoss(label_smoothing=0.1)(x.view(15, -1), FLAT),
    "a sum": lambda x: _loss(x, reduction="sum"),
    "of each token": lambda x: (_loss(x, reduction="none") * torch.arange(15)).sum(),
    "class weights": lambda x: _loss(x, weight=CLASS_WEIGHTS, label_smoothing=0.2),
    "another ignored class": lambda x: F.cross_entropy(_rows(x), FLAT.clamp(min=0), ignore_index=3),
    "as causal models do": _as_causal_models_do,
    "classes second": lambda x: F.cross_entropy(x.transpose(1, 2), TARGETS, label_smoothing=0.1),
    "permuted": lambda x: F.cross_entropy(x.permute(0, 2, 1), TARGETS, reduction="sum"),
    "rows by a mask": lambda x: F.cross_entropy(x[TARGETS != -100], TARGETS[TARGETS != -100]),
    "the last position": lambda x: F.cross_entropy(x[:, -1], TARGETS[:, -1]),
    "one token": lambda x: F.cross_entropy(x[1, 2], TARGETS[1, 2]),
    "soft cap": lambda x: _loss(torch.tanh(x / 3.0) * 3.0),
    "soft cap and temperature": lambda x: _loss((x * 0.5).div(2.0).tanh().mul(4.0) / 0.7),
    "scaled and shifted": lambda x: _loss((x - 1.0) * 0.3 + 5) + (2 * x + 1).logsumexp(-1).sum(),
    "another bias": lambda x: _loss(x * 0.5 + CLASS_WEIGHTS),
    "log-softmax": lambda x: F.nll_loss(F.log_softmax(_rows(x), -1), FLAT),
    "log-softmax of its module": lambda x: nn.NLLLoss(CLASS_WEIGHTS)(nn.LogSoftmax(-1)(_rows(x)), FLAT),
    "one class a token": lambda x: x.log_softmax(-1).gather(-1, TARGETS.clamp(min=0).unsqueeze(-1)).sum(),
    "z-loss": _with_z_loss,
    "our own loss": _our_loss,
    "metrics without gradients": _after_a_metric,
    "values of topk": _values_of_topk,
    "two losses": lambda x: _loss(x) + 0.3 * _loss(x * 2, label_smoothing=0.1),
}


def _written(x: torch.Tensor) -> torch.Tensor:
    x[..., 3] = -5.0
    return _loss(x)


def _written_through_a_view(x: torch.Tensor) -> torch.Tensor:
    rows, doubled = x.view(-1, CLASSES), x * 2
    rows.mul_(0.5)
    return _loss(x) + doubled.square().sum()


def _written_after_the_loss(x: torch.Tensor) -> torch.Tensor:
    loss = _loss(x)
    x.zero_()
    return loss + x.sum()


def _written_past_autograd(x: torch.Tensor) -> torch.Tensor:
    before = x.view(-1, CLASSES)
    x.data.mul_(2.0)
    return _loss(before)


def _halved_and_squared(x: torch.Tensor) -> torch.Tensor:
    x.mul_(0.5)
    x[..., 1] *= 3.0
    return SumOfSquares.apply(x) + x.tanh().sum()


def _hooked(x: torch.Tensor) -> torch.Tensor:
    x.register_hook(lambda grad: grad * 2)
    return _loss(x)


def _probabilities(x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(_rows(x), _rows(x.detach()).softmax(-1))


def _masked(x: torch.Tensor) -> torch.Tensor:
    return _loss(x.masked_fill(torch.arange(CLASSES) == 4, -9.0))


def _saved(x: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(x.detach(), file)
    file.seek(0)
    return _loss(x) * torch.load(file).square().mean() * float(x.detach().numpy().max())


def _own_gradient(x: torch.Tensor) -> torch.Tensor:
    x.retain_grad()
    loss = _loss(x)
    (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
    return loss * grad.square().sum()


COMPUTED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "loss and probabilities": lambda x: _loss(x) + x.softmax(-1)[..., :4].sum(),
    "probabilities, then the loss": lambda x: x.softmax(-1)[..., :4].sum() + _loss(x),
    "class probabilities": _probabilities,
    "fewer classes": lambda x: F.cross_entropy(x[..., :7].flatten(0, 1), FLAT % 7),
    "written": _written,
    "written through a view": _written_through_a_view,
    "written after the loss": _written_after_the_loss,
    "written past autograd": _written_past_autograd,
    "a function of its own": SumOfSquares.apply,
    "a view, to a function of its own": lambda x: SumOfSquares.apply(x.transpose(0, 1) * 2),
    "written, then a function of its own": _halved_and_squared,
    "a hook": _hooked,
    "saved": _saved,
    "its own gradient": _own_gradient,
    "masked classes": _masked,
    "arithmetic with others": lambda x: (x + torch.arange(5.0).double()[:, None]).logsumexp(-1).mean(),
    "sums with themselves": lambda x: (x + x.mean() - x.flatten()[0]).square().sum(),
    "rows in a loop": lambda x: sum(
        F.cross_entropy(row, t, reduction="sum") for row, t in zip(x, TARGETS, strict=True)
    ),
    "mean squares": lambda x: F.mse_loss(x, torch.zeros_like(x)),
    "a matrix product": lambda x: (x @ torch.ones(CLASSES, 2, dtype=x.dtype)).square().sum(),
    "put together": lambda x: torch.cat([x, x * 2], 1).std(),
    "some classes of log-softmax": lambda x: x.log_softmax(-1)[..., 2].sum(),
    "by way of bf16": lambda x: _loss(x.to(torch.bfloat16).double()),
    "binary": lambda x: F.binary_cross_entropy_with_logits(x, (x > 0).double()),
    "numbers": lambda x: _loss(x) * float(x[0, 0, 0].item() + x.tolist()[1][1][1]),
    "divergence": lambda x: F.kl_div(x.log_softmax(-1), x.detach().flip(-1).softmax(-1), reduction="sum"),
}


def _tensors(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    shapes = (3, 5, FEATURES), (CLASSES, FEATURES), (CLASSES,)
    return tuple(torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes)


def _pending(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, **options: Any) -> tuple[Any, Source, list[Any]]:
    uses: list[Any] = []
    linear = LinearLogits(x, x.ndim - 1, w, b, ClassShard(0, CLASSES, None), **options)
    logits, source = defer_linear(linear, lambda name, computed: uses.append((name, computed)))
    return logits, source, uses


def _compare(use: Callable[[torch.Tensor], torch.Tensor], *, computed: bool, **options: Any) -> None:
    given = _tensors()
    whole = F.linear(*given)
    expected = use(whole)
    expected_grads = torch.autograd.grad(expected, given)
    logits, _, uses = _pending(*given, **options)
    assert logits.shape == whole.shape and logits.dtype == whole.dtype and logits.requires_grad
    found = use(logits)
    assert type(found) is torch.Tensor and found.dtype == expected.dtype
    grads = torch.autograd.grad(found, given)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-6, atol=1e-9)
    assert any(was for _, was in uses) == computed, uses


@pytest.mark.parametrize("use", TILED)
def test_a_loss_takes_tiles(use):
    _compare(TILED[use], computed=False)
    _compare(TILED[use], computed=False, at_once=False)


@pytest.mark.parametrize("use", COMPUTED)
def test_anything_else_has_them_computed(use):
    _compare(COMPUTED[use], computed=True)


def test_backward_twice_and_scaled():
    given = _tensors()
    whole, (logits, _, _) = _loss(F.linear(*given)), _pending(*given)
    loss = _loss(logits)
    for factor in (1.0, 3.0):
        expected = torch.autograd.grad(whole * factor, given, retain_graph=True)
        for found, wanted in zip(torch.autograd.grad(loss * factor, given, retain_graph=True), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


def test_without_a_bias_and_with_a_weight_that_is_not_trained():
    x, w, _ = _tensors()
    w = w.detach()
    (expected,) = torch.autograd.grad(_loss(F.linear(x, w)), x)
    (found,) = torch.autograd.grad(_loss(_pending(x, w, None)[0]), x)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_a_target_outside_the_classes_is_refused():
    with pytest.raises(IndexError, match=r"target 40, number \d+ of \d+, is outside the 23 classes"):
        F.cross_entropy(_rows(_pending(*_tensors())[0]), FLAT.masked_fill(FLAT[3] == FLAT, 40))


def test_a_gradient_that_the_loss_did_not_go_through_is_refused():
    logits, _, _ = _pending(*_tensors())
    loss = _loss(logits)
    with pytest.raises(RuntimeError, match=r"a loss took these logits a tile at a time.*logits='whole'"):
        torch.autograd.grad(loss, logits)


def test_who_keeps_them_is_known():
    logits, source, uses = _pending(*_tensors())
    kept = logits.view(-1, CLASSES)
    loss = _loss(logits)
    del logits
    gc.collect()
    assert source.is_reachable()
    expected = F.linear(*_tensors()).view(-1, CLASSES)
    source.compute("who kept them")
    assert uses[-1] == ("who kept them", True)
    torch.testing.assert_close(kept + 0, expected)
    logits, source, _ = _pending(*_tensors())
    loss = _loss(logits)
    seen = weakref.ref(logits)
    del logits
    assert loss.requires_grad and seen() is None and not source.is_reachable()


def test_in_bf16_within_its_rounding():
    given = _tensors(torch.bfloat16)
    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    expected = torch.autograd.grad(_loss(F.linear(*exact)), exact)
    whole = torch.autograd.grad(_loss(F.linear(*given).float()), given)
    found = torch.autograd.grad(_loss(_pending(*given)[0].float()), given)
    for ours, plain, wanted in zip(found, whole, expected, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours.double() - wanted).norm() <= 1.5 * (plain.double() - wanted).norm() + 1e-3


def test_they_can_be_printed_and_their_class_is_not_seen():
    logits, _, _ = _pending(*_tensors())
    assert isinstance(logits, DeferredLogits) and "tensor(" in repr(logits)
    assert type(logits + 1) is torch.Tensor  # computed by now
