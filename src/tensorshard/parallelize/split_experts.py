"""Expert parallelism of a model: the experts are found, and each rank gets its own."""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.comm.decisions import decide_once
from tensorshard.context_parallel import whole
from tensorshard.context_parallel.context_group import activated
from tensorshard.context_parallel.layout_changes import gathered, part_of
from tensorshard.context_parallel.layouts import expanded
from tensorshard.context_parallel.sequence_tensor import SequenceTensor, before_use
from tensorshard.expert_parallel.search import SplitExperts, find_routed_experts
from tensorshard.model.forwards import Forward, Role, wrap_forward
from tensorshard.plan.mesh import Mesh
from tensorshard.random.call_sites import current_randomness
from tensorshard.tensor_parallel.apply.tensor_split import TensorSplit
from tensorshard.tensor_parallel.table.layouts import Layout, OwnedLayout
from tensorshard.torch_private.fake_tensors import unset_fake_temporarily
from tensorshard.torch_private.process_groups import alone_in_the_world
from tensorshard.torch_private.pytree import tree_leaves, tree_map


def choose_experts(model: nn.Module, mesh: Mesh, ranks: int) -> dict[str, SplitExperts]:
    """The modules of `model` whose experts are split over `ranks`. The first rank finds them. A collective.

    Raises:
        ValueError: there are none, or they cannot be split.
    """

    def choose() -> dict[str, SplitExperts]:
        with alone_in_the_world():
            return find_routed_experts(model, ranks)

    with unset_fake_temporarily():
        return decide_once(choose, mesh.world_group)


class ExpertTable:
    """Which experts are split, for people."""

    def __init__(self, experts: Mapping[str, SplitExperts], ranks: int) -> None:
        self._experts, self._ranks = experts, ranks

    def describe(self) -> str:
        """A line for each module."""
        lines = [f"{name}: {call.describe(self._ranks)}" for name, call in self._experts.items()]
        return "\n".join(lines)


def split_all_experts(
    model: nn.Module,
    full_model: nn.Module,
    experts: Mapping[str, SplitExperts],
    group: dist.ProcessGroup,
    *,
    outer: TensorSplit,
    cuts_sequences: bool = False,
) -> TensorSplit:
    """Makes the modules that `experts` names compute this rank's part; says how their parameters are split.

    Args:
        model: the one to change: `full_model`, or a stage of it, which has some of these modules.
        outer: what this rank has of each expert.
        cuts_sequences: whether ranks have parts of sequences, each of which then sends its own tokens.
    """
    here = dict(model.named_modules())
    owners: dict[torch.Tensor, int | None] = {}
    for name, call in experts.items():
        if name in here:
            call.split(here[name], group)
            if cuts_sequences:
                wrap_forward(here[name], Role.OWN_POSITIONS, partial(_with_own_positions, call.token_repeats))
        owners.update(call.owners(full_model.get_submodule(name)))
    layouts: dict[str, Layout] = {}
    for name, parameter in full_model.named_parameters(remove_duplicate=False):
        if parameter in owners:
            rows, owner = (outer.local_shape(name, parameter.shape)[0],), owners[parameter]
            layouts[name] = Layout(0, rows) if owner is None else OwnedLayout(0, rows, owner)
    return TensorSplit(layouts, group, ExpertTable(experts, group.size()), of_data_ranks=True, outer=outer)


def _with_own_positions(repeats: int, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    """Calls experts with the tokens of this rank's positions. Their code sees plain tensors, and so do exchanges.

    Args:
        repeats: how often the tokens come one after the other.
    """
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, SequenceTensor)]
    for leaf in given:
        before_use(leaf, torch.clone)
    lead = max(given, key=lambda leaf: leaf.is_floating_point(), default=None)
    if lead is None or lead.split_dim == lead.ndim - 1 or lead.sequence.root[0] % repeats:
        args, kwargs = whole((args, kwargs))
        with activated(None):
            return forward(*args, **kwargs)
    group, layout, dim, shape = lead.group, lead.sequence, lead.split_dim, lead.local.shape

    def own_part(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim() > dim and leaf.shape[dim] == layout.length:
            return part_of(leaf, dim, layout, "experts", group)
        return gathered(leaf, "experts")

    def joined(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.shape[: dim + 1] == shape[: dim + 1]:
            return SequenceTensor(leaf, dim, layout, group)
        outer, inner = math.prod(shape[:dim]), math.prod(shape[dim + 1 : -1])  # tokens as one dimension
        return SequenceTensor(leaf, 0, expanded(layout, outer, inner), group)

    args, kwargs = tree_map(own_part, (args, kwargs))
    source = current_randomness()
    numbered: AbstractContextManager[None] = nullcontext()
    if source is not None:
        rows = source.rows_of_samples(lead.local.new_empty((*shape[:dim], layout.length, *shape[dim + 1 : -1], 1)))
        numbers = rows.numbers.view(*shape[:dim], layout.length, *shape[dim + 1 : -1])
        numbers = part_of(numbers, dim, layout, "experts", group).flatten()
        numbered = source.rows_are(lead.local, numbers, rows.per_sample)
    with activated(None), numbered:
        result = forward(*args, **kwargs)
    return tree_map(joined, result)
