"""Checks a model around its blocks: as a whole, split by a table, in little memory; and layers outside of its blocks.

A torch embedding or linear layer can be split wherever it is called as a module. A layer with its own forward, which
scales what it looks up, or makes positions itself, is compared by numbers, on the arguments that the model calls it
with.
"""

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from tensorshard.model.fake_copies import copy_with
from tensorshard.model.model_errors import raised_by_model
from tensorshard.model.tensors import map_tensors_once
from tensorshard.tensor_parallel.table.layer_kinds import as_splittable
from tensorshard.tensor_parallel.table.layer_styles import Rowwise, Style
from tensorshard.tensor_parallel.table.layouts import SequenceSplit
from tensorshard.tensor_parallel.verify.block_calls import BlockCall, InTraining, as_call
from tensorshard.tensor_parallel.verify.block_check import BlockCheck
from tensorshard.tensor_parallel.verify.comparison import Agreement, MismatchError, not_running
from tensorshard.tensor_parallel.verify.layer_checks import computes_as_linear
from tensorshard.tensor_parallel.verify.model_run import captured

# Of a table with more elements than this, only a few rows are compared.
_MOST_ELEMENTS = 1 << 18
_FEW_ROWS = 64


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


class OuterLayersCheck:
    """The checks of layers outside of a model's blocks, each by itself.

    Args:
        model: left as it is.
        inputs: what it is run on.
        size: number of ranks to split over.
    """

    def __init__(self, model: nn.Module, inputs: Any, size: int) -> None:
        self._model, self._inputs, self._size = model, inputs, size
        self._calls: dict[str, BlockCall] | None = None

    def refusal(self, name: str, style: Style) -> str | None:
        """Why the layer `name` cannot have `style`; None if it can. Layers with torch's forward always can."""
        module = self._model.get_submodule(name)
        layer = as_splittable(module)
        if layer is None or not layer.own_forward:
            return None
        if layer.kind == "linear":
            agrees = computes_as_linear(module, isinstance(style, Rowwise), self._size)
            return None if agrees else "its own forward computes another on a part of its weight"
        call = self._call(name)
        return (
            "it is not called as a module" if call is None else _refusal_of_embedding(module, call, style, self._size)
        )

    def _call(self, name: str) -> BlockCall | None:
        if self._calls is None:
            layers = {key: as_splittable(module) for key, module in self._model.named_modules()}
            names = [key for key, layer in layers.items() if layer and layer.own_forward]
            self._calls = captured(self._model, names, self._inputs).calls
        return self._calls.get(name)


def _refusal_of_embedding(module: nn.Module, call: BlockCall, style: Style, size: int) -> str | None:
    table = _with_few_rows(module)
    reason = ""
    for highest in (table.num_embeddings * 3 // 4, 1):  # an offset may be added to indices; a mask has ones
        args, kwargs = map_tensors_once(partial(_up_to, highest), (call.args, call.kwargs))
        try:
            BlockCheck(table, BlockCall(args, kwargs), size).check({"": style})
        except MismatchError as error:
            return f"its own forward computes another: split over {size} ranks, {error}"
        except Exception as error:  # any error of the forward on such values
            if not raised_by_model(error):
                raise
            reason = f"its own forward could not be run to compare it: {type(error).__name__}: {error}"
            continue
        return None
    return reason


def _up_to(highest: int, leaf: torch.Tensor) -> torch.Tensor:
    """`leaf`; if it holds whole numbers, random ones from 1 to `highest` instead."""
    if leaf.is_floating_point() or leaf.dtype == torch.bool:
        return leaf
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, highest + 1, leaf.shape, generator=generator).to(leaf.dtype)


def _with_few_rows(module: nn.Module) -> nn.Embedding:
    """A copy of an embedding on the meta device, with few enough rows to be compared quickly."""
    weight: Any = module.weight
    rows = weight.shape[0] if weight.numel() <= _MOST_ELEMENTS else min(weight.shape[0], _FEW_ROWS)
    table = copy_with(module, lambda name, t: t.detach()[:rows].to("meta") if name == "weight" else t)
    assert isinstance(table, nn.Embedding)
    table.num_embeddings = rows
    if table.padding_idx is not None and table.padding_idx >= rows:
        table.padding_idx = 0
    return table
