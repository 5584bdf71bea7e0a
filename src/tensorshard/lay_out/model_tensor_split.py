"""Tensor parallelism of a whole model: choosing the table, and applying it."""

import gc
from typing import TYPE_CHECKING, Any

from torch import nn

from tensorshard.comm.decisions import decide_once
from tensorshard.materialize.source import TensorSource
from tensorshard.mesh import Mesh
from tensorshard.modules.memoized import nothing_remembered
from tensorshard.plan import Plan
from tensorshard.tensor_parallel.apply.split_outputs import SplitOutputs
from tensorshard.tensor_parallel.apply.tensor_split import TensorSplit
from tensorshard.torch_private.fake_tensors import unset_fake_temporarily
from tensorshard.torch_private.process_groups import alone_in_the_world

if TYPE_CHECKING:
    from tensorshard.tensor_parallel.search.find_table import VerifiedTable


def choose_tensor_split(source: TensorSource, plan: Plan, mesh: Mesh, inputs: Any = None) -> "VerifiedTable | None":
    """The table for the source's model under `plan`, found or checked by running it; None if nothing is to be split.

    The first rank finds it and broadcasts it. A collective of the mesh.

    Args:
        inputs: samples to run the model on; None to guess them.

    Raises:
        ValueError: the plan's table is wrong for this model, or none can be found.
    """
    if mesh.degrees["tp"] == 1:
        return None

    from tensorshard.tensor_parallel.search.choose_table import choose_tensor_plan

    def choose() -> "VerifiedTable":
        # Memoized functions may have asked for the size of the world.
        with source.real_buffers(), nothing_remembered(source.module), alone_in_the_world():
            found = choose_tensor_plan(
                source.module,
                mesh.degrees["tp"],
                plan.tp_plan,
                inputs=inputs,
                check=plan.tp_check,
                sequence_parallel=plan.sequence_parallel,
            )
        # The search leaves reference cycles, whose memory would otherwise be held for many steps.
        gc.collect()
        return found

    with unset_fake_temporarily():  # the check computes numbers, on small tensors of its own
        return decide_once(choose, mesh.world_group)


def split_over_tensor_ranks(model: nn.Module, found: "VerifiedTable | None", plan: Plan, mesh: Mesh) -> TensorSplit:
    """Makes `model` compute this rank's part of what the table `found` splits."""
    if found is None:
        return TensorSplit()
    from tensorshard.tensor_parallel.apply.apply_table import apply_tensor_parallel
    from tensorshard.tensor_parallel.apply.randomness import split_randomness
    from tensorshard.tensor_parallel.apply.sequence_parallel import apply_sequence_parallel
    from tensorshard.tensor_parallel.verify.model_run import find_units

    group = mesh.group("tp")
    # Layers that share an input reduce its gradient together. For that the first layer reads the others' weights. Under
    # ZeRO 3 these may not be gathered then, if the user names the units.
    parted = plan.zero == 3 and isinstance(plan.shard_units, list)
    shared_inputs = () if parted else found.shared_inputs
    outputs = SplitOutputs()
    layouts = apply_tensor_parallel(model, found.plan, group, shared_inputs=shared_inputs, outputs=outputs)
    styles = found.plan.resolve(model)
    # If the model was examined as one unit, but only some blocks inside get parts of a sequence, these blocks draw
    # random numbers separately.
    blocks = find_units(model) if "" not in find_units(model) or "" in found.sequence else found.sequence or [""]
    random = [name for name in blocks if name not in found.not_random]
    split_randomness(model, random, styles, found.sequence, group)
    apply_sequence_parallel(model, found.sequence, group, shared_inputs=shared_inputs, whole_units=not parted)
    return TensorSplit(layouts, group, found, outputs)
