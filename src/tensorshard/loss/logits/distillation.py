"""The divergence of a student's logits from a teacher's, some rows at a time, so that neither need be held."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tensorshard.loss.logits.deferred_logits import DeferredLogits
from tensorshard.loss.logits.linear_logits import LinearLogits

_ROW_BYTES = 32 << 20  # of one model's logits that are there at a time

Logits = Callable[[slice, tuple[torch.Tensor | None, ...]], torch.Tensor]


def distillation_loss(
    student: torch.Tensor, teacher: torch.Tensor, *, temperature: float = 1.0, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """How far a student's distribution over the classes is from a teacher's (Hinton et al. 2015), as a loss function
    returns it: KL(teacher || student) of logits over the temperature, times its square, summed over the tokens; and the
    number of tokens.

    Some rows are computed at a time. Logits that a plan computes in tiles (``Plan(logits=...)``) are not held, and the
    student's gradients are computed in forward, so that no matrix product is done twice.

    Args:
        student, teacher: logits [..., classes]. No gradient reaches the teacher's.
        temperature: above 0.
        mask: which tokens count, [...] of bools; None for all.

    Returns:
        Two scalars, the sum in fp32 and the count, for ``loss_fn``: the gradient is then that of the mean over all
        tokens of the global batch.

    Raises:
        ValueError: the shapes differ, or the temperature is not above 0.

    Examples:
        >>> student, teacher = torch.randn(2, 5, 32, requires_grad=True), torch.randn(2, 5, 32)
        >>> total, count = ts.nn.functional.distillation_loss(student, teacher, temperature=2.0)
        >>> (total / count).backward()
    """
    if student.shape != teacher.shape or student.dim() == 0:
        raise ValueError(
            f"distillation_loss was given a student's logits of shape {tuple(student.shape)} and a teacher's of "
            f"{tuple(teacher.shape)}; they must be equal: [..., classes]"
        )
    if not temperature > 0:
        raise ValueError(f"distillation_loss was given temperature={temperature}; it must be above 0")
    tokens = student.shape[:-1]
    if mask is not None and mask.shape != tokens:
        raise ValueError(
            f"distillation_loss was given a mask of shape {tuple(mask.shape)} for tokens of shape {tuple(tokens)}"
        )
    student_rows, sources = _rows(student)
    teacher_rows, held = _rows(teacher.detach())
    counted = torch.ones(tokens, device=student.device) if mask is None else mask.to(student.device, torch.float32)
    shape = tokens.numel(), student.size(-1)
    total = _Divergence.apply(
        student_rows, lambda rows: teacher_rows(rows, held), shape, counted.flatten(), float(temperature), *sources
    )
    return total, counted.sum()


def _rows(logits: torch.Tensor) -> tuple[Logits, tuple[torch.Tensor | None, ...]]:
    """What computes rows of `logits` in fp32 from tensors, and these tensors: the first has the rows."""
    if isinstance(logits, DeferredLogits):
        form = logits.form
        if isinstance(form, LinearLogits) and form.class_dim == logits.dim() - 1 and not logits.source.computed:
            logits.source.take_tiles("distillation_loss")

            def computed(rows: slice, sources: tuple[torch.Tensor | None, ...]) -> torch.Tensor:
                features, weight, bias = sources
                assert features is not None and weight is not None
                return replace(form, features=features[rows], class_dim=1, weight=weight, bias=bias).full(torch.float32)

            return computed, (form.features.flatten(0, -2), form.weight, form.bias)
        logits.source.compute("distillation_loss")
        logits = logits.full()
    return (lambda rows, sources: sources[0][rows].float()), (logits.flatten(0, -2),)  # type: ignore[index]


class _Divergence(torch.autograd.Function):
    """The sum over rows. Its gradient is known up to a factor, and computed in forward."""

    @staticmethod
    def forward(
        ctx: Any,
        student: Logits,
        teacher: Callable[[slice], torch.Tensor],
        shape: tuple[int, int],
        counted: torch.Tensor,
        temperature: float,
        *sources: torch.Tensor | None,
    ) -> torch.Tensor:
        count, classes = shape
        needed = ctx.needs_input_grad[5:]
        leaves = tuple(
            None if source is None else source.detach().requires_grad_(need)
            for source, need in zip(sources, needed, strict=True)
        )
        wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        sums = [torch.zeros_like(leaf, dtype=torch.promote_types(leaf.dtype, torch.float32)) for leaf in wanted]
        total = torch.zeros((), dtype=torch.float64, device=counted.device)
        step = max(1, _ROW_BYTES // (4 * classes))
        for first in range(0, count, step):
            rows = slice(first, first + step)
            with torch.enable_grad():
                divergence = _divergence(student(rows, leaves), teacher(rows), temperature)
                part = (divergence * counted[rows]).sum()
            total += part.detach()
            if wanted:
                for known, gradient in zip(sums, torch.autograd.grad(part, wanted), strict=True):
                    known.add_(gradient)
        gradients = iter(known.to(leaf.dtype) for known, leaf in zip(sums, wanted, strict=True))
        ctx.save_for_backward(
            *(next(gradients) if leaf is not None and leaf.requires_grad else None for leaf in leaves)
        )
        return total.float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        gradients = (None if g is None else g * grads[0].to(g.dtype) for g in ctx.saved_tensors)
        return None, None, None, None, None, *gradients


def _divergence(student: torch.Tensor, teacher: torch.Tensor, temperature: float) -> torch.Tensor:
    """KL(teacher || student) of each row, times the squared temperature."""
    logs = (teacher / temperature).log_softmax(-1)
    shares = logs.exp()
    differences = logs - (student / temperature).log_softmax(-1)
    return torch.where(shares > 0, shares * differences, 0.0).sum(-1) * temperature**2
