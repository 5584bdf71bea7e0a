"""Random words for any box of a tensor, as if the whole had been drawn: numpy's Philox 4x64-10.

Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) computes the n-th block of a stream from a
key and n alone. A word is 32 bits, and a block has eight of them. An element's place in the whole tensor is its place
in the stream. Rows begin at whole blocks.
"""

import hashlib
import math
import threading
from collections.abc import Sequence

import numpy as np
import torch

from tensorshard.random.philox_on_device import words_on_device

_BLOCK = 8  # words
_LONG_RUN = 2048  # words; shorter runs are drawn together with what is between them
_MOST_DRAWN = 16 * _LONG_RUN  # words that are drawn at once for short runs


def key_of(*parts: object) -> int:
    """A key of 128 bits for values that have a ``repr``."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=16).digest(), "little")


class _Stream(threading.local):
    """numpy's generator. To set its state takes an eighth of the time that a new one takes."""

    def __init__(self) -> None:
        self._generator = np.random.Philox(key=0)
        self._state = self._generator.state

    def words(self, key: int, start: int, count: int) -> np.ndarray:
        first = start // _BLOCK
        self._state["state"]["counter"][0] = first
        self._state["state"]["key"][:] = key & 0xFFFF_FFFF_FFFF_FFFF, key >> 64
        self._generator.state = self._state
        blocks = -(-(start + count) // _BLOCK) - first
        begin = start - first * _BLOCK
        return self._generator.random_raw(blocks * _BLOCK // 2).view(np.int32)[begin : begin + count]


_stream = _Stream()


def words_of_box(
    key: int,
    whole: Sequence[int],
    offset: Sequence[int],
    size: Sequence[int],
    device: torch.device = torch.device("cpu"),  # noqa: B008
) -> torch.Tensor:
    """32 random bits, as int32, for each element of the box ``[offset, offset + size)`` of a tensor of shape `whole`.

    Args:
        whole: the first of its sizes is not looked at, so that it does not matter how many samples there are.
        device: where they are computed: the same on all.
    """
    size = tuple(size)
    if device.type != "cpu" and size and 0 not in size:
        return words_on_device(key, whole, offset, size, device)
    if not size:
        return torch.from_numpy(_stream.words(key, 0, 1).copy()).view(()).to(device)
    if 0 in size:
        return torch.empty(size, dtype=torch.int32, device=device)
    padded = [*whole[:-1], -(-whole[-1] // _BLOCK) * _BLOCK if len(whole) > 1 else whole[-1]]
    strides = [math.prod(padded[place + 1 :]) for place in range(len(padded))]
    # Of dimensions further in than `run` the box has all. So a run is one piece of the stream.
    run = len(size) - 1
    while run > 0 and size[run] == whole[run]:
        run -= 1
    if run < len(size) - 1 or size[run] * strides[run] >= _LONG_RUN or math.prod(size[:run]) == 1:
        outer = run
    else:  # whatever is between short runs is drawn as well, and left out
        outer = run
        while outer > 0 and strides[outer - 1] <= _MOST_DRAWN:
            outer -= 1
    further_in = tuple(padded[outer + 1 :])
    wanted = tuple(slice(o, o + n) for o, n in zip(offset[outer + 1 :], size[outer + 1 :], strict=True))
    drawn = np.empty(size, np.int32)
    for index in np.ndindex(*size[:outer]):
        start = sum((o + i) * s for o, i, s in zip(offset, index, strides, strict=False))
        start += offset[outer] * strides[outer]
        piece = _stream.words(key, start, size[outer] * strides[outer]).reshape(size[outer], *further_in)
        drawn[index] = piece[(slice(None), *wanted)]
    return torch.from_numpy(drawn)
