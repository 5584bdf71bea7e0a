"""Tensor parallelism of a pipeline's stages."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.model.parameters import ParameterPlaces, like
from tensorshard.pipeline.run.stage_module import StageModule
from tensorshard.plan.plan import Plan
from tensorshard.tensor_parallel.apply.apply_table import apply_tensor_parallel
from tensorshard.tensor_parallel.apply.randomness import split_randomness
from tensorshard.tensor_parallel.apply.sequence_parallel import apply_sequence_parallel
from tensorshard.tensor_parallel.apply.tensor_split import SplitOutputs, TensorSplit, shard_buffers
from tensorshard.tensor_parallel.table.layouts import SequenceSplit
from tensorshard.tensor_parallel.table.table import VerifiedTable
from tensorshard.tensor_parallel.verify.fake_process_group import fake_process_group
from tensorshard.tensor_parallel.verify.model_run import find_units


def fake_tensor_split(fake_copy: nn.Module, found: VerifiedTable, group: dist.ProcessGroup) -> None:
    """Gives `fake_copy`, a copy on fake tensors, the shapes that this rank of `group` will see between modules.

    Sequence parallelism is left out, since sequences are gathered at the end of a stage.
    """
    silent = fake_process_group(group.rank(), group.size())
    layouts = apply_tensor_parallel(fake_copy, found.plan, silent, shared_inputs=found.shared_inputs)
    places = ParameterPlaces(fake_copy)
    for name, parameter in list(fake_copy.named_parameters()):
        shape = layouts[name].local_shape(parameter.shape, group.rank(), group.size())
        if shape != parameter.shape:
            local = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
            places.replace(parameter, like(parameter, local))
    shard_buffers(fake_copy, layouts, group.rank(), group.size())


def split_stage(
    stage: StageModule, whole: nn.Module, found: VerifiedTable, plan: Plan, group: dist.ProcessGroup
) -> TensorSplit:
    """Makes `stage` compute this rank's part of what the table `found` splits.

    Args:
        whole: the unchanged model, on the meta device.
    """
    styles = found.plan.resolve(whole)
    parted = plan.zero == 3 and isinstance(plan.shard_units, list)
    shared = () if parted else [[n for n in names if n not in stage.elsewhere] for names in found.shared_inputs]
    shared_inputs = [names for names in shared if len(names) > 1]
    outputs = SplitOutputs()
    layouts = apply_tensor_parallel(
        stage.module,
        found.plan,
        group,
        shared_inputs=shared_inputs,
        outputs=outputs if stage.is_last else None,  # what goes to another stage is full
        whole=whole,
        elsewhere=stage.elsewhere,
    )
    own = {name: style for name, style in styles.items() if name not in stage.elsewhere}
    sequence = stage_sequences(stage, found.sequence)
    random = [name for name in find_units(whole) if name not in stage.elsewhere | found.not_random]
    split_randomness(stage.module, random, own, sequence, group)
    apply_sequence_parallel(stage.module, sequence, group, shared_inputs=shared_inputs, whole_units=not parted)
    return TensorSplit(layouts, group, found, outputs)


def stage_sequences(stage: StageModule, sequence: Mapping[str, SequenceSplit]) -> dict[str, SequenceSplit]:
    """How the stage's own blocks compute on parts of a sequence. Sequences that cross a cut are whole.

    Raises:
        ValueError: the model has no blocks, so that the sequence is split for the whole model.
    """
    if "" in sequence:
        raise ValueError(
            "sequence_parallel=True splits this model's sequences over the whole of it, since it has no repeated "
            "blocks, and a pipeline cuts it; set sequence_parallel=False, or pp=1"
        )
    units = {call.unit for call in stage.cut.graph.calls}
    for name in sequence:
        inside = next((unit for unit in sorted(units) if unit.startswith(f"{name}.")), None)
        if inside is not None:
            raise ValueError(
                f"pp_units names {inside!r}, which is inside of {name!r}, and with sequence_parallel=True that "
                f"computes on parts of a sequence as a whole; name {name!r} itself, or set sequence_parallel=False"
            )
    runs: list[list[str]] = []  # consecutive blocks between which the sequence stays split
    for unit in dict.fromkeys(call.unit for call in stage.cut.graph.calls):
        for name in (name for name in sequence if name == unit or name.startswith(f"{unit}.")):
            if sequence[name].scatters or not runs:
                runs.append([])
            runs[-1].append(name)
    found = {}
    for run in runs:
        mine = [name for name in run if name not in stage.elsewhere]
        for name in mine:
            split = sequence[name]
            found[name] = split.linked(
                scatters=split.scatters or name == mine[0], gathers=split.gathers or name == mine[-1]
            )
    return found
