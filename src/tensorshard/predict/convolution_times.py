"""How long convolutions take on this machine's CPU: each is timed when it is first met.

Curves of other operators suffice (:mod:`tensorshard.predict.operator_rates`), but a convolution's time depends on its
shape by more than its arithmetic says: with 24 channels of 48 x 48 pixels, it took six times as long as with 16.
Libraries that choose among algorithms time them, too (cuDNN's benchmark mode).
"""

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

_OPERATORS = {str(one): one for one in (torch.ops.aten.convolution, torch.ops.aten.convolution_backward)}
_REPEATS = 3
_LONGEST = 0.01  # seconds by its curve above which a convolution is timed with fewer samples
_DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}


@dataclass(frozen=True)
class ConvolutionCall:
    """A call of a convolution or of its backward.

    Args:
        operator: such as "aten.convolution".
        arguments: the operator's arguments; each tensor as ("tensor", its type, its sizes).
    """

    operator: str
    arguments: tuple[Any, ...]

    @property
    def samples(self) -> int:
        """The size of the first dimension of inputs and outputs."""
        return int(self.arguments[0][2][0])

    def with_samples(self, count: int) -> "ConvolutionCall":
        """The same call with so many samples."""
        batches = 2 if self.operator.endswith("backward") else 1  # an output's gradient, and an input
        changed = [(kind, dtype, (count, *sizes[1:])) for kind, dtype, sizes in self.arguments[:batches]]
        return ConvolutionCall(self.operator, (*changed, *self.arguments[batches:]))


def convolution_call(func: Any, args: Any, kwargs: Mapping[str, Any]) -> ConvolutionCall | None:
    """The call `func` ``(*args, **kwargs)``; None if it is no convolution of dense tensors in a usual type."""
    name = str(func.overloadpacket)
    if name not in _OPERATORS or kwargs or any(isinstance(arg, torch.Tensor) and arg.dim() < 1 for arg in args):
        return None
    arguments = tuple(_described(arg) for arg in args)
    tensors = [one for one in arguments if isinstance(one, tuple) and one[:1] == ("tensor",)]
    return ConvolutionCall(name, arguments) if all(dtype in _DTYPES for _, dtype, _ in tensors) else None


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype).removeprefix("torch."), tuple(map(int, value.shape)))
    return tuple(value) if isinstance(value, list | tuple) else value


@dataclass
class ConvolutionTimes:
    """Seconds of calls on one core of this machine.

    Args:
        path: the JSON file that keeps them for later processes; None for none. If it cannot be written, they are kept
            in this process alone.
    """

    path: Path | None = None
    _seconds: dict[str, float] = field(default_factory=dict)
    _is_read: bool = False

    def seconds(self, call: ConvolutionCall, expected: float) -> float:
        """Seconds of processor time of a call. It is made now, unless it was before.

        Args:
            expected: about how long it takes. Long calls are made with fewer samples.
        """
        samples = call.samples
        fewer = max(1, min(samples, int(samples * _LONGEST / expected))) if expected > 0 else samples
        made = call.with_samples(fewer)
        key = f"{made.operator} {made.arguments}"
        if not self._is_read:
            self._read()
        if key not in self._seconds:
            self._seconds[key] = _timed(made)
            self._write()
        return self._seconds[key] * samples / fewer

    def _read(self) -> None:
        self._is_read = True
        if self.path is not None:
            with suppress(OSError, ValueError, TypeError):
                found = json.loads(self.path.read_text())
                self._seconds = {str(key): float(seconds) for key, seconds in found.items()} | self._seconds

    def _write(self) -> None:
        if self.path is not None:
            with suppress(OSError):
                draft = self.path.with_name(f"{self.path.name}.{os.getpid()}")
                draft.write_text(json.dumps(self._seconds, indent=1) + "\n")
                draft.replace(self.path)


def _timed(call: ConvolutionCall) -> float:
    """The median of a few calls on one thread, after one that does not count."""
    arguments = [_made(argument) for argument in call.arguments]
    operator = _OPERATORS[call.operator]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            operator(*arguments)
            found = []
            for _ in range(_REPEATS):
                begin = time.thread_time()
                operator(*arguments)
                found.append(time.thread_time() - begin)
    finally:
        torch.set_num_threads(threads)
    return median(found)


def _made(argument: Any) -> Any:
    if isinstance(argument, tuple) and argument[:1] == ("tensor",):
        return torch.full(argument[2], 0.5, dtype=_DTYPES[argument[1]])
    return list(argument) if isinstance(argument, tuple) else argument
