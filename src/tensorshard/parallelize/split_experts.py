"""Expert parallelism of a model: the experts are found, and each rank gets its own."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.comm.decisions import decide_once
from tensorshard.expert_parallel.search import SplitExperts, find_routed_experts
from tensorshard.plan.mesh import Mesh
from tensorshard.tensor_parallel.apply.tensor_split import TensorSplit
from tensorshard.tensor_parallel.table.layouts import Layout, OwnedLayout
from tensorshard.torch_private.fake_tensors import unset_fake_temporarily
from tensorshard.torch_private.process_groups import alone_in_the_world


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
    model: nn.Module, full_model: nn.Module, experts: Mapping[str, SplitExperts], group: dist.ProcessGroup
) -> TensorSplit:
    """Makes the modules that `experts` names compute this rank's part; says how their parameters are split.

    Args:
        model: the one to change: `full_model`, or a stage of it, which has some of these modules.
    """
    here = dict(model.named_modules())
    layouts: dict[torch.Tensor, Layout] = {}
    for name, call in experts.items():
        if name in here:
            call.split(here[name], group)
        for parameter, owner in call.owners(full_model.get_submodule(name)).items():
            rows = (parameter.size(0),)
            layouts[parameter] = Layout(0, rows) if owner is None else OwnedLayout(0, rows, owner)
    named = {
        name: layouts[parameter]
        for name, parameter in full_model.named_parameters(remove_duplicate=False)
        if parameter in layouts
    }
    return TensorSplit(named, group, ExpertTable(experts, group.size()), of_data_ranks=True)
