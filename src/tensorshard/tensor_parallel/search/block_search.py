"""The search of one block: what can be split, each way checked by numbers; and what stays whole, and why."""

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torch import nn

from tensorshard.common.words import is_inside, join_names
from tensorshard.model.blocks import find_experts
from tensorshard.tensor_parallel.search.dataflow import Dataflow, Region, follow, low_rank_pairs
from tensorshard.tensor_parallel.search.proposals import Proposal, expert_styles, proposals, shared_proposals
from tensorshard.tensor_parallel.table.layer_kinds import as_splittable
from tensorshard.tensor_parallel.table.layer_styles import ColwiseGather, Style
from tensorshard.tensor_parallel.table.styles import SUM_GRADIENTS, Divide
from tensorshard.tensor_parallel.verify.block_calls import BlockCall
from tensorshard.tensor_parallel.verify.block_check import BlockCheck
from tensorshard.tensor_parallel.verify.block_checks import InnerCheck, KnownModules, inner_check
from tensorshard.tensor_parallel.verify.block_kinds import group_equal_blocks
from tensorshard.tensor_parallel.verify.comparison import MismatchError


@dataclass
class SplitRegion:
    """A region that can be split, and how.

    Args:
        sharded_outputs: tensor outputs of the block that are then split too, each with its dimension.
    """

    region: Region
    proposal: Proposal
    sharded_outputs: dict[int, int]


@dataclass
class BlockSearch:
    """What the search of a block found; names are relative to the block.

    Args:
        split: what can be split.
        whole: why the other linear layers and convolutions stay whole.
        ends: those of them whose outputs no other layer takes as input.
        narrow: those of them that are halves of low-rank pairs, beside layers that are split.
    """

    split: list[SplitRegion] = field(default_factory=list)
    whole: dict[str, str] = field(default_factory=dict)
    ends: list[str] = field(default_factory=list)
    narrow: list[str] = field(default_factory=list)

    def styles(self) -> dict[str, Style]:
        """The styles of all that is split, in one table. What several regions divide is divided once."""
        merged: dict[str, Style] = {}
        for split in self.split:
            for name, style in split.proposal.styles.items():
                earlier = merged.get(name)
                if isinstance(style, Divide) and isinstance(earlier, Divide):
                    merged[name] = Divide(tuple(dict.fromkeys((*earlier.targets, *style.targets))))
                else:
                    merged[name] = style
        return merged


def search_block(
    block: nn.Module,
    call: BlockCall,
    check: BlockCheck,
    published: Mapping[str, Style] | None = None,
    known: KnownModules | None = None,
) -> BlockSearch:
    """Finds what of `block` can be split.

    Args:
        call: how the block is called.
        check: verifies a proposal, for a number of ranks.
        published: a table from elsewhere, by names in the block. It is checked like every other proposal.
        known: what the searches of other blocks found out about modules in them. This block may have the same modules.
    """
    known = known or KnownModules()
    result = BlockSearch()
    refused: set[str] = set()
    reasons: dict[str, str] = {}
    taken: set[str] = set()
    while True:
        # The layers of a refused region stay whole. The layers before and after them may then form other pairs.
        columns = {layer for split in result.split for layer in split.region.columns}
        flow = follow(block, call, refused, columns)
        done = columns | {layer for split in result.split for layer in split.region.rows}
        regions = [region for region in flow.regions if not done & {*region.columns, *region.rows}]
        refused_before = len(refused)
        for region in regions:
            taken.update(region.columns)
            outcome = _split(block, call, check, region, flow, published or {}, known)
            if isinstance(outcome, SplitRegion):
                result.split.append(outcome)
            else:
                # Another region may begin with the first row as a column: in latent attention the queries do.
                refused.update(region.first_columns)
                for layer in (*region.columns, *region.rows):
                    reasons.setdefault(layer, f"{region}: {outcome}")
        if len(refused) == refused_before:  # the next run would propose the same
            break
    result.split += _of_uncalled_experts(block, flow.called, result.split)
    used = {layer for split in result.split for layer in (*split.region.columns, *split.region.rows)}
    for name, module in block.named_modules():
        described = as_splittable(module)
        if name not in used and described is not None and described.has_rows:
            unused = "no other layer takes its output features as input"
            result.whole[name] = reasons.get(name, unused if name in flow.called else "it is not called as a module")
            if name not in taken and name in flow.called:
                result.ends.append(name)
    for name, layer in (flow.low_rank.first | flow.low_rank.second).items():
        if layer in used and name not in used:
            result.narrow.append(name)
            result.whole[name] = f"half of a low-rank pair beside {layer}, of which the other half is split"
    for name, experts in find_experts(block).items():
        outcome = _split_experts(name, experts, check)
        if isinstance(outcome, str):
            result.whole[name] = f"its experts stay whole: {outcome}"
        else:
            result.split.append(outcome)
    return result


def _of_uncalled_experts(block: nn.Module, called: Iterable[str], split: list[SplitRegion]) -> list[SplitRegion]:
    """How the modules of lists that the run did not call are split: as those that it called, if all are built alike.

    Of a list of experts, the run calls those that its tokens have chosen.
    """
    renamed: list[SplitRegion] = []
    for name, each in block.named_modules():
        members = {join_names(name, key): child for key, child in each.named_children()}
        if not isinstance(each, nn.ModuleList | nn.ModuleDict) or len(group_equal_blocks(members)) != 1:
            continue
        reached = {member for member in members if any(is_inside(key, [member]) for key in called)}
        alone = [s for s in split if not s.proposal.sliced_inputs and not s.sharded_outputs]
        ways = {m: [s for s in alone if all(is_inside(key, [m]) for key in s.proposal.styles)] for m in reached}
        first = next((member for member, regions in ways.items() if regions), None)
        if first is not None and len(reached) > 1:
            renamed += [_renamed(s, first, member) for member in members if member not in reached for s in ways[first]]
    return renamed


def _renamed(split: SplitRegion, module: str, other: str) -> SplitRegion:
    """How `other` is split as `module` is, which holds all of `split`."""

    def there(name: str) -> str:
        return other + name[len(module) :]

    region = Region(tuple(map(there, split.region.columns)), tuple(map(there, split.region.rows)), (), ())
    styles = {there(name): style for name, style in split.proposal.styles.items()}
    return SplitRegion(region, Proposal(styles, {}), {})


def _split_experts(name: str, experts: nn.Module, check: BlockCheck) -> SplitRegion | str:
    """How the MLPs of stacked experts can be split, or a message that says why they cannot."""
    reason = "there is no way to try"
    for tries, styles in enumerate(expert_styles(name, experts), start=1):
        try:
            agreement = check.check(styles)
        except MismatchError as error:
            if tries == 1:
                reason = f"split over {check.size} ranks, {error}"
            continue
        region = Region((name,), (name,), (), ())
        return SplitRegion(region, Proposal(styles, {}), agreement.sharded_outputs)
    return reason


def _split(
    block: nn.Module,
    call: BlockCall,
    check: BlockCheck,
    region: Region,
    flow: Dataflow,
    published: Mapping[str, Style],
    known: KnownModules,
) -> SplitRegion | str:
    """How `region` can be split, or a message that says why it cannot."""
    heads = undivided_heads(block, region.columns, check.size)
    reason = "there is no way to try"
    own = proposals(block, region, flow, check.inputs, check.size, provided=call.providers)
    shared = shared_proposals(block, region, flow, check.size)
    own = chain(shared, own) if heads is not None else chain(own, shared)
    inner: InnerCheck | None = None
    progress = Progress()
    for tries, proposal in enumerate(_all_proposals(region, own, published), start=1):
        if not progress.is_worth_trying(proposal):
            continue
        if tries == 2:  # the first is often right
            inner = inner_check(check, (*region.columns, *region.rows, *region.between, *region.channelwise), known)
        try:
            if inner is not None and not proposal.sliced_inputs:
                inner.check(proposal.styles)
            agreement = check.check(proposal.styles, proposal.sliced_inputs)
        except MismatchError as error:
            progress.note(proposal, error)
            if tries == 1:
                reason = f"split over {check.size} ranks, {error}"
            continue
        return SplitRegion(region, proposal, agreement.sharded_outputs)
    return heads or reason


def _all_proposals(region: Region, own: Iterator[Proposal], published: Mapping[str, Style]) -> Iterator[Proposal]:
    """All proposals. The published one comes first if it splits the region outright, and last if it gathers in
    between."""
    layers = (*region.columns, *region.rows)
    given = {name: published[name] for name in layers if name in published}
    proposal = Proposal({**given, **dict.fromkeys(region.between, SUM_GRADIENTS)}, {})
    complete = len(given) == len(layers)
    gathers = any(isinstance(style, ColwiseGather) for style in given.values())
    if complete and not gathers:
        yield proposal
    yield from own
    if complete and gathers:
        yield Proposal(given, {})


# -- what earlier ways show --


_Divided = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class _Refused:
    """A way that was refused.

    Args:
        error: how its run ended; None if it was skipped.
        got_further: whether it came further than the same way with one attribute less, or ended differently.
    """

    error: MismatchError | None
    got_further: bool


class Progress:
    """Which ways to split a region are worth a try, judged by how far earlier ways came.

    A run ends at the first operation whose shapes do not fit, or with wrong numbers. If dividing one more attribute
    does not change that, or makes an operation fail that worked before, then dividing yet another one does not help
    either. So several attributes are only divided together if each step towards that got further.
    """

    def __init__(self) -> None:
        self._seen: dict[Hashable, dict[_Divided, _Refused]] = {}

    def is_worth_trying(self, proposal: Proposal) -> bool:
        """Whether `proposal` may get further than earlier ways. If not, it is noted as refused."""
        seen, divided = self._refused_like(proposal), _divided(proposal)
        if len(divided) < 2 or any(fewer not in seen or seen[fewer].got_further for fewer in _one_less(divided)):
            return True
        seen[divided] = _Refused(None, False)
        return False

    def note(self, proposal: Proposal, error: MismatchError) -> None:
        """Notes that `proposal` was refused with `error`."""
        seen, divided = self._refused_like(proposal), _divided(proposal)
        further = not divided or any(
            fewer not in seen or (seen[fewer].got_further and _is_further(error, seen[fewer].error))
            for fewer in _one_less(divided)
        )
        seen[divided] = _Refused(error.again(), further)

    def _refused_like(self, proposal: Proposal) -> dict[_Divided, _Refused]:
        """The refused ways that differ from `proposal` only in what they divide."""
        others = tuple((name, style) for name, style in proposal.styles.items() if not isinstance(style, Divide))
        return self._seen.setdefault((others, tuple(proposal.sliced_inputs.items())), {})


def _divided(proposal: Proposal) -> _Divided:
    styles = proposal.styles.items()
    return frozenset((name, option) for name, style in styles if isinstance(style, Divide) for option in style.targets)


def _one_less(divided: _Divided) -> Iterator[_Divided]:
    return (divided - {option} for option in divided)


def _is_further(error: MismatchError, before: MismatchError | None) -> bool:
    if before is None or _end(error) == _end(before):
        return False
    return error.operations >= before.operations or not (error.in_operation and before.in_operation)


def _end(error: MismatchError) -> tuple[int, str, float]:
    return error.operations, str(error), error.amount


# -- numbers of heads --

# Words of names such as head_dim, which give the width of a head; and of names where head means something else.
_WIDTHS = ("dim", "size", "width")
_NEITHER = ("channel", "scale", "mask", "group")


def undivided_heads(block: nn.Module, layers: Iterable[str], size: int) -> str | None:
    """Says which heads of the modules that hold `layers` cannot be divided over `size` ranks, and which tp would work.

    Args:
        block: the names in `layers` are relative to it.

    Returns:
        None if there is no such number.
    """
    counts: dict[str, int] = {}
    by_layer: dict[str, int] = {}
    pairs = low_rank_pairs(block)
    for layer in layers:
        owner = pairs.owner_of(layer)
        named = _head_counts(owner, block.get_submodule(owner))
        counts |= named
        by_layer |= {} if named or layer in pairs.second else _heads_of_layer(block, layer, owner)
    wrong = [f"{name} is {count}" for name, count in counts.items() if count % size]
    for count in sorted({count for count in by_layer.values() if count % size}):
        those = [layer for layer, heads in by_layer.items() if heads == count]
        wrong.append(f"{', '.join(those)} {'has' if len(those) == 1 else 'have'} {count} heads")
    if not wrong:
        return None
    common = math.gcd(*counts.values(), *by_layer.values())
    ways = [str(ways) for ways in range(2, common + 1) if common % ways == 0]
    remedy = f"tp can be {' or '.join(ways)}" if ways else "no tp above 1 divides its heads"
    return f"{' and '.join(wrong)}, which cannot be divided over {size} ranks; {remedy}"


def _head_counts(name: str, module: nn.Module) -> dict[str, int]:
    own = _named_heads(vars(module))
    if not own:
        return {}  # not an attention; the heads in its config are those of other modules
    config = getattr(module, "config", None)
    known = own | {f"config.{key}": count for key, count in _named_heads(getattr(config, "__dict__", {})).items()}
    prefix = f"{name}." if name else ""
    return {prefix + key: count for key, count in known.items() if not any(p in key for p in (*_WIDTHS, *_NEITHER))}


def _heads_of_layer(block: nn.Module, layer: str, owner: str) -> dict[str, int]:
    """The number of heads that a layer's output features show, if only the width of a head is known."""
    described = as_splittable(block.get_submodule(layer))
    sizes = _named_heads(vars(block.get_submodule(owner)))
    widths = [w for key, w in sizes.items() if any(part in key for part in _WIDTHS)]
    if described is None or described.kind != "linear" or len(widths) != 1 or described.outputs % widths[0]:
        return {}
    return {layer: described.outputs // widths[0]}


def _named_heads(attributes: dict[str, Any]) -> dict[str, int]:
    return {
        key: value
        for key, value in attributes.items()
        if "head" in key and isinstance(value, int) and not isinstance(value, bool) and value > 0
    }
