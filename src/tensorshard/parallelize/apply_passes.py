"""Lays a model out as a Plan says: it chooses tensor parallelism, then cuts a pipeline, then applies all transforms."""

from typing import Any

import torch

from tensorshard.comm.sharded_tensors import gather_full
from tensorshard.data_parallel.shard_units import shard_units
from tensorshard.model.blocks import find_blocks
from tensorshard.parallelize.decisions import Decisions
from tensorshard.parallelize.model_tensor_split import choose_tensor_split, split_over_tensor_ranks
from tensorshard.parallelize.parallel_layers import split_by_hand, tensor_split_of
from tensorshard.parallelize.passes import Part, from_first_rank, lay_out
from tensorshard.plan.mesh import Mesh
from tensorshard.plan.plan import Plan
from tensorshard.plan.storage import Storage
from tensorshard.sharded.sharded_model import ShardedModel
from tensorshard.tensor_parallel.apply.tensor_split import TensorSplit
from tensorshard.weights.initial.source import TensorSource


def apply_plan(
    source: TensorSource,
    plan: Plan,
    mesh: Mesh,
    device: torch.device,
    *,
    broadcast: bool,
    storage: Storage,
    sample_inputs: Any = None,
    decisions: Decisions | None = None,
) -> ShardedModel:
    """The source's model, laid out over `mesh` as `plan` says, with its values on `device`.

    Args:
        broadcast: whether all ranks take the values of the mesh's first rank, because their own may differ.
        sample_inputs: inputs on which the model is run to find out how it can be split and cut; None to guess them.
        storage: where values are kept.
        decisions: decisions of another rank of this plan, to use again; None to decide.
    """
    model = source.module
    by_hand = split_by_hand(model) if mesh.degrees["tp"] > 1 else {}
    decisions = Decisions() if decisions is None else decisions
    if decisions.table is None and not by_hand:
        decisions.table = choose_tensor_split(source, plan, mesh, sample_inputs)
    found = decisions.table
    if mesh.degrees["pp"] > 1:
        from tensorshard.parallelize.stages import apply_pipeline

        return apply_pipeline(
            source,
            decisions,
            plan,
            mesh,
            device,
            broadcast=broadcast,
            sample_inputs=sample_inputs,
            storage=storage,
        )

    def value_of(name: str) -> torch.Tensor:
        value = gather_full(source.tensor(name).to(device), by_hand.get(name))
        return from_first_rank(value, mesh) if broadcast else value

    part = Part(
        model,
        repeated=list(dict.fromkeys(find_blocks(model).values())) or [model],  # a model without blocks is one
        units=shard_units(model, plan.shard_units),
        computed=[model],
    )

    def split_tensors() -> TensorSplit:
        if by_hand:
            return tensor_split_of(by_hand, mesh.group("tp"))
        return split_over_tensor_ranks(model, found, plan, mesh)

    return lay_out(part, value_of, split_tensors, plan, mesh, device, storage)
