"""The search of one block: what can be split, each way checked by numbers; and what stays whole, and why."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

from torch import nn

from tensorshard.model.special_layers import find_experts
from tensorshard.tensor_parallel.search.dataflow import Dataflow, Region, follow
from tensorshard.tensor_parallel.search.experts import expert_styles
from tensorshard.tensor_parallel.search.head_counts import undivided_heads
from tensorshard.tensor_parallel.search.progress import Progress
from tensorshard.tensor_parallel.search.proposals import Proposal, proposals
from tensorshard.tensor_parallel.search.shared_head_proposals import shared_proposals
from tensorshard.tensor_parallel.table.layer_kinds import as_splittable
from tensorshard.tensor_parallel.table.styles import SUM_GRADIENTS, Style
from tensorshard.tensor_parallel.verify.block_calls import BlockCall
from tensorshard.tensor_parallel.verify.block_check import BlockCheck
from tensorshard.tensor_parallel.verify.comparison import MismatchError
from tensorshard.tensor_parallel.verify.inner_checks import InnerCheck, KnownModules, inner_check


@dataclass
class SplitRegion:
    """A region that can be split, and how.

    Args:
        tries: how many ways were checked, up to the one that passed.
        sharded_outputs: tensor outputs of the block that are then split too, each with its dimension.
    """

    region: Region
    proposal: Proposal
    tries: int
    sharded_outputs: dict[int, int]


@dataclass
class BlockSearch:
    """What the search of a block found; names are relative to the block.

    Args:
        split: what can be split.
        whole: why the other linear layers and convolutions stay whole.
        ends: those of them whose outputs no other layer takes as input.
    """

    split: list[SplitRegion] = field(default_factory=list)
    whole: dict[str, str] = field(default_factory=dict)
    ends: list[str] = field(default_factory=list)

    def styles(self) -> dict[str, Style]:
        """The styles of all that is split, in one table."""
        return merge_styles([found.proposal.styles for found in self.split])


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
    found = BlockSearch()
    refused: set[str] = set()
    reasons: dict[str, str] = {}
    taken: set[str] = set()
    while True:
        # The layers of a refused region stay whole. The layers before and after them may then form other pairs.
        columns = {layer for split in found.split for layer in split.region.columns}
        flow = follow(block, call, refused, columns)
        done = columns | {layer for split in found.split for layer in split.region.rows}
        regions = [region for region in flow.regions if not done & {*region.columns, *region.rows}]
        refused_before = len(refused)
        for region in regions:
            taken.update(region.columns)
            outcome = _split(block, call, check, region, flow, published or {}, known)
            if isinstance(outcome, SplitRegion):
                found.split.append(outcome)
            else:
                # Another region may begin with the first row as a column: in latent attention the queries do.
                refused.update(region.first_columns)
                for layer in (*region.columns, *region.rows):
                    reasons.setdefault(layer, f"{region}: {outcome}")
        if len(refused) == refused_before:  # the next run would propose the same
            break
    used = {layer for split in found.split for layer in (*split.region.columns, *split.region.rows)}
    for name, module in block.named_modules():
        described = as_splittable(module)
        if name not in used and described is not None and described.has_rows:
            unused = "no other layer takes its output features as input"
            found.whole[name] = reasons.get(name, unused if name in flow.called else "it is not called as a module")
            if name not in taken and name in flow.called:
                found.ends.append(name)
    for name, experts in find_experts(block).items():
        outcome = _split_experts(name, experts, check)
        if isinstance(outcome, str):
            found.whole[name] = f"its experts stay whole: {outcome}"
        else:
            found.split.append(outcome)
    return found


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
        return SplitRegion(region, Proposal(styles, {}), tries, agreement.sharded_outputs)
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
        return SplitRegion(region, proposal, tries, agreement.sharded_outputs)
    return heads or reason


def _all_proposals(region: Region, own: Iterator[Proposal], published: Mapping[str, Style]) -> Iterator[Proposal]:
    """All proposals. The published one comes first if it splits the region outright, and last if it gathers in
    between."""
    layers = (*region.columns, *region.rows)
    given = {name: published[name] for name in layers if name in published}
    proposal = Proposal({**given, **dict.fromkeys(region.between, SUM_GRADIENTS)}, {})
    complete = len(given) == len(layers)
    gathers = any(style.kind == "colwise_gather" for style in given.values())
    if complete and not gathers:
        yield proposal
    yield from own
    if complete and gathers:
        yield Proposal(given, {})


def merge_styles(tables: list[dict[str, Style]]) -> dict[str, Style]:
    """The styles of several regions in one table. An attribute that several of them divide is divided once."""
    merged: dict[str, Style] = {}
    for table in tables:
        for name, style in table.items():
            earlier = merged[name].names if name in merged and style.kind == "divide" else ()
            names = tuple(dict.fromkeys((*earlier, *style.names)))
            merged[name] = Style(style.kind, style.sizes, names)
    return merged
