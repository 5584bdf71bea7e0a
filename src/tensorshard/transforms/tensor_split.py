"""Which part of every parameter the tensor-parallel ranks hold, and putting the parts together again."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from tensorshard.distributed.collectives import all_gather_into
from tensorshard.distributed.decide import decide_once
from tensorshard.mesh import Mesh
from tensorshard.plan import Plan
from tensorshard.tensor_plans.choose import choose_tensor_plan
from tensorshard.tensor_plans.find import FoundPlan
from tensorshard.tensor_plans.layout import WHOLE, Layout, join_parts, local_part
from tensorshard.transforms.split_outputs import SplitOutputs


@dataclass(frozen=True)
class TensorSplit:
    """Layouts of parameters over a group of tensor-parallel ranks; of none by default, where everything is whole.

    Args:
        layouts: of every parameter, by each of its names.
        group: the ranks; None for a single one.
        found: the table that the layouts follow from.
        outputs: whether the output layers hand on split logits.
    """

    layouts: Mapping[str, Layout] = field(default_factory=dict)
    group: dist.ProcessGroup | None = None
    found: FoundPlan | None = None
    outputs: SplitOutputs = field(default_factory=SplitOutputs)

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    def layout(self, name: str) -> Layout:
        """How the parameter `name` lies."""
        return self.layouts.get(name, WHOLE)

    def ways(self, name: str) -> int:
        """Into how many parts the parameter `name` is cut."""
        return 1 if self.layout(name).dim is None else self.size

    def local(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of the parameter `name`."""
        return local_part(full, self.layout(name), self.rank, self.size)

    def whole(self, name: str, local: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """The parameter `name` of `shape`, of which every rank gives its `local` part. A collective of the group."""
        layout = self.layout(name)
        if layout.dim is None or self.group is None:
            return local
        shapes = [layout.local_shape(shape, rank, self.size) for rank in range(self.size)]
        longest = max(part.numel() for part in shapes)
        mine = local.new_zeros(longest)
        mine[: local.numel()] = local.reshape(-1)
        gathered = local.new_empty(longest * self.size)
        all_gather_into(gathered, mine, self.group)
        parts = [flat[: part.numel()].view(part) for flat, part in zip(gathered.chunk(self.size), shapes, strict=True)]
        return join_parts(parts, layout)


def choose_tensor_split(model: nn.Module, plan: Plan, mesh: Mesh, inputs: Any = None) -> FoundPlan | None:
    """The table for `model` under `plan`, found or checked by numbers; None where nothing is to be split.

    The first rank works it out and tells the others. A collective of the mesh.

    Args:
        inputs: samples to run the model on; None to guess them.

    Raises:
        ValueError: the plan's table is wrong for this model, or none can be found.
    """
    if mesh.degrees["tp"] == 1:
        return None

    def choose() -> FoundPlan:
        return choose_tensor_plan(
            model,
            mesh.degrees["tp"],
            plan.tp_plan,
            inputs=inputs,
            check=plan.tp_check,
            sequence_parallel=plan.sequence_parallel,
        )

    with unset_fake_temporarily():  # the check computes numbers, on small tensors of its own
        return decide_once(choose, mesh.world_group)


def split_over_tensor_ranks(model: nn.Module, found: FoundPlan | None, plan: Plan, mesh: Mesh) -> TensorSplit:
    """Makes `model` compute this rank's part of what the table `found` splits."""
    if found is None:
        return TensorSplit()
    from tensorshard.tensor_plans.units import find_units
    from tensorshard.transforms.randomness import split_randomness
    from tensorshard.transforms.sequence_parallel import apply_sequence_parallel
    from tensorshard.transforms.tensor import apply_tensor_parallel

    group = mesh.group("tp")
    # Layers that share an input reduce its gradient together, for which the first reads the others' weights: these are
    # not there under ZeRO 3 where units by name may part them.
    parted = plan.zero == 3 and isinstance(plan.shard_units, list)
    shared_inputs = () if parted else found.shared_inputs
    outputs = SplitOutputs()
    layouts = apply_tensor_parallel(model, found.plan, group, shared_inputs=shared_inputs, outputs=outputs)
    styles = found.plan.resolve(model)
    split_randomness(model, find_units(model), styles, found.sequence, group)
    apply_sequence_parallel(model, found.sequence, group, shared_inputs=shared_inputs, whole_units=not parted)
    return TensorSplit(layouts, group, found, outputs)
