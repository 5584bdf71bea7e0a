"""parallelize(): a model and a Plan in, or "auto" for the best one; an Engine out.

In this order: checks, the world, initial weights, the mesh, the passes, the Engine.
"""

import logging
import sys
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from tensorshard.comm.decisions import broadcast_first, check_same
from tensorshard.comm.groups import world_group
from tensorshard.comm.refusals import report_refusals_once
from tensorshard.comm.sharded_tensors import gather_full
from tensorshard.comm.world import (
    DEFAULT_TIMEOUT,
    as_timedelta,
    default_device,
    join_world,
    ranks_here,
    under_torchrun,
    world,
    world_size,
)
from tensorshard.data_parallel.sharded_model import ShardedModel
from tensorshard.data_parallel.sharding_units import shard_units
from tensorshard.engine.combined_optimizer import class_of, members_of
from tensorshard.engine.engine import Engine, LossFunction
from tensorshard.engine.engine_random import EngineRandom, kept_random_state, share_host_random_state
from tensorshard.engine.frozen import FrozenModel
from tensorshard.engine.guards.foreign_optimizers import mark_replaced
from tensorshard.engine.guards.own_collectives import explained
from tensorshard.engine.optimizer import OptimizerFactory, check_trains
from tensorshard.engine.same_numbers import REMEDY
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
from tensorshard.random.call_sites import ModelRandomness
from tensorshard.random.plain_loop import make_trial
from tensorshard.random.trial_runs import TrialModel
from tensorshard.torch_private.tensors import gradient_hooks
from tensorshard.weights.files.pretrained_model import PretrainedModel
from tensorshard.weights.initial import Recording, TensorSource, from_meta, from_module, record

logger = logging.getLogger("tensorshard")
AUTO = "auto"
"""What to pass in place of a Plan for the best plan for this world."""
_SEARCH = "tensorshard.predict.search.find_plans"  # it stands above, builds Engines, and is imported for "auto" alone

_ParameterHook = tuple[str, str, Callable[..., Any]]
"""The name of a parameter, the method that registered a hook on it, and the hook."""


def parallelize(
    model: nn.Module | PretrainedModel | Callable[[], nn.Module],
    plan: Plan | str,
    *,
    optimizer: OptimizerFactory,
    loss_fn: LossFunction,
    seed: int = 0,
    device: torch.device | str | None = None,
    sample_inputs: Any = None,
    timeout: timedelta | float = DEFAULT_TIMEOUT,
    debug: bool = False,
    sample_targets: Any = None,
    fixed: Plan | Mapping[str, Any] | None = None,
    watchdog: bool | float = True,
    check_samples: bool = True,
) -> Engine:
    """Lays `model` out over the processes as `plan` says, and returns the :class:`Engine` that trains it.

    Under torchrun it joins torchrun's processes. Under plain ``python`` there is one process. If torchrun's processes
    end with an error of this package, rank 0 writes it, without the traceback; ``TENSORSHARD_TRACEBACK=1`` shows all.

    Args:
        model: an ``nn.Module``, one on the meta device, or a callable that returns one. A callable is best: its
            constructor runs on fake tensors, and each weight is then made by itself and cut to this rank's part. So no
            rank ever holds the whole model. :func:`tensorshard.from_pretrained` returns such a callable, whose weights
            are read from files. If a module is given, every rank gets the weights that rank 0 has.
        plan: what to do; or "auto" for the best plan for these processes (:func:`tensorshard.find_plans`). Rank 0
            searches for it in a separate process, and prints it with the reasons. See ``docs/planning.md``.
        optimizer: ``parameters -> torch.optim.Optimizer``, such as ``functools.partial(torch.optim.AdamW, lr=3e-4)``.
            It gets a list of parameters, from which it may make several groups: the fp32 master weights. Sharded ones
            are DTensors, so ``p.ndim`` and ``p.shape`` are those of the full tensor. If its argument is called
            ``named_parameters``, it gets ``(name, parameter)`` pairs. Adam and AdamW use their fused form, unless you
            pass ``fused`` or ``foreach``. A head built with ``update=`` is in a separate group (``docs/heads.md``). It
            may return a list of optimizers, or be a dict of such callables by patterns of names, or functions of name
            and parameter: the first key that matches counts. One that looks at whole tensors (Muon, say) gets those,
            each on one rank; what cannot be exact is refused (``docs/optimizers.md``).
        loss_fn: ``loss_fn(output, targets)`` returns the mean over samples as a scalar, or ``(sum, count)`` where the
            number of samples or tokens varies. Floating-point outputs reach it as fp32. :func:`tensorshard.model_loss`
            takes the loss that the model has computed. One whose first parameter is called ``model`` is called as
            ``loss_fn(model, batch)`` and may return several terms, and metrics beside them (``docs/losses.md``).
        seed: of the initial weights and of dropout. Initial weights do not depend on the plan: of a callable they are
            those of ``torch.manual_seed(seed); model()``.
        device: where this rank computes; by default the CUDA device of its local rank if there is one, else the CPU.
        sample_inputs: inputs as for :meth:`Engine.step`, of any values and sizes. The model runs on fake copies of
            them to find out where `tp` can split it and `pp` can cut it. By default they are guessed from its layers.
            For "auto", pass the inputs of one rank's batch as if all ranks were data ranks. The global batch is then
            that of all ranks, and under the plan each data rank gets ``1 / engine.mesh.dp_size`` of it.
        sample_targets: for "auto": targets of that batch, where the loss takes others than classes or values like the
            model's output.
        fixed: for "auto": a dict of the Plan's fields that you insist on, or a Plan.
        timeout: how long a rank waits for the others in a collective before it raises an error (on NCCL: before torch's
            watchdog ends the process, see ``docs/gpus.md``): a timedelta, or seconds. By default it is 5 minutes, and
            30 until the first step is over and while checkpoints are saved or read, since then one rank may work for
            long. It holds for process groups that are made here. A world that exists already keeps its own.
        debug: whether the first step also finds out if the loss compares samples with each other, and logs it. Such a
            loss depends on the number of data ranks and micro-batches. It costs two evaluations of the first batch.
            Also, every recomputed forward (`Plan.recompute`) is compared with the first one by values, in all steps.

        watchdog: whether a rank that waits in a collective asks what the others do. One that has died, is stopped, has
            failed, or makes another call than the others then ends the call within half a minute (on Gloo; on NCCL it
            is logged), and the error names it. For one that computes for long, a warning says at which line it is. A
            number: seconds, after which that ends the call, too; else that is up to `timeout`. It costs a thread, and
            no message as long as steps take less than two seconds. False turns all of it off.
        check_samples: whether the first step also looks, where the plan cuts the batch, if what the model computes for
            a sample depends on the others of its batch, which is then an error. It costs two or three forwards of one
            micro-batch.

    When this returns, the module belongs to the Engine. If it raises, the module is as it was before: parameters,
    buffers, attributes, hooks and forwards. Torch's global random state is not changed in either case.

    Raises:
        ValueError, TypeError: the plan or an argument cannot be honoured, or the model is laid out already.

    Examples:
        >>> adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
        >>> build = functools.partial(torch.nn.Linear, 16, 4)
        >>> engine = ts.parallelize(build, ts.Plan(zero=2), optimizer=adamw, loss_fn=torch.nn.functional.mse_loss)
        >>> engine.step(torch.randn(8, 16), torch.randn(8, 4)).shape
        torch.Size([])
    """
    if under_torchrun():
        report_refusals_once()
    _check_watchdog(watchdog)
    if not isinstance(plan, Plan):
        device = _check_auto(model, plan, optimizer, loss_fn, seed, device, sample_inputs)
        join_world(device, timeout=as_timedelta(timeout))
        chosen: Plan = import_module(_SEARCH).choose_plan(
            model, optimizer, loss_fn, sample_inputs, sample_targets, fixed
        )
        plan = chosen
    elif fixed is not None or sample_targets is not None:
        given = "fixed" if fixed is not None else "sample_targets"
        raise ValueError(f"{given} was given with a Plan; it is for parallelize(model, 'auto', ...)")
    engine = build_engine(
        model,
        plan,
        optimizer=optimizer,
        loss_fn=loss_fn,
        seed=seed,
        device=device,
        sample_inputs=sample_inputs,
        timeout=timeout,
        debug=debug,
        check_samples=check_samples,
        watchdog=watchdog,
    )
    script = Path(sys.argv[0]).name
    if engine.mesh.world_size == 1 and plan.zero and not under_torchrun() and script.endswith(".py"):
        _say_alone(int(plan.zero), script)
    return engine


def parallelize_frozen(
    model: nn.Module | PretrainedModel | Callable[[], nn.Module],
    plan: Plan,
    *,
    seed: int = 0,
    device: torch.device | str | None = None,
    sample_inputs: Any = None,
    timeout: timedelta | float = DEFAULT_TIMEOUT,
    watchdog: bool | float = True,
) -> FrozenModel:
    """Lays a model out that nothing trains, beside the Engines of the same processes: a teacher, a reference, a reward
    model.

    Args:
        model, seed, device, sample_inputs, timeout, watchdog: as for :func:`parallelize`. All parameters are frozen.
        plan: of this model alone: other axes than those of an Engine beside it are possible. What concerns training
            (``recompute``, ``clip_grad_norm``) has no effect. With ``pp`` batches go through in ``micro_batches``.

    Returns:
        What is called as the model is, and returns whole outputs on every rank. ``log_probs(inputs, targets)`` holds no
        logits.

    Raises:
        ValueError, TypeError: the plan or an argument cannot be honoured; the model is laid out already, or trains
            itself.

    Examples:
        >>> reference = ts.parallelize_frozen(functools.partial(torch.nn.Linear, 16, 4), ts.Plan(zero=3))
        >>> reference.log_probs(torch.randn(8, 16), torch.randint(0, 4, (8,))).shape
        torch.Size([8])
    """
    if under_torchrun():
        report_refusals_once()
    _check_watchdog(watchdog)
    engine = build_engine(
        model,
        plan,
        optimizer=partial(torch.optim.SGD, lr=0.0),
        loss_fn=_no_loss,
        seed=seed,
        device=device,
        sample_inputs=sample_inputs,
        timeout=timeout,
        watchdog=watchdog,
        frozen=True,
    )
    return FrozenModel(engine)


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
    check_samples: bool = True,
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
        source, agreed, rules, hooks = _weights_of(model, seed, restored, decisions, frozen=frozen)
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
        trial = _trial_of(source.module, plan, mesh)
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
        shares_samples = plan.random == "by_rank" and mesh.degrees["tp"] * mesh.degrees["cp"] > 1
        place = mesh.index("pp") * mesh.dp_size + mesh.dp_rank
        random = EngineRandom(seed, place, device, shares_samples=shares_samples)
        engine = Engine(
            sharded,
            plan,
            mesh,
            optimizer=optimizer,
            loss_fn=loss_fn,
            device=device,
            random=random,
            cache=cache,
            own_rules=rules,
            debug=debug,
            check_samples=check_samples,
            watchdog=watchdog,
            storage=storage,
            heap=heap,
        )
        compiled = find_blocks(source.module) if plan.compile else {}
        engine.draw_from(None if trial is None else _randomness_of(sharded, trial, random, mesh, compiled))
        check_same({"optimizers": _described_optimizer(engine.optimizer)}, mesh.world_group, "parallelize")
    _protect(engine, source, users_parameters, hooks)
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


def _trial_of(model: nn.Module, plan: Plan, mesh: Mesh) -> TrialModel | Exception | None:
    """A copy of the model before the plan is applied, for random numbers that do not depend on the plan; None for
    numbers by rank, or the reason why there can be none."""
    if plan.random != "same" or world().is_simulated:
        return None
    if mesh.degrees["tp"] > 1 and split_by_hand(model):
        return ValueError("its layers were split by hand, and each rank has a part of them")
    return make_trial(model)


def _randomness_of(
    sharded: ShardedModel, trial: TrialModel | Exception, random: EngineRandom, mesh: Mesh, compiled: Collection[str]
) -> ModelRandomness:
    stages = getattr(sharded, "stages", ())
    modules = [named for stage in stages for named in stage.module.named_modules() if named[0] not in stage.elsewhere]
    modules = modules or list(sharded.model.named_modules())
    part = mesh.index("tp"), mesh.degrees["tp"]
    # Under cp, tensor-parallel ranks share each rank's positions, not those of the whole sequence.
    table = getattr(sharded.split, "table", None)
    sequences = list(getattr(table, "sequence", {}).values())  # none where layers were split by hand
    numbers = ModelRandomness(
        lambda: random.seed,
        trial,
        modules,
        remedy=REMEDY,
        part=part,
        compiled=compiled,
        undivided={(split.ndim, split.dim) for split in sequences} if mesh.degrees["cp"] > 1 else (),
        sequences={split.dim for split in sequences},
    )
    for stage in stages[:1]:
        stage.take_numbers(numbers)
    return numbers


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


def _protect(
    engine: Engine, source: TensorSource, users_parameters: list[nn.Parameter], hooks: list[_ParameterHook]
) -> None:
    """From now on, what is read or written in ways that would mislead says so; and hooks of parameters are called."""
    sharded = engine.sharded
    for view in sharded.whole_views:
        view.begin(engine.optimizer, sharded.masters())
    sharded.protect()
    share_host_random_state(engine.mesh)
    mark_parallelized([source.module, sharded.model], "tensorshard.parallelize")
    refuse_other_uses(sharded.model, engine.plan)
    mark_replaced(users_parameters)
    refuse_old_parameters(source)
    shown = sharded.shown_parameters()
    for name, method, hook in hooks:
        if name in shown:
            getattr(shown[name], method)(hook)


def _weights_of(
    model: nn.Module | PretrainedModel | Callable[[], nn.Module],
    seed: int,
    restored: RestoreOnError,
    decisions: Decisions | None,
    *,
    frozen: bool,
) -> tuple[TensorSource, bool, list[OwnRule], list[_ParameterHook]]:
    """Where the initial weights come from; whether they are the same on every rank by construction; the rules of
    modules that train themselves, whose own updates are switched off; and hooks of parameters."""
    if not isinstance(model, nn.Module):
        if decisions is not None and decisions.recorded is not None:
            again = decisions.recorded[0].again()
            if again is not None:
                return again, True, list(decisions.recorded[1]), []  # an estimate runs no hooks
        rules: list[OwnRule] = []
        hooks: list[_ParameterHook] = []
        is_the_users = False

        def build() -> nn.Module:
            nonlocal is_the_users
            built = model.build() if isinstance(model, PretrainedModel) else model()
            if isinstance(built, nn.Module):
                if not is_just_built(built):
                    is_the_users = True
                    restored.note(built)
                    check_not_parallelized(built)
                rules[:], hooks[:] = take_own_rules(built), _parameter_hooks(built)
                hold_as_bytes(built, frozen=frozen)
            return built

        source = record(build, seed=seed)
        if decisions is not None and isinstance(source, Recording) and not is_the_users:
            again = source.again()
            if again is not None:
                decisions.recorded = again, list(rules)
        return source, True, rules, hooks
    rules, hooks = take_own_rules(model), _parameter_hooks(model)
    if any(parameter.is_meta for parameter in model.parameters()):
        return from_meta(model, seed=seed), True, rules, hooks
    return from_module(model), False, rules, hooks


def _parameter_hooks(model: nn.Module) -> list[_ParameterHook]:
    return [(name, *hook) for name, parameter in model.named_parameters() for hook in gradient_hooks(parameter)]


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


def _no_loss(output: Any, targets: Any) -> NoReturn:
    raise RuntimeError("a frozen model has no loss")


def _check_watchdog(watchdog: Any) -> None:
    if isinstance(watchdog, bool):
        return
    if not isinstance(watchdog, int | float):
        raise TypeError(f"watchdog={watchdog!r} was given; it must be True, False or a number of seconds")
    if not watchdog > 0:
        raise ValueError(f"watchdog={watchdog!r} was given; it must be more than 0 seconds, or False for none")


@cache
def _say_alone(zero: int, script: str) -> None:
    """Once a process."""
    logger.warning(
        "one process trains the whole model, of which zero=%d shards nothing; with N processes: "
        "torchrun --nproc-per-node N %s",
        zero,
        script,
    )


def _check_auto(
    model: Any, plan: Any, optimizer: Any, loss_fn: Any, seed: Any, device: torch.device | str | None, inputs: Any
) -> torch.device:
    """Refuses arguments for which no plan can be chosen, before a world is joined; returns the device."""
    if plan != AUTO:
        check_arguments(model, plan if not isinstance(plan, str) else Plan(), optimizer, loss_fn, seed)
        raise ValueError(f"plan is {plan!r}; it must be a tensorshard.Plan, or 'auto' for the best one for this world")
    check_arguments(model, Plan(), optimizer, loss_fn, seed)
    if inputs is None:
        raise ValueError(
            "plan 'auto' was asked for without sample_inputs; give the inputs of one batch, as Engine.step is given "
            "them: plans are compared on their sizes"
        )
    return default_device() if device is None else as_device(device)
