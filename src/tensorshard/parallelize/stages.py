"""Cuts a model into the stages of a pipeline. Each of a rank's stages goes through the passes as a full model does."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tensorshard.comm.decisions import broadcast_first, decide_once
from tensorshard.common.words import is_inside
from tensorshard.data_parallel.sharding_units import stage_shard_units
from tensorshard.model.blocks import find_blocks, select_modules
from tensorshard.model.fake_copies import copy_with
from tensorshard.model.model_errors import raised_by_model
from tensorshard.model.parameters import ParameterPlaces, like
from tensorshard.model.sample_inputs import example_inputs
from tensorshard.parallelize.part import Decisions, Part, PassContext, Traced
from tensorshard.parallelize.passes import apply_passes
from tensorshard.parallelize.split_tensors import fake_tensor_split
from tensorshard.passes.precision import autocast, compute_dtype, give_one_type, keep_norms_fp32, master_dtype
from tensorshard.pipeline.cut import Cut, cut_model
from tensorshard.pipeline.run.cut_cache import CutCache, input_signature
from tensorshard.pipeline.run.pipelined_model import PipelinedModel
from tensorshard.pipeline.run.stage_module import StageModule
from tensorshard.pipeline.trace.call_graph import CallGraph
from tensorshard.pipeline.trace.traced_run import UncuttableError
from tensorshard.pipeline.trace.tracer import Tracer
from tensorshard.plan.mesh import Mesh
from tensorshard.plan.plan import Plan
from tensorshard.weights.initial import TensorSource

logger = logging.getLogger("tensorshard")

_REMEDY = (
    "give parallelize(sample_inputs=...), inputs as for Engine.step, of any values and any sizes that the model takes"
)


def shard_stages(
    source: TensorSource, decisions: Decisions, context: PassContext, *, broadcast: bool, sample_inputs: Any
) -> PipelinedModel:
    """This rank's stages of the source's model, each sharded as `context` says.

    Args:
        decisions: the table of tensor parallelism, and the model's cut if another rank has decided it.
        broadcast, sample_inputs: as for :func:`tensorshard.parallelize.build.shard_model`.

    Raises:
        ValueError: the model cannot be cut; the error says where and why.
    """
    model, mesh = source.module, context.mesh
    if decisions.shapes is None:
        decisions.shapes = _cut(source, decisions, context, sample_inputs)
    shapes = decisions.shapes
    stages = [StageModule(model, shapes, index) for index in mesh.stages]
    value_of = _values(source, stages, mesh, context.device, broadcast=broadcast)
    parts = [apply_passes(_part_of(stage, model, value_of, context.plan), context) for stage in stages]
    for stage, part in zip(stages, parts, strict=True):
        stage.sequences = part.sequences
    return PipelinedModel(model, stages, parts, mesh)


def _part_of(stage: StageModule, model: nn.Module, value_of: Callable[[str], torch.Tensor], plan: Plan) -> Part:
    names = (name for name in find_blocks(model) if is_inside(name, stage.units))
    blocks = list(dict.fromkeys(map(stage.module.get_submodule, names)))  # one may have several names
    computed = {inner for unit in stage.units.values() for inner in unit.modules()}
    return Part(
        stage.module,
        value_of,
        blocks=blocks,
        units=stage_shard_units(model, stage.module, plan.shard_units, blocks=blocks, units=stage.units),
        computed={name: module for name, module in stage.module.named_modules() if module in computed},
        full_model=model,
        elsewhere=stage.elsewhere,
        calls=tuple(call.unit for call in stage.cut.graph.calls),
        returns_output=stage.is_last,
    )


def _cut(source: TensorSource, decisions: Decisions, context: PassContext, sample_inputs: Any) -> CutCache:
    """Where the model is cut into stages, and what crosses the cuts."""
    plan, mesh = context.plan, context.mesh
    tracer, graph, graphs, _ = _traced(source, decisions, context, sample_inputs)
    if plan.micro_batches > 1 and graph.trained_writes:
        call, what = min(graph.trained_writes.items())
        raise UncuttableError(
            f"the forward of {graph.calls[call].unit!r} changes its parameter {what} in place. A pipeline runs "
            f"forwards of several micro-batches before their backwards, which need the value from before. Change it "
            f"between the calls of engine.step instead, or use Plan(micro_batches=1)"
        )
    count = mesh.degrees["pp"] * mesh.stages_per_rank
    # Ranks may have parts of different sizes. They must all use the same cut.
    positions = decide_once(lambda: cut_model(graph, count, split=plan.pp_split).positions, mesh.world_group)
    return CutCache(tracer, Cut(graph, positions), graphs if decisions.traced is not None else None)


def key_of_run(plan: Plan, tp_index: int, sample_inputs: Any) -> Any:
    """Where :class:`Decisions` keep the run from which a rank with this place along tp cuts the model."""
    units = None if plan.pp_units is None else tuple(plan.pp_units)
    return plan.tp, plan.sequence_parallel, tp_index, plan.precision, units, input_signature(sample_inputs)


def _traced(source: TensorSource, decisions: Decisions, context: PassContext, sample_inputs: Any) -> Traced:
    """The model's run, or the run of an earlier plan if the model runs the same under both."""
    plan = context.plan
    key = key_of_run(plan, context.mesh.index("tp"), sample_inputs)
    known = None if decisions.traced is None else decisions.traced.get(key)
    if known is not None and known.table is context.table:
        return known
    tracer = _tracer(source, context)
    with autocast(plan.precision, context.device):
        graph = _trace(tracer, source.module, sample_inputs)
    if context.mesh.rank == 0:
        for name, reason in tracer.joined.items():
            logger.warning("one stage computes the whole of %r, and stages may be uneven, since %s", name, reason)
    traced = Traced(tracer, graph, {}, context.table)
    if decisions.traced is not None:
        decisions.traced[key] = traced
    return traced


def _tracer(source: TensorSource, context: PassContext) -> Tracer:
    """Runs the model on fake tensors as this rank will: in its precision, with its part of split layers."""
    plan = context.plan

    def prepare(fake_copy: nn.Module) -> None:
        places = ParameterPlaces(fake_copy)
        for parameter in list(fake_copy.parameters()):
            dtype = compute_dtype(master_dtype(parameter.dtype), plan.precision)
            if dtype != parameter.dtype:
                places.replace(parameter, like(parameter, parameter.detach().to(dtype)))
        if plan.precision != "fp32":
            keep_norms_fp32(fake_copy.modules())
            give_one_type(fake_copy.modules())
        if context.table is not None:
            fake_tensor_split(fake_copy, context.table, context.mesh.group("tp"))

    # A model may decide by the values of its buffers what to run, but not by its parameters. So buffers have values.
    with_buffers = copy_with(
        source.module, lambda name, tensor: tensor if isinstance(tensor, nn.Parameter) else source.tensor(name)
    )
    units = None if plan.pp_units is None else _units(with_buffers, plan.pp_units)
    return Tracer(with_buffers, units=units, device=context.device, prepare=prepare, same_numbers=plan.random == "same")


def _units(model: nn.Module, named: list[str]) -> list[str]:
    """The `named` modules, and the model's blocks, except for blocks that contain a named module."""
    chosen = list(select_modules(model, named))
    blocks = [block for block in find_blocks(model) if not any(name.startswith(f"{block}.") for name in chosen)]
    return [*chosen, *blocks]


def _trace(tracer: Tracer, model: nn.Module, sample_inputs: Any) -> CallGraph:
    if sample_inputs is not None:
        return tracer.trace(sample_inputs)
    error: Exception | None = None
    for candidate in example_inputs(model):
        try:
            return tracer.trace(candidate)
        except UncuttableError:
            raise
        except Exception as caught:  # a model may raise anything for guessed inputs
            if not raised_by_model(caught):
                raise
            error = error or caught
    name = type(model).__name__
    if error is None:
        raise ValueError(f"no inputs could be guessed to find out where {name} can be cut into stages; {_REMEDY}")
    raise ValueError(
        f"{name} could not be run on guessed inputs to find out where it can be cut into stages, "
        f"{type(error).__name__}: {error}; {_REMEDY}"
    ) from error


def _values(
    source: TensorSource, stages: list[StageModule], mesh: Mesh, device: torch.device, *, broadcast: bool
) -> Callable[[str], torch.Tensor]:
    """Returns the function that gives the values of this rank's stages, by name."""
    # If a rank has several stages, each changes its own copy of a buffer.
    copied = {name for name, _ in source.module.named_buffers()} if len(stages) > 1 else set()
    if not broadcast:
        return lambda name: source.tensor(name).to(device, copy=name in copied)
    mine = {name for stage in stages for name, _ in stage.module.named_parameters()}
    mine |= {name for stage in stages for name, _ in stage.module.named_buffers()}
    received: dict[str, torch.Tensor] = {}
    # Every stage gets the first rank's values. The broadcast of each value takes all ranks, whatever stage it is for.
    model = source.module
    for name in [*dict(model.named_parameters()), *dict(model.named_buffers())]:
        value = broadcast_first(source.tensor(name).to(device), mesh.world_group)
        if name in mine:
            received[name] = value.cpu()
    return lambda name: received[name].to(device, copy=name in copied)
