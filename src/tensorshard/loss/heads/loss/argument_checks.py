"""Checks of a head's tensors and options, before anything is allocated."""

import torch

from tensorshard.loss.heads.loss.head_loss import Extras
from tensorshard.loss.heads.loss.head_spec import autocast_dtype
from tensorshard.loss.heads.loss.margins import Margin
from tensorshard.loss.softmax_cross_entropy import CrossEntropySpec
from tensorshard.torch_private.operators import assert_async

_TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_head(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    loss: CrossEntropySpec,
    class_weight: torch.Tensor | None,
    keep_logits: bool | None,
    margin: Margin | None,
    scale: float,
    normalize: bool,
    extras: Extras,
) -> None:
    """Refuses tensors and options that do not fit together.

    Args:
        weight, bias: this rank's part.

    Raises:
        IndexError: a target is outside the classes.
        ValueError: anything else.
    """
    check_options(loss, keep_logits, margin, scale, normalize, bias is not None)
    _check_tensors(input, weight, target, bias, extras)
    if class_weight is not None:
        if list(class_weight.shape) != [loss.classes]:
            raise ValueError(
                f"class_weight {list(class_weight.shape)} was given for {loss.classes} classes: expected "
                f"[{loss.classes}], all classes on every rank"
            )
        if class_weight.requires_grad:
            raise ValueError(
                "class_weight requires a gradient, which a head does not compute: give class_weight.detach()"
            )
    if extras.sample is not None:
        check_sampled(loss)
    check_targets(target, loss.classes, loss.ignore_index)


def check_options(
    loss: CrossEntropySpec,
    keep_logits: bool | None,
    margin: Margin | None,
    scale: float,
    normalize: bool,
    bias: bool,
) -> None:
    """Refuses options that do not fit together.

    Raises:
        ValueError: they do not.
    """
    if margin is not None and not hasattr(margin, "apply"):
        raise TypeError(f"margin={margin!r} was given: use ts.nn.ArcFace(...), ts.nn.CosFace(...), or None")
    if loss.softcap is not None and margin is not None:
        raise ValueError(
            f"softcap={loss.softcap} was given with {margin}: a margin changes a cosine, and a cap bends what it did. "
            "Cosines are bounded without one: leave softcap out"
        )
    if loss.softcap is not None and keep_logits:
        raise ValueError(
            f"keep_logits=True was given with softcap={loss.softcap}: what is kept are exponentials, from which the "
            "slope of the cap cannot be told. Leave keep_logits out"
        )
    if not scale > 0:
        raise ValueError(f"scale={scale} was given: use a number above 0")
    if margin is not None and not normalize:
        raise ValueError(
            f"{margin} was given without normalize=True: a margin changes a cosine, so rows must have length 1"
        )
    if bias and normalize:
        what = f"{margin}" if margin is not None else "normalize=True"
        raise ValueError(
            f"a bias was given with {what}: logits are then cosines, to which nothing is added. Leave it out"
        )


def check_sampled(loss: CrossEntropySpec) -> None:
    """Refuses options that need all classes, on a head that samples them.

    Raises:
        ValueError: one was given.
    """
    if loss.label_smoothing:
        raise ValueError(
            f"label_smoothing={loss.label_smoothing} was given with sample_rate: smoothing spreads over all classes, a "
            "sample leaves most of them out. Use one of the two"
        )
    if loss.return_token_accuracy:
        raise ValueError(
            "return_token_accuracy=True was given with sample_rate: the largest logit may be of a class that the "
            "sample leaves out. Use accuracy(), which computes all classes"
        )


def _check_tensors(
    input: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None, extras: Extras
) -> None:
    if weight.ndim != 2 or input.ndim < 1 or input.size(-1) != weight.size(1):
        raise ValueError(
            f"an input {list(input.shape)} was given for a weight {list(weight.shape)}: expected [*, {weight.size(-1)}]"
        )
    if not isinstance(target, torch.Tensor):
        raise TypeError(f"targets are {target!r}: give class numbers, as a tensor of integers")
    if target.is_floating_point() or target.dtype == torch.bool:
        raise ValueError(f"targets of type {target.dtype} were given: give class numbers, as integers")
    if target.shape != input.shape[:-1]:
        raise ValueError(
            f"targets {list(target.shape)} were given for an input {list(input.shape)}: expected "
            f"{list(input.shape[:-1])}"
        )
    if bias is not None and list(bias.shape) != [len(weight)]:
        raise ValueError(f"a bias {list(bias.shape)} was given for {len(weight)} classes: expected [{len(weight)}]")
    types = {"input": input.dtype, "weight": weight.dtype, **({} if bias is None else {"bias": bias.dtype})}
    if any(dtype not in _TYPES for dtype in types.values()):
        raise ValueError(f"{_listed(types)} were given: use floating-point types, of {', '.join(map(str, _TYPES))}")
    mixes_wide = len({dtype == torch.float64 for dtype in types.values()}) > 1
    if len(set(types.values())) > 1 and (autocast_dtype(input) is None or mixes_wide) and not extras.casts:
        raise ValueError(
            f"{_listed(types)} were given: use one type, or torch.autocast"
            + (", which leaves fp64 alone" if mixes_wide else "")
        )


def check_targets(target: torch.Tensor, classes: int, ignore_index: int) -> None:
    """Refuses targets outside the classes. On a GPU the check is asynchronous, so that nobody waits for it.

    Raises:
        IndexError: on the CPU. It names the first such target.
    """
    if target.numel() == 0 or target.is_meta:
        return
    outside = ((target < 0) | (target >= classes)) & (target != ignore_index)
    if target.device.type != "cpu" or type(target) is not torch.Tensor:  # nothing to read yet, as in tracing
        assert_async(~outside.any(), f"a target outside the {classes} classes")
    elif outside.any():
        first = outside.flatten().nonzero()[0, 0]
        raise IndexError(
            f"target {int(target.flatten()[first])}, number {int(first)} of {target.numel()}, is outside the {classes} "
            f"classes: use 0 to {classes - 1}, or {ignore_index} for what is to be ignored"
        )


def _listed(types: dict[str, torch.dtype]) -> str:
    return ", ".join(f"{name} of {str(dtype).removeprefix('torch.')}" for name, dtype in types.items())
