"""Learning rate schedules, as functions from an optimizer to one of torch's own ``LRScheduler`` objects.

Every schedule here is a closed form of the step, so that a resumed run, also one with another number of steps
in all, gets the rate that an undisturbed run would have had.
"""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def warmup_cosine(optimizer: Optimizer, *, warmup_steps: int, total_steps: int, min_ratio: float = 0.1) -> LambdaLR:
    """Linear warm-up, then half a cosine down to `min_ratio` of the peak (Loshchilov and Hutter 2017).

    The peak is each parameter group's own ``lr``. The first step has ``1 / warmup_steps`` of it (or the peak itself
    without warm-up), the last one a rate just above the end of the cosine.

    Args:
        optimizer: its rates are set from now on.
        warmup_steps: optimizer steps until the peak; 0 for none. A run that is shorter ends before the peak.
        total_steps: optimizer steps until the end of the cosine. Further steps stay there.
        min_ratio: the last rate, as a fraction of the peak.

    Raises:
        ValueError: a negative number of steps, or a ratio outside 0 to 1.
    """
    _check(warmup_steps, total_steps, min_ratio)

    def ratio(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * _progress(step, warmup_steps, total_steps)))

    return LambdaLR(optimizer, ratio)


def warmup_linear(optimizer: Optimizer, *, warmup_steps: int, total_steps: int, min_ratio: float = 0.0) -> LambdaLR:
    """Linear warm-up, then a straight line down to `min_ratio` of the peak: BERT's (Devlin et al. 2019).

    Arguments and errors are those of :func:`warmup_cosine`.
    """
    _check(warmup_steps, total_steps, min_ratio)

    def ratio(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return 1 - (1 - min_ratio) * _progress(step, warmup_steps, total_steps)

    return LambdaLR(optimizer, ratio)


def warmup_decay(
    optimizer: Optimizer,
    *,
    warmup_steps: int,
    total_steps: int,
    shape: str = "linear",
    warmup_shape: str = "linear",
    start_ratio: float = 0.0,
    min_ratio: float = 0.0,
    decay_ratio: float | None = None,
    offset: int = 0,
    decay_offset: int = 0,
    overlap: bool = False,
) -> LambdaLR:
    """A warm-up and a decay as other programs count them: transformers, DeepSpeed, Megatron, torchtitan and LiBai.

    With ``s = max(0, step + offset)``, the rate rises from `start_ratio` of the peak to the peak while ``s`` is below
    `warmup_steps`, and then falls to `min_ratio` of it.

    Args:
        optimizer: its rates are set from now on.
        warmup_steps: the length of the warm-up; 0 for none.
        total_steps: where the decay ends. Further steps stay there.
        shape: of the decay: "constant", "linear", "cosine" or "sqrt".
        warmup_shape: "linear", or "log" for ``log(s + 1) / log(warmup_steps)``.
        start_ratio: the first rate, as a fraction of the peak.
        min_ratio: the last rate, as a fraction of the peak.
        decay_ratio: what part of `total_steps`, at the end, is for the decay; None for all after the warm-up.
        offset: 0 counts as transformers and Megatron do, 1 as torchtitan, -1 as DeepSpeed.
        decay_offset: is added to the steps of the decay: 1 for DeepSpeed's WarmupCosineLR.
        overlap: the decay counts from the first step, and the warm-up rises to where it is by then, as in LiBai.

    Raises:
        ValueError: a negative number of steps, a ratio outside 0 to 1, or an unknown shape.
    """
    _check(warmup_steps, total_steps, min_ratio)
    if shape not in ("constant", "linear", "cosine", "sqrt") or warmup_shape not in ("linear", "log"):
        raise ValueError(
            f"shape is {shape!r} and warmup_shape {warmup_shape!r}; expected constant, linear, cosine or sqrt, and "
            f"linear or log"
        )
    if decay_ratio is not None and not 0 <= decay_ratio <= 1:
        raise ValueError(f"decay_ratio is {decay_ratio}; expected 0 to 1, a part of all steps.")
    decay_steps = total_steps - warmup_steps if decay_ratio is None else round(total_steps * decay_ratio)
    decay_start = 0 if overlap else max(warmup_steps, total_steps - decay_steps)

    def ratio(step: int) -> float:
        count = max(0, step + offset)
        if count < warmup_steps:
            risen = count / warmup_steps if warmup_shape == "linear" else math.log(count + 1) / math.log(warmup_steps)
            return start_ratio + (decayed(warmup_steps) - start_ratio) * risen
        return decayed(count)

    def decayed(count: int) -> float:
        if shape == "constant" or count < decay_start:
            return 1.0
        done = min(1.0, (count - decay_start + decay_offset) / max(1, total_steps - decay_start))
        left = {"linear": 1 - done, "sqrt": 1 - math.sqrt(done)}.get(shape, 0.5 * (1 + math.cos(math.pi * done)))
        return min_ratio + (1 - min_ratio) * left

    return LambdaLR(optimizer, ratio)


def constant(optimizer: Optimizer, *, warmup_steps: int = 0) -> LambdaLR:
    """Linear warm-up over `warmup_steps`, then the peak rate for good."""
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps is {warmup_steps}; expected 0 or more.")
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / max(1, warmup_steps)))


def _progress(step: int, warmup_steps: int, total_steps: int) -> float:
    """How much of the way from the peak to the end is done, 0 to 1."""
    return min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))


def _check(warmup_steps: int, total_steps: int, min_ratio: float) -> None:
    if total_steps < 1:
        raise ValueError(f"total_steps is {total_steps}; expected at least 1.")
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps is {warmup_steps}; expected 0 or more.")
    if not 0 <= min_ratio <= 1:
        raise ValueError(f"min_ratio is {min_ratio}; expected 0 to 1, a fraction of the peak rate.")
