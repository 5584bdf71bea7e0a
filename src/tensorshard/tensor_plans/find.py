"""The search for a tensor-parallel table of any model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tensorshard.tensor_plans.capture import BlockCall, Capture, capture_calls, tensor_leaves
from tensorshard.tensor_plans.huggingface import published_plan
from tensorshard.tensor_plans.inputs import example_inputs
from tensorshard.tensor_plans.layers import as_splittable
from tensorshard.tensor_plans.outer import split_outer_layers
from tensorshard.tensor_plans.search import BlockSearch, SplitRegion, search_block
from tensorshard.tensor_plans.styles import Style
from tensorshard.tensor_plans.table import TensorPlan, collapse, starred
from tensorshard.transforms.tensor import find_layouts
from tensorshard.transforms.units import find_blocks


class NoTensorPlanError(ValueError):
    """Nothing of a model can be split; the message has a table to start from."""


@dataclass(frozen=True)
class FoundPlan:
    """What the search found.

    Args:
        plan: the table; ``plan.to_yaml(path)`` saves it, ``Plan(tp_plan=plan.to_dict())`` uses it.
        whole: layers that stay whole, as globs, and why.
        split_share: share of the model's parameters that is split, 0 to 1.
        size: number of ranks that it was checked for.
    """

    plan: TensorPlan
    whole: dict[str, str]
    split_share: float
    size: int

    def describe(self) -> str:
        """The table, what stays whole and why, and how much is split."""
        lines = [f"tensor-parallel table, checked by numbers on {self.size} simulated ranks:", self.plan.describe()]
        if self.whole:
            width = max(map(len, self.whole))
            lines += ["stays whole:", *(f"{name:<{width}}  {reason}" for name, reason in self.whole.items())]
        lines.append(f"{self.split_share:.0%} of the parameters are split")
        return "\n".join(lines)


def find_tensor_plan(model: nn.Module, size: int = 2, *, inputs: Any = None) -> FoundPlan:
    """Finds a table that splits `model` over `size` ranks, and checks it by numbers.

    Per distinct block: layers that could be split together are proposed from the flow of the data, and each proposal is
    run on `size` simulated ranks, forward and backward, on random weights. The model itself is run on fake tensors only,
    and is left as it is; it may be on the meta device.

    Args:
        model: any module.
        size: number of tensor-parallel ranks.
        inputs: as for ``Engine.step``, of any values; None to guess from the model.

    Raises:
        NoTensorPlanError: nothing can be split; names the reasons.
        ValueError: the model does not run on `inputs`, or none were given and none could be guessed.
    """
    units = find_units(model)
    capture = run_once(model, list(units), inputs)
    published = published_plan(model)
    searches = _search_all(units, capture.calls, size, published)
    whole = {name: "its block was not called" for name in units if name not in capture.calls}
    _drop_inconsistent(searches, capture.calls)
    styles: dict[str, Style] = {}
    for name, search in searches.items():
        styles.update({_join(name, key): style for key, style in search.styles().items()})
        whole.update({_join(name, key): reason for key, reason in search.whole.items()})
    outer, outer_whole = split_outer_layers(model, list(units), size, capture.used_outside, styles)
    styles.update(outer)
    whole.update(outer_whole)
    reasons = {starred(name): reason for name, reason in whole.items()}
    if not styles:
        told = "\n".join(f"  {name}: {reason}" for name, reason in reasons.items())
        linear = [starred(n) for n, m in model.named_modules() if (s := as_splittable(m)) and s.kind == "linear"]
        start = {name: "colwise or rowwise" for name in dict.fromkeys(linear)}
        raise NoTensorPlanError(
            f"nothing of this {type(model).__name__} can be split over {size} ranks:\n{told}\n"
            f"if you know better, give a table as Plan(tp_plan=...), starting from {start}"
        )
    plan = collapse(styles, model)
    return FoundPlan(plan, reasons, split_share(model, plan, size), size)


def find_units(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that are searched and checked one by one: blocks with layers to split, else the whole model."""
    units = {
        name: block
        for name, block in find_blocks(model).items()
        if sum(as_splittable(module) is not None for module in block.modules()) > 1
    }
    return units or {"": model}


def run_once(model: nn.Module, units: list[str], inputs: Any) -> Capture:
    """Runs `model` on fake tensors; on guessed inputs if `inputs` is None.

    Raises:
        ValueError: it does not run.
    """
    candidates = example_inputs(model) if inputs is None else [inputs]
    error: Exception | None = None
    for candidate in candidates:
        try:
            return capture_calls(model, units, candidate)
        except Exception as caught:  # whatever a model makes of inputs that are not its own
            error = error or caught
    remedy = "pass inputs= to find_tensor_plan, and its table as Plan(tp_plan=...)"
    if error is None:
        raise ValueError(f"no inputs could be guessed to run {type(model).__name__} with; {remedy}")
    what = "the guessed inputs" if inputs is None else "the given inputs"
    raise ValueError(
        f"{type(model).__name__} does not run on {what}, {type(error).__name__}: {error}"
        + (f"; {remedy}" if inputs is None else "")
    ) from error


def split_share(model: nn.Module, plan: TensorPlan, size: int) -> float:
    """Share of `model`'s parameters, by number of elements, that `plan` splits."""
    layouts = find_layouts(model, plan.resolve(model), size)
    total = sum(p.numel() for p in model.parameters())
    split = sum(p.numel() for name, p in model.named_parameters() if layouts[name].dim is not None)
    return split / max(total, 1)


def structure_of(block: nn.Module, call: BlockCall) -> tuple[object, ...]:
    """Equal for blocks of which one may stand for the others."""
    modules = tuple(
        (
            name,
            type(module),
            tuple((key, tuple(p.shape)) for key, p in module._parameters.items() if p is not None),
            tuple((key, value) for key, value in vars(module).items() if isinstance(value, bool)),
        )
        for name, module in block.named_modules()
    )
    leaves = tuple((tuple(leaf.shape), leaf.dtype) for leaf in tensor_leaves((call.args, call.kwargs)))
    return (modules, leaves)


def _search_all(
    units: Mapping[str, nn.Module], calls: Mapping[str, BlockCall], size: int, published: TensorPlan | None
) -> dict[str, BlockSearch]:
    """One search per distinct structure."""
    known: dict[tuple[object, ...], BlockSearch] = {}
    searches: dict[str, BlockSearch] = {}
    for name, call in calls.items():
        structure = structure_of(units[name], call)
        if structure not in known:
            given = {} if published is None else published.restricted_to(name, units[name])
            known[structure] = search_block(units[name], call, size, given)
        search = known[structure]
        searches[name] = BlockSearch(list(search.split), dict(search.whole))
    return searches


def _drop_inconsistent(searches: Mapping[str, BlockSearch], calls: Mapping[str, BlockCall]) -> None:
    """Takes back regions between which something per head is handed on split that another expects whole, or the
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
