"""Checks a whole table: every distinct block by numbers, then the model around the blocks."""

from collections.abc import Hashable, Mapping
from typing import Any

from torch import nn

from tensorshard.common.words import is_inside, join_names
from tensorshard.model.model_errors import raised_by_model
from tensorshard.tensor_parallel.apply.apply_table import find_layouts, split_shares
from tensorshard.tensor_parallel.search.block_search import undivided_heads
from tensorshard.tensor_parallel.search.dataflow import follow
from tensorshard.tensor_parallel.search.sequence_search import SplitBlocks, find_sequence_splits, link_splits
from tensorshard.tensor_parallel.table.layer_kinds import as_splittable
from tensorshard.tensor_parallel.table.layer_styles import Column, ColwiseGather, Style, Vocab
from tensorshard.tensor_parallel.table.layouts import SequenceSplit
from tensorshard.tensor_parallel.table.styles import STYLES, SUM_GRADIENTS, Gather, Slice
from tensorshard.tensor_parallel.table.table import (
    TensorTable,
    VerifiedTable,
    collapse,
    first_names,
    starred,
)
from tensorshard.tensor_parallel.verify.block_calls import BlockCall, capture_calls
from tensorshard.tensor_parallel.verify.block_checks import BlockChecks, styles_inside
from tensorshard.tensor_parallel.verify.comparison import Agreement, MismatchError
from tensorshard.tensor_parallel.verify.model_check import ModelCheck, OuterLayersCheck
from tensorshard.tensor_parallel.verify.model_run import (
    ModelRun,
    find_units,
    run_once,
    without_repetition,
)

# The model around the blocks is checked if it has no more parameters than this. Repeated blocks do not count.
_LARGEST_MODEL = 1 << 27
_Completed = tuple[dict[str, Style], list[tuple[str, ...]]]


class WrongTableError(ValueError):
    """Under this table, a model would not compute what it computes on one device."""


def check_tensor_table(
    model: nn.Module, table: TensorTable, size: int, *, inputs: Any = None, sequence_parallel: bool = False
) -> VerifiedTable:
    """Checks by numbers that `table` splits `model` over `size` ranks, on random weights and simulated ranks.

    Args:
        inputs: as for ``Engine.step``; None to guess from the model.
        sequence_parallel: whether to also find out how its blocks can compute on parts of a sequence.

    Returns:
        The table, with what it left out and the dataflow shows: the parameters between column and row layers, whose
        gradients have to be summed.

    Raises:
        WrongTableError: it does not. The message names the block, its entries, and what was seen.
        ValueError: an entry that matches nothing or cannot be applied; the model does not run on `inputs`.
    """
    find_layouts(model, table.resolve(model), size)
    units = find_units(model)
    run = run_once(model, list(units), inputs, size, sequences=sequence_parallel)
    _check_outer_layers(model, table, run, size)
    return check_around_run(model, table, run, BlockChecks(units, run, size), sequence_parallel=sequence_parallel)


def _check_outer_layers(model: nn.Module, table: TensorTable, run: ModelRun, size: int) -> None:
    single = OuterLayersCheck(model, run.inputs, size)
    for name, style in table.resolve(model).items():
        past = {
            key
            for key, reader in run.capture.readers.items()
            if isinstance(style, Gather) and is_inside(key, [name]) and not _can_read(reader, style.reader(key))
        }
        if past:
            raise WrongTableError(
                f"the tensor-parallel table is wrong for {', '.join(sorted(past))}, which cannot be {str(style)!r}: it "
                f"is read outside of the forward in which it is put together; leave it out"
            )
        if isinstance(style, Vocab | ColwiseGather) and not is_inside(name, run.calls):
            refusal = single.refusal(name, style)
            if refusal is not None:
                raise WrongTableError(
                    f"the tensor-parallel table is wrong for {name}, which cannot be {str(style)!r}: {refusal}; leave "
                    f"it out"
                )


def check_around_run(
    model: nn.Module, table: TensorTable, run: ModelRun, checks: BlockChecks, *, sequence_parallel: bool = False
) -> VerifiedTable:
    """Checks a table as :func:`check_tensor_table` does, for a model that was run already."""
    styles = table.resolve(model)
    units = find_units(model)
    checker = _Checker(checks, run)
    first = first_names(model)
    shared_inputs: list[tuple[str, ...]] = []
    for name, call in run.calls.items():
        inner = styles_inside(name, styles)
        if inner:
            completed, shared = checker.check(name, units[name], call, inner)
            styles.update({first[join_names(name, key)]: style for key, style in completed.items()})
            shared_inputs += [tuple(first[join_names(name, layer)] for layer in layers) for layers in shared]
    complete = collapse(styles, model)
    sequence: dict[str, SequenceSplit] = {}
    refused: dict[str, str] = {}
    if sequence_parallel:
        split = SplitBlocks(complete.resolve(model), shared_inputs, checker.sliced_inputs)
        sequence, refused = find_sequence_splits(model, split, run, checks)
    if "" in units and (not sequence or "" in sequence):
        agreement = checker.agreement_of_model
    else:
        try:
            agreement = _check_whole(model, complete, sequence, run, checks)
        except WrongTableError:
            if not any(way.is_between for way in sequence.values()):
                raise
            sequence, refused = find_sequence_splits(model, split, run, checks, between=False)
            agreement = _check_whole(model, complete, sequence, run, checks)
    if agreement is not None and agreement.sharded_outputs:
        raise WrongTableError(
            f"the model's output would be split over the ranks with the table\n{table.describe()}\nand a loss needs it "
            f"whole: use colwise_gather for the last layer"
        )
    split_share, kept_share = split_shares(model, complete, checks.size)
    return VerifiedTable(
        complete,
        refused,
        split_share,
        checks.size,
        shared_inputs,
        sequence=sequence,
        kept_share=kept_share,
    )


class _Checker:
    """Checks blocks in the order in which they run. Of blocks that are alike, one is checked."""

    def __init__(self, checks: BlockChecks, run: ModelRun) -> None:
        self._checks, self._run = checks, run
        self._done: dict[Hashable, tuple[_Completed, Agreement]] = checks.passed
        self._agreements: dict[str, Agreement] = {}
        self.sliced_inputs: dict[str, dict[int, int]] = {}

    @property
    def agreement_of_model(self) -> Agreement | None:
        """What the check of the whole model, as a block, found; None if no such block was checked."""
        return self._agreements.get("")

    def check(self, name: str, block: nn.Module, call: BlockCall, styles: dict[str, Style]) -> _Completed:
        """The styles of `block`, completed, and its column layers that read the same tensor.

        Raises:
            WrongTableError: the styles are wrong.
        """
        sliced = {}
        for index, (provider, output) in call.providers.items():
            if provider in self._agreements:
                dim = self._agreements[provider].sharded_outputs.get(output)
                if dim is not None:
                    sliced[index] = dim
        if sliced:
            self.sliced_inputs[name] = sliced
        key = (self._run.kinds[name], tuple(styles.items()), tuple(sliced.items()))
        if key not in self._done:
            completed, shared = _complete(block, call, styles)
            try:
                agreement = self._checks.of(name).check(completed, sliced, shared)
            except MismatchError as error:
                raise WrongTableError(_refusal(name, block, styles, self._checks.size, error)) from error
            self._done[key] = ((completed, shared), agreement)
        completion, self._agreements[name] = self._done[key]
        return completion


def _complete(block: nn.Module, call: BlockCall, styles: dict[str, Style]) -> _Completed:
    """`styles`, completed: gradients of parameters between split layers are summed, unless the table says otherwise."""
    columns = {name for name, style in styles.items() if isinstance(style, Column)}
    sliced = {name for name, style in styles.items() if isinstance(style, Slice) and _is_linear(block, name)}
    flow = follow(block, call, {name for name, _ in block.named_modules()} - columns - sliced, columns | sliced)
    between = [name for region in flow.regions for name in region.between]
    added = {name: SUM_GRADIENTS for name in between if name not in styles and name.rpartition(".")[0] not in styles}
    shared = [tuple(name for name in layers if name in columns) for layers in flow.inputs]
    return {**styles, **added}, [layers for layers in shared if len(layers) > 1]


def _is_linear(block: nn.Module, name: str) -> bool:
    """Whether `name` is a linear layer's. It may be a parameter's instead."""
    module = dict(block.named_modules()).get(name)
    layer = None if module is None else as_splittable(module)
    return layer is not None and layer.kind == "linear"


def _check_whole(
    model: nn.Module, table: TensorTable, sequence: Mapping[str, SequenceSplit], run: ModelRun, checks: BlockChecks
) -> Agreement | None:
    """Checks the model as a whole, if it is small enough without its repeated blocks; None if not.

    Raises:
        WrongTableError: the table is wrong; or the model is too large to check, and the table has entries outside
            of the blocks that need the check.
    """
    styles = table.resolve(model)
    outside = {
        name: style for name, style in styles.items() if not style.always_right and not is_inside(name, run.calls)
    }
    if checks.around is None:
        checks.around = ModelCheck(_smallest_that_runs(model, run), run.inputs, checks.size, run.capture.training)
    smaller = checks.around.model
    if sum(p.numel() for p in smaller.parameters()) > _LARGEST_MODEL:
        if outside:
            raise WrongTableError(
                f"{_listed(outside)} are outside of the model's blocks, which is too large to be checked as a whole; "
                f"use {', '.join(name for name, style in STYLES.items() if style.always_right)} there, or turn the "
                f"check off"
            )
        return None
    modules = {name for name, _ in smaller.named_modules()}
    if sequence:
        blocks = [name for name, way in sequence.items() if name in modules and not way.is_between]
        capture = capture_calls(smaller, blocks, run.inputs)
        sequence = link_splits({name: sequence[name] for name in capture.called if name in sequence}, capture)
    kept = modules | {name for name, _ in smaller.named_parameters(remove_duplicate=False)}
    checks.forget_large()
    inside = {name: style for name, style in styles.items() if name in kept}
    try:
        return checks.around.check(inside, sequence)
    except MismatchError as error:
        raise WrongTableError(
            f"the model as a whole does not compute what it does on one device with the table\n{table.describe()}\n"
            f"although its blocks do: split over {checks.size} ranks, {error}"
        ) from error


def _smallest_that_runs(model: nn.Module, run: ModelRun) -> nn.Module:
    smaller = without_repetition(model, run.kinds)
    if len(list(smaller.modules())) == len(list(model.modules())):  # nothing was left out, and the full model ran
        return smaller
    try:
        capture_calls(smaller, [], run.inputs)
    except Exception as error:  # some models need all of their blocks
        if not raised_by_model(error):
            raise
        return model
    return smaller


def _refusal(name: str, block: nn.Module, styles: dict[str, Style], size: int, error: MismatchError) -> str:
    columns = [key for key, style in styles.items() if isinstance(style, Column)]
    heads = undivided_heads(block, columns, size)
    where = f"{starred(name)} (as {name})" if name else "the model"
    return (
        f"the tensor-parallel table is wrong for {where}: {_listed(styles)}. Split so over {size} ranks, {error}. "
        f"{f'Note that {heads}. ' if heads else ''}"
        f"find_tensor_plan(model, {size}) shows what can be split; without tp_plan it is what is used"
    )


def _listed(styles: Mapping[str, Style]) -> str:
    return ", ".join(f"{name} {style}" for name, style in styles.items())


def _can_read(reader: str, gathering: str) -> bool:
    """Whether the forward of `reader` can read a parameter that the module `gathering` gathers."""
    return not gathering or is_inside(reader, [gathering])
