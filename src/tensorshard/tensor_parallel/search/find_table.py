"""The search for a tensor-parallel table of any model."""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tensorshard.modules.generation_cache import GenerationCache
from tensorshard.modules.model_errors import raised_by_model
from tensorshard.tensor_parallel.apply.apply_table import find_layouts
from tensorshard.tensor_parallel.search.block_search import BlockSearch, SplitRegion, search_block
from tensorshard.tensor_parallel.search.check_table import CheckedPlan, WrongTensorPlanError, check_around_run
from tensorshard.tensor_parallel.search.kept_parameters import keep_in_slices
from tensorshard.tensor_parallel.search.largest_part import largest_part
from tensorshard.tensor_parallel.search.leftover_layers import split_leftovers
from tensorshard.tensor_parallel.search.outer_layers import split_outer_layers
from tensorshard.tensor_parallel.search.published_tables import published_plan
from tensorshard.tensor_parallel.table.layer_kinds import as_splittable
from tensorshard.tensor_parallel.table.sequence_split import SequenceSplit
from tensorshard.tensor_parallel.table.styles import Style
from tensorshard.tensor_parallel.table.table import TensorPlan, collapse, first_names, starred
from tensorshard.tensor_parallel.verify.block_calls import BlockCall
from tensorshard.tensor_parallel.verify.block_checks import BlockChecks
from tensorshard.tensor_parallel.verify.inner_checks import KnownModules
from tensorshard.tensor_parallel.verify.model_run import ModelRun, find_units, run_once
from tensorshard.tensor_parallel.verify.outer_layers_check import OuterLayersCheck


class NoTensorPlanError(ValueError):
    """Nothing of a model can be split. The message has a table to start from."""


@dataclass(frozen=True)
class VerifiedTable:
    """What the search found.

    Args:
        plan: the table; ``plan.to_yaml(path)`` saves it, ``Plan(tp_plan=plan.to_dict())`` uses it.
        whole: globs of the layers that stay whole, and why.
        alone: globs of the layers that are split one by one, with gathered outputs, and why they are in no pair.
        split_share: share of the model's parameters that is split, 0 to 1.
        kept_share: share of the model's parameters that is split only in memory (``gather``). Every rank computes with
            all of them.
        size: number of ranks that it is for.
        shared_inputs: names of column layers that read the same tensor, which can communicate once for all.
        checked: whether it was checked by numbers.
        sequence: how its blocks compute on parts of a sequence, by name; empty without sequence parallelism.
        not_random: names of the blocks that make no random numbers in training; empty if the table was not checked.
    """

    plan: TensorPlan
    whole: dict[str, str]
    split_share: float
    size: int
    shared_inputs: list[tuple[str, ...]]
    checked: bool = True
    sequence: dict[str, SequenceSplit] = field(default_factory=dict)
    not_random: frozenset[str] = frozenset()
    alone: dict[str, str] = field(default_factory=dict)
    kept_share: float = 0.0

    def describe(self) -> str:
        """The table, what stays whole or is split alone and why, and how much is split."""
        how = f"checked by numbers on {self.size} simulated ranks" if self.checked else "given, and not checked"
        lines = [f"tensor-parallel table, {how}:", self.plan.describe()]
        for title, reasons in (("stays whole:", self.whole), ("split alone, its output gathered:", self.alone)):
            if reasons:
                width = max(map(len, reasons))
                lines += [title, *(f"{name:<{width}}  {reason}" for name, reason in reasons.items())]
        kept = f", {self.kept_share:.0%} in memory alone" if self.kept_share else ""
        lines.append(f"{self.split_share:.0%} of the parameters are split{kept}")
        if self.sequence:
            shown = {starred(name): split.describe() for name, split in self.sequence.items()}
            width = max(map(len, shown))
            lines += ["in parts of a sequence:", *(f"{name:<{width}}  {how}" for name, how in shown.items())]
        return "\n".join(lines)


def find_tensor_plan(
    model: nn.Module, size: int = 2, *, inputs: Any = None, sequence_parallel: bool = False
) -> VerifiedTable:
    """Finds a table that splits `model` over `size` ranks, and checks it by numbers.

    For each distinct block, layers that could be split together are proposed from the flow of the data. Each proposal
    is run on `size` simulated ranks, forward and backward, on random weights. The model itself is only run on fake
    tensors, and is left as it is. It may be on the meta device.

    Args:
        model: any module.
        size: number of tensor-parallel ranks.
        inputs: as for ``Engine.step``; their values do not matter. None to guess them from the model.
        sequence_parallel: whether to also find out how its blocks can compute on parts of a sequence.

    Raises:
        NoTensorPlanError: nothing can be split. The message names the reasons.
        WrongTensorPlanError: blocks that can be split one by one cannot be split together, and none of them alone.
        ValueError: the model does not run on `inputs`, or none were given and none could be guessed.
    """
    with GenerationCache(model).off():
        return _find(model, size, inputs, sequence_parallel)


def _find(model: nn.Module, size: int, inputs: Any, sequence_parallel: bool) -> VerifiedTable:
    units = find_units(model)
    run = run_once(model, list(units), inputs, size, sequences=sequence_parallel)
    checks = BlockChecks(units, run, size)
    published = published_plan(model)
    whole = {name: "its block was not called" for name in units if name not in run.calls}
    searches, unexamined = _search_all(units, run, checks, published.plan)
    whole.update({p: f"published as {s!r}, a style that is not known here" for p, s in published.unknown.items()})
    _drop_inconsistent(searches, run.calls)
    for name, reason in unexamined.items():  # its layers are treated like layers outside of blocks
        del units[name], run.calls[name], searches[name]
        whole[name] = reason
    styles: dict[str, Style] = {}
    first = first_names(model)  # a module that several blocks share is split once
    for name, search in searches.items():
        styles.update({first[_join(name, key)]: style for key, style in search.styles().items()})
        whole.update({first[_join(name, key)]: reason for key, reason in search.whole.items()})
    ends = {_join(name, layer) for name, search in searches.items() for layer in search.ends}
    single = OuterLayersCheck(model, run.inputs, size)
    outer, outer_whole = split_outer_layers(model, list(units), size, run.capture, styles, ends, single)
    styles.update(outer)
    leftover, leftover_whole = split_leftovers(model, size, run.capture, styles, single)
    styles.update(leftover)
    kept = keep_in_slices(model, size, run.capture, styles)
    styles.update(kept)
    reasons_by_name = {**leftover_whole, **outer_whole, **whole}
    unsplit = {name: why for name, why in reasons_by_name.items() if not styles.keys() & {name, _join(name, "weight")}}
    reasons = {starred(name): reason for name, reason in unsplit.items()}
    alone = {starred(name): reasons_by_name[name] for name in leftover if name in reasons_by_name}
    if not styles:
        listed = "\n".join(f"  {name}: {reason}" for name, reason in reasons.items())
        linear = [starred(n) for n, m in model.named_modules() if (s := as_splittable(m)) and s.has_rows]
        start = dict.fromkeys(dict.fromkeys(linear), "colwise or rowwise")
        raise NoTensorPlanError(
            f"nothing of this {type(model).__name__} can be split over {size} ranks:\n{listed}\n"
            f"you can also pass a table of your own, as Plan(tp_plan=...), starting from {start}"
        )

    def check(plan: TensorPlan) -> CheckedPlan:
        return check_around_run(model, plan, run, checks, sequence_parallel=sequence_parallel)

    try:
        found = check(collapse(styles, model))
    except WrongTensorPlanError as error:
        together = {name: starred(name) for name in (*leftover, *kept)} | _regions_of_names(searches)
        found, left_out = largest_part(model, styles, together, size, check, error)
        reasons |= {starred(name): reason for name, reason in left_out.items()}
        alone = {name: reason for name, reason in alone.items() if name not in reasons}
    share = split_share(model, found.plan, size)
    return VerifiedTable(
        found.plan,
        reasons | found.not_in_parts,
        share,
        size,
        found.shared_inputs,
        sequence=found.sequence,
        not_random=found.not_random,
        alone=alone,
        kept_share=split_share(model, found.plan, size, kinds=("gather",)),
    )


def split_share(model: nn.Module, plan: TensorPlan, size: int, kinds: Container[str] | None = None) -> float:
    """Share of `model`'s parameters, by number of elements, that `plan` splits; only by styles in `kinds` if given."""
    styles = plan.resolve(model)
    layouts = find_layouts(model, styles, size)
    total = sum(p.numel() for p in model.parameters())
    split = {name: p.numel() for name, p in model.named_parameters() if layouts[name].dim is not None}
    if kinds is not None:
        split = {name: elements for name, elements in split.items() if _said(name, styles).kind in kinds}
    return sum(split.values()) / max(total, 1)


def _said(name: str, styles: Mapping[str, Style]) -> Style:
    return styles.get(name) or styles.get(name.rpartition(".")[0], Style("replicate"))


def _search_all(
    units: Mapping[str, nn.Module], run: ModelRun, checks: BlockChecks, published: TensorPlan
) -> tuple[dict[str, BlockSearch], dict[str, str]]:
    """The search of each block, one for blocks that are alike; and why other blocks could not be searched."""
    known: dict[int, BlockSearch | str] = {}
    modules = KnownModules()
    searches: dict[str, BlockSearch] = {}
    unexamined: dict[str, str] = {}
    for name, call in run.calls.items():
        kind = run.kinds[name]
        if kind not in known:
            given = published.restricted_to(name, units[name])
            try:
                known[kind] = search_block(units[name], call, checks.of(name), given, modules)
            except Exception as error:  # sizes that are computed from a mask (ViLT): random inputs are no valid mask
                if not raised_by_model(error):
                    raise
                known[kind] = f"it does not run alone, on random numbers: {type(error).__name__}: {error}"
        search = known[kind]
        if isinstance(search, str):
            unexamined[name], search = search, BlockSearch()
        searches[name] = BlockSearch(list(search.split), dict(search.whole), list(search.ends))
    return searches, unexamined


def _regions_of_names(searches: Mapping[str, BlockSearch]) -> dict[str, str]:
    """For each name, what it is split together with: a region, of all blocks of a list."""
    return {
        _join(unit, name): f"{starred(unit)}: {split.region}"
        for unit, search in searches.items()
        for split in search.split
        for name in split.proposal.styles
    }


def _drop_inconsistent(searches: Mapping[str, BlockSearch], calls: Mapping[str, BlockCall]) -> None:
    """Removes regions that pass something per head to another block split while the other expects it whole, or the
    reverse, until all agree."""
    while mistaken := _mistaken_regions(searches, calls):
        for search, split in mistaken:
            search.split.remove(split)
            reason = f"{split.region}: it shares something per head with another block that does not split it alike"
            search.whole.update(dict.fromkeys((*split.region.columns, *split.region.rows), reason))


def _mistaken_regions(
    searches: Mapping[str, BlockSearch], calls: Mapping[str, BlockCall]
) -> list[tuple[BlockSearch, SplitRegion]]:
    found: dict[int, tuple[BlockSearch, SplitRegion]] = {}
    for name, search in searches.items():
        providers = calls[name].providers
        wanted = {index: dim for split in search.split for index, dim in split.proposal.sliced_inputs.items()}
        for split in search.split:
            for index, dim in split.proposal.sliced_inputs.items():
                given = _sharded_outputs(searches[providers[index][0]]) if index in providers else {}
                if index not in providers or given.get(providers[index][1]) != dim:
                    found[id(split)] = (search, split)
        for index, (provider, output) in providers.items():
            if index not in wanted:
                for split in searches[provider].split:
                    if output in split.sharded_outputs:
                        found[id(split)] = (searches[provider], split)
    return list(found.values())


def _sharded_outputs(search: BlockSearch) -> dict[int, int]:
    return {index: dim for split in search.split for index, dim in split.sharded_outputs.items()}


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name
