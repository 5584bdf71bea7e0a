"""Numbers that the user's own code draws for the samples of a batch, outside of a model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from tensorshard.random.call_sites import DrawRefusedError
from tensorshard.random.kernels import drawing_from
from tensorshard.random.philox import key_of, words_of_box


class UsersDraws:
    """Random numbers that are functions of the seed, the step, the call and the sample's place in the whole batch.

    Args:
        seed: says the seed of all numbers.
        step_count: says how many steps were taken.
        first_of: the number of a rank's first row in the whole batch, given how many rows it has.
        micro_batch: says how many micro-batches steps have begun so far; None outside of steps.
    """

    def __init__(
        self,
        seed: Callable[[], int],
        step_count: Callable[[], int],
        first_of: Callable[[int], int],
        micro_batch: Callable[[], int | None],
    ) -> None:
        self._seed, self._step_count, self._first_of, self._micro_batch = seed, step_count, first_of, micro_batch
        self._calls: dict[bool, tuple[tuple[int, int | None], int]] = {}  # of steps, and of loops between them
        self._call: tuple[object, ...] = ()
        self._draws = 0

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Inside, torch draws these."""
        step, micro_batch = self._step_count(), self._micro_batch()
        in_step = micro_batch is not None
        before, calls = self._calls.get(in_step, ((step, micro_batch), 0))
        calls = calls if before == (step, micro_batch) else 0
        self._calls[in_step] = (step, micro_batch), calls + 1
        self._call, self._draws = (step, in_step, calls), 0
        with drawing_from(self):
            yield

    def words(self, shape: tuple[int, ...], device: torch.device) -> Callable[[int], torch.Tensor]:
        """As :class:`tensorshard.random.kernels.Source` says."""
        call, draw, self._draws = self._call, self._draws, self._draws + 1
        first = self._first_of(shape[0]) if shape else 0

        def drawn(again: int) -> torch.Tensor:
            key = key_of(self._seed(), "user", *call, draw, again)
            return words_of_box(key, shape, (first, *[0] * (len(shape) - 1)) if shape else (), shape, device)

        return drawn

    def repeats(self) -> bool:
        """As :class:`tensorshard.random.kernels.Source` says: it draws within a context alone."""
        return False

    def pass_over(self) -> None:
        """As :class:`tensorshard.random.kernels.Source` says."""
        self._draws += 1

    def refuse(self, operator: str) -> Exception:
        """As :class:`tensorshard.random.kernels.Source` says."""
        return DrawRefusedError(
            f"torch's {operator} was called within engine.random.of_samples(), and its random numbers cannot be "
            f"computed element by element: draw others there, or these outside of it"
        )
