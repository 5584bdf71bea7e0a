"""The divergence from a teacher's logits: values and gradients of torch's, for logits that are held or not."""

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

import parity
import tensorshard as ts
from tensorshard.loss.logits import distillation
from tensorshard.models import GPT
from tensorshard.nn.functional import distillation_loss


def _torchs(student: torch.Tensor, teacher: torch.Tensor, temperature: float, mask: torch.Tensor) -> torch.Tensor:
    logs = [(logits / temperature).log_softmax(-1) for logits in (student, teacher)]
    return (F.kl_div(*logs, reduction="none", log_target=True).sum(-1) * mask).sum() * temperature**2


@pytest.mark.parametrize("row_bytes", [1 << 25, 4 * 11 * 2])
def test_it_is_torchs_kl_div(row_bytes):
    torch.manual_seed(0)
    student = torch.randn(3, 5, 11, dtype=torch.float64).requires_grad_()
    teacher = 3 * torch.randn(3, 5, 11)
    mask = torch.rand(3, 5) < 0.7
    with mock.patch.object(distillation, "_ROW_BYTES", row_bytes):
        total, count = distillation_loss(student, teacher, temperature=2.0, mask=mask)
    expected = _torchs(student, teacher, 2.0, mask)
    assert count == mask.sum()
    torch.testing.assert_close(total, expected.float(), rtol=1e-5, atol=1e-6)
    (2 * total).backward()
    torch.testing.assert_close(student.grad, torch.autograd.grad(2 * expected, student)[0], rtol=1e-5, atol=1e-6)


def test_classes_that_the_teacher_excludes_count_nothing():
    student = torch.randn(4, 6, requires_grad=True)
    teacher = torch.randn(4, 6).masked_fill(torch.arange(6) == 2, -torch.inf)
    total, _ = distillation_loss(student, teacher)
    total.backward()
    assert total.isfinite() and student.grad.isfinite().all()


def test_what_does_not_fit_says_so():
    logits = torch.randn(4, 6)
    for arguments, words in (
        ((logits, logits[:, :5]), "must be equal"),
        ((logits, logits, -1.0), "must be above 0"),
        ((logits, logits, 1.0, torch.ones(6)), "a mask of shape"),
    ):
        with pytest.raises(ValueError, match=words):
            distillation_loss(*arguments[:2], **dict(zip(("temperature", "mask"), arguments[2:], strict=False)))


def _loss(teacher: Any, model: Any, batch: Any) -> Any:
    tokens, targets = batch
    return teacher.distillation_loss(tokens, model(tokens), temperature=1.5, mask=targets % 3 > 0)


def _trained(fields: dict[str, Any], of_teacher: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor], str]:
    torch.manual_seed(4)
    teacher = ts.parallelize_frozen(GPT(61, 16, 2, 2, 30), ts.Plan(**of_teacher))
    model = parity.build("gpt")
    loss_fn = partial(_loss, teacher)
    engine = ts.parallelize(model, ts.Plan(**fields), optimizer=parity.ADAMW, loss_fn=loss_fn)
    losses = [engine.step(parity.shard(engine, *parity.batch("gpt", step))).item() for step in range(5)]
    return losses, engine.full_state_dict(), engine.summary().logits or ""


def _alone() -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(4)
    teacher = GPT(61, 16, 2, 2, 30)
    model = parity.build("gpt")
    optimizer = parity.ADAMW(model.parameters())
    losses = []
    for step in range(5):
        tokens, targets = parity.batch("gpt", step)
        mask = targets % 3 > 0
        with torch.no_grad():
            wanted = teacher(tokens)
        loss = _torchs(model(tokens), wanted, 1.5, mask) / mask.sum()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "tiled-zero3": (2, dict(zero=3, logits="tiled"), dict(zero=3, logits="tiled")),
    "tiled-tp": (2, dict(tp=2, logits="tiled"), dict(tp=2, logits="tiled")),
    "tiled-micro": (2, dict(zero=2, logits="tiled", micro_batches=2), dict(zero=1, logits="whole")),
    "whole": (2, dict(zero=1, logits="whole"), dict(zero=3, logits="tiled")),
    "teacher-pp": (2, dict(tp=2), dict(pp=2, micro_batches=2)),
    "tiled-tp-zero3": (4, dict(tp=2, zero=3, logits="tiled", recompute="full"), dict(tp=2, zero=3, logits="tiled")),
}


@pytest.mark.fast_cases("tiled-zero3")
@pytest.mark.parametrize("case", CASES)
def test_a_student_learns_as_in_one_process(ranks, case):
    size, fields, of_teacher = CASES[case]
    expected, state = ranks(1, _alone)[0]
    losses, found, logits = ranks(size, _trained, fields, of_teacher)[0]
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    parity.assert_same_state(found, state, 1e-5)
    assert ("are not held" in logits) == ("tiled" in str(fields)), logits
