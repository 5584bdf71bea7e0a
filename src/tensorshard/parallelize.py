"""parallelize(): a model and a Plan in, or "auto" for the best one; an Engine out."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from tensorshard.arguments import as_device, check_arguments
from tensorshard.comm.world import DEFAULT_TIMEOUT, as_timedelta, default_device, join_world
from tensorshard.engine.engine import Engine, LossFunction
from tensorshard.engine.optimizer import OptimizerFactory
from tensorshard.lay_out_engine import lay_out_engine
from tensorshard.plan import Plan
from tensorshard.pretrained.pretrained_model import PretrainedModel

AUTO = "auto"
"""In place of a Plan: the best one for this world."""


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
) -> Engine:
    """Lays `model` out over the world as `plan` says.

    Under torchrun this joins that world; under plain ``python`` it is a world of one.

    Args:
        model: an ``nn.Module``, one on the meta device, or a callable that returns one. A callable is best: its
            constructor runs on fake tensors, and each weight is then made alone and cut to this rank's part, so that no
            rank ever holds the whole model. :func:`tensorshard.from_pretrained` is one whose weights are read from
            files. A module's own weights are those of rank 0 on every rank.
        plan: what to do; or "auto" for the best plan for this world (:func:`tensorshard.find_plans`), which rank 0
            looks for in a process of its own, and prints with its reasons. ``docs/planning.md`` says more.
        optimizer: ``parameters -> torch.optim.Optimizer``, such as ``functools.partial(torch.optim.AdamW, lr=3e-4)``.
            It is given a list of parameters (fp32 masters, sharded ones as DTensors, so that ``p.ndim`` and
            ``p.shape`` are those of the whole), from which it may make several groups; one whose argument is called
            ``named_parameters`` is given ``(name, parameter)`` pairs. Of Adam and AdamW the fused form is used if the
            choice was left open. A head built with ``update=`` is in a group of its own (``docs/heads.md``).
        loss_fn: ``loss_fn(output, targets)`` -> the mean over samples as a scalar, or ``(sum, count)`` where samples or
            tokens vary. Floating-point outputs reach it as fp32.
        seed: of the initial weights and of dropout. Weights do not depend on the plan.
        device: of this rank; the CUDA device of its local rank if there is one, else the CPU.
        sample_inputs: inputs as for :meth:`Engine.step`, of any values and sizes, on which the model is run on fake
            tensors to find out where `tp` can split and `pp` cut it. By default they are guessed from its layers. For
            "auto", the inputs of one rank's batch if all ranks were data ranks: the global batch is as large as those
            of all, and under the plan each data rank has ``1 / engine.mesh.dp_size`` of it.
        timeout: how long a rank waits for the others in a collective, before it says which: a timedelta, or seconds.
            It is that of the process groups that are made here; a world that exists already keeps its own.
        debug: whether the first step also finds out if the loss couples samples, and says so in the log. A loss that
            does depends on the number of data ranks and micro-batches. It costs two evaluations of the first batch.

    The module becomes the Engine's when this returns. Whatever is raised instead, it is as it was before: parameters,
    buffers, attributes, hooks and forwards. Torch's global random state is left alone either way.

    Raises:
        ValueError, TypeError: the plan or an argument cannot be honoured, or the model is laid out already.
    """
    if not isinstance(plan, Plan):
        device = _check_auto(model, plan, optimizer, loss_fn, seed, device, sample_inputs)
        join_world(device, timeout=as_timedelta(timeout))
        from tensorshard.planner.choose_plan import choose_plan  # which brings all of the estimates

        plan = choose_plan(model, optimizer, loss_fn, sample_inputs, sample_targets, fixed)
    elif fixed is not None or sample_targets is not None:
        given = "fixed" if fixed is not None else "sample_targets"
        raise ValueError(f"{given} was given with a Plan; it is for parallelize(model, 'auto', ...)")
    return lay_out_engine(
        model,
        plan,
        optimizer=optimizer,
        loss_fn=loss_fn,
        seed=seed,
        device=device,
        sample_inputs=sample_inputs,
        timeout=timeout,
        debug=debug,
    )


def _check_auto(
    model: Any, plan: Any, optimizer: Any, loss_fn: Any, seed: Any, device: torch.device | str | None, inputs: Any
) -> torch.device:
    """Refuses what no plan can be chosen for, before a world is joined; returns the device."""
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
