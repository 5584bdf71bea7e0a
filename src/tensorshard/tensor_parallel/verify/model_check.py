"""Whether a model that is split by a table computes what the full model computes: by numbers, in little memory."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from tensorshard.model.model_errors import raised_by_model
from tensorshard.tensor_parallel.table.layer_styles import Style
from tensorshard.tensor_parallel.table.layouts import SequenceSplit
from tensorshard.tensor_parallel.verify.block_calls import InTraining, as_call
from tensorshard.tensor_parallel.verify.block_check import BlockCheck
from tensorshard.tensor_parallel.verify.comparison import Agreement, MismatchError, not_running


class ModelCheck:
    """The check of a whole model. Its blocks were checked by themselves before.

    Large matrices are compact at first, to save memory. If the model does not run or agree with them, full ones are
    used.

    Args:
        model: without the blocks that repeat, on the meta device.
        inputs: what it is run on.
        size: number of ranks to split it over.
        training: what it does in training.
    """

    def __init__(self, model: nn.Module, inputs: Any, size: int, training: InTraining = InTraining()) -> None:  # noqa: B008
        self.model = model
        self._training = training
        self._call, self._size = as_call(inputs), size
        self._made: BlockCheck | None = None

    def check(self, styles: Mapping[str, Style], sequence: Mapping[str, SequenceSplit]) -> Agreement:
        """Compares the model, split as `styles` and `sequence` say, with the full one.

        Raises:
            MismatchError: they differ.
        """
        if self._made is None:
            self._made = self._compact() or self._single_or_double()
        if self._made.is_compact:
            with suppress(MismatchError):
                return self._made.check(styles, sequence=sequence)
            self._made = None  # freed before the next one is made
            self._made = self._full(torch.float32)
        try:
            return self._made.check(styles, sequence=sequence)
        except MismatchError:
            # Through many layers of random weights, rounding may grow as large as a mistake would be. It does not in
            # fp64.
            with suppress(MismatchError, RuntimeError):  # some models compute in fp32 whatever they are given
                return self._full(torch.float64).check(styles, sequence=sequence)
            raise

    def _compact(self) -> BlockCheck | None:
        """The check with compact matrices; None if the model does not run with these."""
        try:
            return BlockCheck(self.model, self._call, self._size, compact=True, training=self._training)
        except Exception as error:  # some layers need contiguous weights
            if not raised_by_model(error):
                raise
            return None

    def _single_or_double(self) -> BlockCheck:
        """The check in fp32, or in fp64 for models that convert what they compute with to fp64.

        Raises:
            MismatchError: the model does not run in either.
        """
        try:
            return self._full(torch.float32)
        except Exception as error:
            if not raised_by_model(error):
                raise
            first = error
        try:
            return self._full(torch.float64)
        except Exception as error:
            if not raised_by_model(error):
                raise
            raise not_running(first) from first

    def _full(self, dtype: torch.dtype) -> BlockCheck:
        return BlockCheck(self.model, self._call, self._size, dtype=dtype, training=self._training)
