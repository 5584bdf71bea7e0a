"""Builds an Engine from a model and a Plan: checks, world, initial weights, mesh, passes, Engine."""

import logging
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from tensorshard.comm.decisions import broadcast_first, check_same
from tensorshard.comm.groups import world_group
from tensorshard.comm.sharded_tensors import gather_full
from tensorshard.comm.world import (
    DEFAULT_TIMEOUT,
    as_timedelta,
    default_device,
    join_world,
    ranks_here,
    world,
    world_size,
)
from tensorshard.data_parallel.fully_sharded import shard_units
from tensorshard.data_parallel.sharded_model import ShardedModel
from tensorshard.engine.combined_optimizer import class_of, members_of
from tensorshard.engine.engine import Engine, LossFunction
from tensorshard.engine.guards.foreign_optimizers import mark_replaced
from tensorshard.engine.guards.own_collectives import explained
from tensorshard.engine.optimizer import OptimizerFactory, check_trains
from tensorshard.engine.random_streams import RandomStreams, kept_random_state, share_host_random_state
from tensorshard.host.process_settings import HostHeap, schedule_as_batch
from tensorshard.layers.parallel_module import ParallelModule
from tensorshard.model.blocks import find_blocks
from tensorshard.model.quantized import hold_as_bytes
from tensorshard.model.trains_itself import OwnRule, own_rules, take_own_rules
from tensorshard.model.transformers_settings import GenerationCache
from tensorshard.model.whole_sequences import PositionOrder
from tensorshard.parallelize.checks import as_device, check_arguments, check_model, check_stages, split_by_hand
from tensorshard.parallelize.parallelized_models import (
    check_not_parallelized,
    mark_parallelized,
    refuse_old_parameters,
    refuse_other_uses,
)
from tensorshard.parallelize.part import Decisions, Part, PassContext
from tensorshard.parallelize.passes import apply_passes
from tensorshard.parallelize.restore_on_error import RestoreOnError, is_just_built
from tensorshard.passes.precision import check_supported
from tensorshard.passes.recompute import always_compare
from tensorshard.plan.mesh import Mesh
from tensorshard.plan.plan import Plan
from tensorshard.plan.storage import DeviceStorage, Storage
from tensorshard.weights.files.pretrained_model import PretrainedModel
from tensorshard.weights.initial import Recording, TensorSource, from_meta, from_module, record

logger = logging.getLogger("tensorshard")


def build_engine(
    model: nn.Module | PretrainedModel | Callable[[], nn.Module],
    plan: Plan,
    *,
    optimizer: OptimizerFactory,
    loss_fn: LossFunction,
    seed: int = 0,
    device: torch.device | str | None = None,
    sample_inputs: Any = None,
    timeout: timedelta | float = DEFAULT_TIMEOUT,
    debug: bool = False,
    watchdog: bool | float = True,
    decisions: Decisions | None = None,
    off_device: bool | None = None,
    frozen: bool = False,
) -> Engine:
    """What :func:`tensorshard.parallelize` does with a Plan.

    Args:
        frozen: whether no parameter is trained.
        decisions: decisions of another rank of this plan and model, which this process tried before; None to decide.
        off_device: whether offloaded values leave the device's memory for the host's; None to ask the device.

    Raises:
        ValueError, TypeError: as for :func:`tensorshard.parallelize`.
    """
    check_arguments(model, plan, optimizer, loss_fn, seed)
    device = default_device() if device is None else as_device(device)
    plan = plan.resolve(world_size())
    check_stages(loss_fn, plan)
    check_supported(plan.precision, device)
    patience = as_timedelta(timeout)
    # Parallel layers that were built by hand know their parts only if their parameters have values.
    built = isinstance(model, nn.Module) and not any(parameter.is_meta for parameter in model.parameters())
    users_parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
    with RestoreOnError() as restored, kept_random_state(device):
        if isinstance(model, nn.Module):
            restored.note(model)
            hold_as_bytes(model, frozen=frozen)
            check_model(model, plan, split="tp" if built else "refused", frozen=frozen)
            _check_rules(model, own_rules(model), optimizer)
        join_world(device, timeout=patience)
        source, agreed, rules = _weights_of(model, seed, restored, decisions, frozen=frozen)
        if frozen:
            source.module.requires_grad_(False)
        with explained("parallelize"):
            check_same(_described(plan, seed, source.module), world_group(), "parallelize")
        if isinstance(model, PretrainedModel):
            source = model.source(source, world_group())
        if not isinstance(model, nn.Module):
            check_model(source.module, plan, frozen=frozen)
            _check_rules(source.module, rules, optimizer)
        mesh = Mesh(plan, device.type, timeout=patience)
        heap = _host_heap(plan, mesh) if device.type == "cpu" and not world().is_simulated else None
        storage = open_storage(plan, mesh, device, off_device=off_device)
        broadcast = not agreed and mesh.world_size > 1
        cache = GenerationCache(source.module)
        with cache.off():
            sharded = shard_model(
                source,
                plan,
                mesh,
                device,
                broadcast=broadcast,
                sample_inputs=sample_inputs,
                storage=storage,
                decisions=decisions,
            )
        if debug:
            always_compare(sharded.model)
        # Dropout differs between data ranks and between pipeline ranks, and is repeatable.
        random = RandomStreams(seed * 1_000_003 + mesh.index("pp") * mesh.dp_size + mesh.dp_rank, device)
        engine = Engine(
            sharded,
            plan,
            mesh,
            optimizer=optimizer,
            loss_fn=loss_fn,
            device=device,
            seed=seed,
            random=random,
            cache=cache,
            own_rules=rules,
            debug=debug,
            watchdog=watchdog,
            storage=storage,
            heap=heap,
        )
        check_same({"optimizers": _described_optimizer(engine.optimizer)}, mesh.world_group, "parallelize")
    _protect(engine, source, users_parameters)
    if mesh.rank == 0:
        for rule in rules:
            rule.log()
        if cache.is_on():
            logger.warning(
                "config.use_cache is off within step and evaluate: training needs no cache of keys and values"
            )
    return engine


def open_storage(plan: Plan, mesh: Mesh, device: torch.device, *, off_device: bool | None = None) -> Storage:
    """Where this rank's states, parameters and activations go. A collective of the mesh, if the plan offloads.

    Args:
        off_device: whether offloaded values leave the device's memory for the host's; None to ask the device.

    Raises:
        ValueError: the folder cannot hold a scratch file, or `device` cannot offload under this plan.
    """
    if plan.offloaded is None:
        return DeviceStorage()
    from tensorshard.offload.tiered_storage import open_tiers

    return open_tiers(plan, plan.offloaded, mesh, device, off_device=off_device)


def shard_model(
    source: TensorSource,
    plan: Plan,
    mesh: Mesh,
    device: torch.device,
    *,
    broadcast: bool,
    sample_inputs: Any = None,
    storage: Storage,
    decisions: Decisions | None = None,
) -> ShardedModel:
    """The source's model, sharded over `mesh` as `plan` says, with its values on `device`.

    Args:
        broadcast: whether all ranks take the values of the mesh's first rank, because their own may differ.
        sample_inputs: inputs on which the model is run to find out how it can be split and cut; None to guess them.
        storage: where values are kept.
        decisions: decisions of another rank of this plan, to use again; None to decide.
    """
    model = source.module
    decisions = Decisions() if decisions is None else decisions
    by_hand = split_by_hand(model) if mesh.degrees["tp"] > 1 else {}
    if plan.ep > 1 and plan.ep not in decisions.experts:
        from tensorshard.parallelize.split_experts import choose_experts

        decisions.experts[plan.ep] = choose_experts(model, mesh, plan.ep)
    experts = decisions.experts.get(plan.ep, {})
    if mesh.degrees["tp"] > 1 and decisions.table is None and not by_hand:
        from tensorshard.parallelize.split_tensors import choose_table

        decisions.table = choose_table(source, plan, mesh, sample_inputs, experts=experts)
    gathered_operations: Collection[tuple[str, str]] = ()
    if mesh.degrees["cp"] > 1 and not world().is_simulated:
        from tensorshard.parallelize.check_sequences import check_sequences

        gathered_operations = check_sequences(source, plan, mesh, sample_inputs).gathered.keys()
    context = PassContext(
        plan,
        mesh,
        device,
        decisions.table,
        by_hand,
        experts,
        storage=storage,
        parameters=decisions.parameters,
        order=PositionOrder(plan.cp_order, in_stages=plan.pp > 1),
        gathered_operations=gathered_operations,
    )
    if mesh.degrees["pp"] > 1:
        from tensorshard.parallelize.stages import shard_stages

        return shard_stages(source, decisions, context, broadcast=broadcast, sample_inputs=sample_inputs)

    def value_of(name: str) -> torch.Tensor:
        value = gather_full(source.tensor(name).to(device), by_hand.get(name))
        return broadcast_first(value, mesh.world_group) if broadcast else value

    part = Part(
        model,
        value_of,
        blocks=list(dict.fromkeys(find_blocks(model).values())) or [model],  # a model without blocks is one
        units=shard_units(model, plan.shard_units),
        computed=dict(model.named_modules()),
        full_model=model,
    )
    return apply_passes(part, context)


def _host_heap(plan: Plan, mesh: Mesh) -> HostHeap:
    """The heap of a rank that computes on the host, which shares its cores with others."""
    if mesh.world_size > 1:
        schedule_as_batch()
    return HostHeap(
        ranks_here(),
        spares_memory=plan.spares_memory,
        keeps_nothing=plan.offloads_parameters,
        say=mesh.rank == 0,
    )


def _protect(engine: Engine, source: TensorSource, users_parameters: list[nn.Parameter]) -> None:
    """From now on, what is read or written in ways that would mislead says so."""
    sharded = engine.sharded
    for view in sharded.whole_views:
        view.begin(engine.optimizer)
    sharded.protect()
    share_host_random_state(engine.mesh)
    mark_parallelized([source.module, sharded.model], "tensorshard.parallelize")
    refuse_other_uses(sharded.model, engine.plan)
    mark_replaced(users_parameters)
    refuse_old_parameters(source)


def _weights_of(
    model: nn.Module | PretrainedModel | Callable[[], nn.Module],
    seed: int,
    restored: RestoreOnError,
    decisions: Decisions | None,
    *,
    frozen: bool,
) -> tuple[TensorSource, bool, list[OwnRule]]:
    """Where the initial weights come from; whether they are the same on every rank by construction; and the rules of
    modules that train themselves, whose own updates are switched off."""
    if not isinstance(model, nn.Module):
        if decisions is not None and decisions.recorded is not None:
            again = decisions.recorded[0].again()
            if again is not None:
                return again, True, list(decisions.recorded[1])
        rules: list[OwnRule] = []
        is_the_users = False

        def build() -> nn.Module:
            nonlocal is_the_users
            built = model.build() if isinstance(model, PretrainedModel) else model()
            if isinstance(built, nn.Module):
                if not is_just_built(built):
                    is_the_users = True
                    restored.note(built)
                    check_not_parallelized(built)
                rules[:] = take_own_rules(built)
                hold_as_bytes(built, frozen=frozen)
            return built

        source = record(build, seed=seed)
        if decisions is not None and isinstance(source, Recording) and not is_the_users:
            again = source.again()
            if again is not None:
                decisions.recorded = again, list(rules)
        return source, True, rules
    rules = take_own_rules(model)
    if any(parameter.is_meta for parameter in model.parameters()):
        return from_meta(model, seed=seed), True, rules
    return from_module(model), False, rules


def _check_rules(model: nn.Module, rules: list[OwnRule], optimizer: OptimizerFactory) -> None:
    for rule in rules:
        rule.check(model)
    check_trains(optimizer, model, rules)


def _described(plan: Plan, seed: int, model: nn.Module) -> dict[str, dict[str, Any]]:
    """What must be the same on every rank, for a comparison before any group is made. If layers are split by hand, the
    last rank's shard may be smaller."""
    split = tuple(
        f"{name}." if name else ""
        for name, module in model.named_modules()
        if isinstance(module, ParallelModule) and module.dim is not None
    )
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors = {name: tensor for name, tensor in named.items() if not (split and name.startswith(split))}
    return {
        "plans": plan.to_dict(),
        "seeds": {"seed": seed},
        "models": {
            "its class": type(model).__name__,
            **{name: f"{t.dtype} of shape {tuple(t.shape)}" for name, t in tensors.items()},
        },
    }


def _described_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    members = members_of(optimizer)
    described: dict[str, Any] = {"its class": class_of(optimizer)}
    for place, member in enumerate(members):
        number = f"{type(member).__name__} {place + 1}: " if len(members) > 1 else ""
        plain = {k: v for k, v in member.defaults.items() if isinstance(v, bool | int | float | str | tuple | None)}
        described.update({number + key: value for key, value in plain.items()})
    return described
