"""Whether two trainings are the same, and whose fault an exception is."""

import linecache
import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch

import tensorshard
from benchmarks.harness.models_training import Trained

_PACKAGE = Path(tensorshard.__file__).parent
_RELAYS = ("decisions.py",)  # they raise the first rank's error on other ranks

FP32_TOLERANCE = 1e-5
FP64_TOLERANCE = 1e-7
# For models that compute parts of themselves in fp32 whatever their weights are: in fp64 a real fault stays as large,
# rounding does not.
_FP64_SHRINKS = 0.1


@dataclass(frozen=True)
class Difference:
    """How far two trainings are apart: the losses, and the weights and buffers, each relative to 1 or to the largest
    value if that is larger.

    Args:
        where: the tensor that differs most.
        names: what is wrong with the state dict's names or shapes, if anything.
    """

    losses: float
    weights: float
    where: str = ""
    names: str = ""

    @property
    def largest(self) -> float:
        return math.inf if self.names else max(self.losses, self.weights)

    def describe(self) -> str:
        """One line."""
        if self.names:
            return self.names
        return f"losses by {self.losses:.1e}, weights by {self.weights:.1e} at {self.where}"


def difference(actual: Trained, expected: Trained) -> Difference:
    """How `actual` differs from `expected`. The difference is infinite if a number is not finite."""
    losses = max(
        _relative(torch.tensor(a), torch.tensor(b)) for a, b in zip(actual.losses, expected.losses, strict=True)
    )
    if set(actual.state) != set(expected.state):
        names = sorted(set(actual.state) ^ set(expected.state))
        return Difference(losses, math.inf, names=f"the state dicts' names differ: {', '.join(names[:4])}")
    worst, where = 0.0, ""
    for name, want in expected.state.items():
        have = actual.state[name]
        if have.shape != want.shape:
            return Difference(losses, math.inf, names=f"{name} is of shape {list(have.shape)}, not {list(want.shape)}")
        if want.numel() and (apart := _relative(have, want)) >= worst:
            worst, where = apart, name
    return Difference(losses, worst, where)


def is_exact(fp32: Difference, fp64: Difference | None = None) -> bool:
    """Whether a difference is only rounding.

    Args:
        fp64: the difference of the same trainings in fp64, if `fp32` left doubt and they could run.
    """
    if fp32.largest <= FP32_TOLERANCE:
        return True
    return fp64 is not None and fp64.largest <= max(FP64_TOLERANCE, _FP64_SHRINKS * min(fp32.largest, 1e-4))


def bf16_allowance(alone: Trained, others: list[Trained], resting: Collection[str] = ()) -> tuple[float, float]:
    """How far bf16 trainings on several ranks may be from one process's.

    That is three times the effect of another order of the samples, or of two micro-batches; plus an eighth of the last
    bit for the loss, and a twentieth of a step for the weights.

    Args:
        alone: the training of one process.
        others: the same with the samples of each batch in other orders, and in micro-batches.
        resting: as for :func:`bf16_distance`.

    Returns:
        The bounds of :func:`bf16_distance`.
    """
    spread = [bf16_distance(alone, other, resting) for other in others]
    last_bit = 2**-9 * max(abs(loss) for loss in alone.losses)
    return 3 * max(loss for loss, _ in spread) + last_bit, 3 * max(weights for _, weights in spread) + 0.05 * 3e-3


def bf16_distance(a: Trained, b: Trained, resting: Collection[str] = ()) -> tuple[float, float]:
    """The largest distance of losses, and the root mean square of the distances of weights.

    Args:
        resting: weights to leave out, since fp32 does not move them. Their gradients are zero but for rounding (those
            of a bias before a norm, say), and bf16's rounding is large enough for AdamW to take whole steps with it.
    """
    losses = max(abs(x - y) for x, y in zip(a.losses, b.losses, strict=True))
    names = [n for n, value in a.state.items() if value.is_floating_point() and n in b.state and n not in resting]
    squares = sum((a.state[n].double() - b.state[n].double()).square().sum().item() for n in names)
    return losses, math.sqrt(squares / max(1, sum(a.state[n].numel() for n in names)))


def _relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    a, b = actual.detach().double(), expected.detach().double()
    if not torch.equal(torch.isfinite(a), torch.isfinite(b)):
        return math.inf
    finite = torch.isfinite(b)
    if not finite.any():
        return 0.0
    return ((a - b)[finite].abs().max() / b[finite].abs().max().clamp(min=1.0)).item()


@dataclass(frozen=True)
class Failure:
    """An exception on a rank.

    Args:
        is_sentence: whether it is one of tensorshard's own messages.
        is_relayed: whether it repeats another rank's error.
        where: the file and line that raised it.
    """

    kind: str
    message: str
    is_sentence: bool
    is_relayed: bool
    where: str
    stage: str
    time: float

    @property
    def first_sentence(self) -> str:
        """The message up to its first full stop, semicolon or line break, at most 240 characters; of a list after a
        colon, the first line."""
        line, *others = self.message.strip().split("\n")
        for end in ("; ", ". "):
            line = line.split(end)[0]
        if line.endswith(":") and others:
            line += f" {others[0].strip()}"
        return line[:240]


def failure_of(error: BaseException, stage: str, time: float) -> Failure:
    """What is known of `error`, which was raised on this rank.

    It counts as one of tensorshard's messages if a ``raise`` statement of tensorshard raised it. Errors of other
    libraries do not, wherever they passed through.
    """
    trace = error.__traceback__
    frames = []
    while trace is not None:
        frames.append((Path(trace.tb_frame.f_code.co_filename), trace.tb_lineno))
        trace = trace.tb_next
    path, line = frames[-1] if frames else (Path(), 0)
    ours = path.is_relative_to(_PACKAGE)
    raised = linecache.getline(str(path), line).strip().startswith("raise ")
    inner = [f"{p.relative_to(_PACKAGE)}:{number}" for p, number in frames if p.is_relative_to(_PACKAGE)]
    where = f"{path.parent.name}/{path.name}:{line}" + (f", called from {inner[-1]}" if inner and not ours else "")
    return Failure(
        kind=type(error).__name__,
        message=str(error),
        is_sentence=ours and raised,
        is_relayed=path.name in _RELAYS,
        where=where,
        stage=stage,
        time=time,
    )
