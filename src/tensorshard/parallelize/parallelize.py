"""parallelize(): a model and a Plan in, or "auto" for the best one; an Engine out."""

import logging
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from tensorshard.comm.refusals import report_refusals_once
from tensorshard.comm.world import DEFAULT_TIMEOUT, as_timedelta, default_device, join_world, under_torchrun
from tensorshard.engine.engine import Engine, LossFunction
from tensorshard.engine.frozen import FrozenModel
from tensorshard.engine.optimizer import OptimizerFactory
from tensorshard.parallelize.build import build_engine
from tensorshard.parallelize.checks import as_device, check_arguments
from tensorshard.plan.plan import Plan
from tensorshard.weights.files.pretrained_model import PretrainedModel

logger = logging.getLogger("tensorshard")

AUTO = "auto"
"""What to pass in place of a Plan for the best plan for this world."""


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
        from tensorshard.predict.search.find_plans import choose_plan  # this imports all of the estimates

        plan = choose_plan(model, optimizer, loss_fn, sample_inputs, sample_targets, fixed)
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
