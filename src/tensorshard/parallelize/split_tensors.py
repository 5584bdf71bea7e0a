"""Tensor parallelism of a model or of a pipeline's stage: the table is chosen, and applied."""

import gc
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.comm.decisions import decide_once
from tensorshard.common.words import is_inside, join_names
from tensorshard.expert_parallel.listed_experts import ListedExperts
from tensorshard.expert_parallel.search import SplitExperts
from tensorshard.model.global_state import restored_globals
from tensorshard.model.parameters import ParameterPlaces, like
from tensorshard.parallelize.part import Part, PassContext
from tensorshard.plan.mesh import Mesh
from tensorshard.plan.plan import Plan
from tensorshard.tensor_parallel.apply.apply_table import apply_tensor_parallel, find_layouts
from tensorshard.tensor_parallel.apply.sequence_parallel import apply_sequence_parallel
from tensorshard.tensor_parallel.apply.tensor_split import SplitOutputs, TensorSplit, shard_buffers
from tensorshard.tensor_parallel.search.choose_table import choose_tensor_table
from tensorshard.tensor_parallel.table.layouts import SequenceSplit
from tensorshard.tensor_parallel.table.styles import Gather, Slice
from tensorshard.tensor_parallel.table.table import VerifiedTable
from tensorshard.tensor_parallel.verify.simulated_ranks import fake_process_group
from tensorshard.torch_private.fake_tensors import unset_fake_temporarily
from tensorshard.torch_private.modules import own_parameters
from tensorshard.torch_private.process_groups import alone_in_the_world
from tensorshard.weights.initial import TensorSource


def choose_table(
    source: TensorSource,
    plan: Plan,
    mesh: Mesh,
    inputs: Any = None,
    *,
    experts: Mapping[str, SplitExperts] | None = None,
) -> VerifiedTable:
    """The table for the source's model under `plan`, searched for or checked by running it.

    The first rank does that, and broadcasts the table. A collective of the mesh.

    Args:
        inputs: samples to run the model on; None to guess them.
        experts: the modules whose experts are split over data ranks as well, by their names.

    Raises:
        ValueError: the plan's table is wrong for this model, or the search does not succeed.
    """

    def search(table: Mapping[str, str] | None) -> VerifiedTable:
        return choose_tensor_table(
            source.module,
            mesh.degrees["tp"],
            table,
            inputs=inputs,
            check=plan.tp_check,
            sequence_parallel=plan.sequence_parallel,
        )

    def choose() -> VerifiedTable:
        # Memoized functions may have asked for the size of the world.
        with source.real_buffers(), restored_globals(source.module), alone_in_the_world():
            table = search(plan.tp_plan)
            crossing = _entries_across(table, source.module, experts or {})
            if crossing and plan.tp_plan is not None:
                raise ValueError(
                    f"tp_plan names {', '.join(crossing)}, which cuts whole experts from each other, as ep={plan.ep} "
                    f"does: cut another dimension of them, leave them out of tp_plan, or set ep=1"
                )
            if crossing:
                table = search({name: style for name, style in table.plan.to_dict().items() if name not in crossing})
        # The search leaves reference cycles, whose memory would otherwise be in use for many steps.
        gc.collect()
        return table

    with unset_fake_temporarily():  # the check computes numbers, on small tensors of its own
        return decide_once(choose, mesh.world_group)


def _entries_across(table: VerifiedTable, model: nn.Module, experts: Mapping[str, SplitExperts]) -> list[str]:
    """The entries of a table that do not split each expert by itself.

    They cut the dimension of experts, or are about a whole expert in a list, of which some ranks have nothing.
    """
    styles = table.plan.resolve(model)
    layouts = find_layouts(model, styles, table.size)
    names: set[str] = set()
    for name, call in experts.items():
        if isinstance(call, ListedExperts):
            members = [join_names(name, member) for member in call.members]
            own = {key for key in styles if is_inside(key, members)}
            crosses = any(key in members or isinstance(styles[key], Gather | Slice) for key in own)
        else:
            own = {name, *(join_names(name, key) for key in own_parameters(model.get_submodule(name)))}
            crosses = any(layouts[key].dim == 0 for key in own - {name})
        names |= own if crosses else set()
    return [pattern for pattern in table.plan.entries if any(fnmatchcase(name, pattern) for name in names)]


def split_tensors(part: Part, table: VerifiedTable, context: PassContext) -> TensorSplit:
    """Makes `part` compute this rank's part of what `table` splits."""
    plan, group = context.plan, context.mesh.group("tp")
    # Layers that share an input reduce its gradient together. For that the first layer reads the others' weights. Under
    # ZeRO 3 these may not be gathered then, if the user names the units.
    units_gathered_separately = plan.zero == 3 and isinstance(plan.shard_units, list)
    shared_inputs = []
    if not units_gathered_separately:
        computed = ([name for name in names if name not in part.elsewhere] for names in table.shared_inputs)
        shared_inputs = [names for names in computed if len(names) > 1]
    outputs = SplitOutputs()
    layouts = apply_tensor_parallel(
        part.module,
        table.plan,
        group,
        shared_inputs=shared_inputs,
        outputs=outputs if part.returns_output else None,  # what goes to another stage is full
        whole=part.full_model,
        elsewhere=part.elsewhere,
    )
    known = _inside_units(part, table.sequence)
    in_shards = _sent_in_shards(part, known) if context.mesh.degrees["cp"] == 1 else set()
    sequence = _sequence_splits(part, known, in_shards)
    part.sequences = apply_sequence_parallel(
        part.module,
        sequence,
        group,
        shared_inputs=shared_inputs,
        whole_units=not units_gathered_separately,
        between={name: known[name] for name in in_shards},
    )
    return TensorSplit(layouts, group, table, outputs)


def _inside_units(part: Part, sequence: Mapping[str, SequenceSplit]) -> dict[str, SequenceSplit]:
    """`sequence` without the modules between blocks that are inside of no unit of the pipeline: all stages run them."""
    kept = dict(sequence)
    for before, name, after in zip(("", *sequence), sequence, (*list(sequence)[1:], ""), strict=False):
        split = sequence[name]
        if not part.calls or not split.is_between or is_inside(name, part.calls):
            continue
        del kept[name]
        if before in kept and not split.scatters:
            kept[before] = replace(kept[before], gathers=True)
        if after and not split.gathers:
            kept[after] = replace(kept[after], scatters=True)
    return kept


def _sent_in_shards(part: Part, sequence: Mapping[str, SequenceSplit]) -> set[str]:
    """Blocks whose outputs cross a cut of the model as shards of a sequence: the next call is of a block that computes
    on them. All stages find the same ones."""
    once = {name for name, times in Counter(part.calls).items() if times == 1 and name in sequence}
    return {
        name
        for name, following in pairwise(part.calls)
        if name in once and following in once and not (sequence[name].gathers or sequence[following].scatters)
    }


def _sequence_splits(
    part: Part, sequence: Mapping[str, SequenceSplit], in_shards: Set[str]
) -> dict[str, SequenceSplit]:
    """How the part's blocks compute on parts of a sequence. Sequences that cross a cut are full.

    Args:
        in_shards: blocks whose outputs cross a cut as shards instead.

    Raises:
        ValueError: a pipeline cuts what computes on parts of a sequence as one.
    """
    if not part.calls:
        return dict(sequence)
    if "" in sequence:
        raise ValueError(
            "sequence_parallel=True splits this model's sequences over the whole of it, since it has no repeated "
            "blocks, and a pipeline cuts it; set sequence_parallel=False, or pp=1"
        )
    units = dict.fromkeys(part.calls)
    for name in sequence:
        inside = min((unit for unit in units if unit.startswith(f"{name}.")), default=None)
        if inside is not None:
            raise ValueError(
                f"{inside!r}, a unit of the pipeline, is inside of {name!r}, and with sequence_parallel=True that "
                f"computes on parts of a sequence as a whole; name {name!r} itself in pp_units, or set "
                f"sequence_parallel=False"
            )
    runs: list[list[str]] = []  # consecutive blocks between which the sequence stays split
    for unit in units:
        for name in (name for name in sequence if is_inside(name, [unit])):
            if sequence[name].scatters or not runs:
                runs.append([])
            runs[-1].append(name)
    splits = {}
    for run in runs:
        mine = [name for name in run if name not in part.elsewhere]
        if not mine:
            continue
        earlier = run[: run.index(mine[0])]
        cuts_first = sequence[mine[0]].scatters or not earlier or earlier[-1] not in in_shards
        for name in mine:
            split = sequence[name]
            splits[name] = split.linked(
                scatters=cuts_first if name == mine[0] else split.scatters,
                gathers=split.gathers or (name == mine[-1] and name not in in_shards),
            )
    return splits


def fake_tensor_split(fake_copy: nn.Module, table: VerifiedTable, group: dist.ProcessGroup) -> None:
    """Gives `fake_copy`, a copy on fake tensors, the shapes that this rank of `group` will see between modules.

    Sequence parallelism is left out, since sequences are gathered at the end of a stage.
    """
    silent = fake_process_group(group.rank(), group.size())
    layouts = apply_tensor_parallel(fake_copy, table.plan, silent, shared_inputs=table.shared_inputs)
    places = ParameterPlaces(fake_copy)
    for name, parameter in list(fake_copy.named_parameters()):
        shape = layouts[name].local_shape(parameter.shape, group.rank(), group.size())
        if shape != parameter.shape:
            local = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
            places.replace(parameter, like(parameter, local))
    shard_buffers(fake_copy, layouts, group.rank(), group.size())
