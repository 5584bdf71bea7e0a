"""Paddle's ``fleet`` on the Engine: ``from tensorshard.compat import fleet`` in place of paddle.distributed's.

``fleet.init(strategy=...)``, ``fleet.distributed_model(model)`` and ``fleet.distributed_optimizer(optimizer)``, in
either order, around a module and an optimizer of torch. The loop stays: ``loss.backward()``, ``optimizer.step()``,
``optimizer.clear_grad()``. :mod:`tensorshard.compat.group_sharded` has Paddle's two calls for ZeRO alone.
"""

import difflib
from collections.abc import Callable
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import nn

from tensorshard.comm.groups import world_group
from tensorshard.comm.world import default_device, join_world, world_size
from tensorshard.common.words import kind_of
from tensorshard.compat.taken_over import rebuilt
from tensorshard.engine.engine import Engine
from tensorshard.engine.guards.foreign_optimizers import mark_wrapper
from tensorshard.engine.loss import model_loss
from tensorshard.parallelize.build import parallelize
from tensorshard.plan.plan import Plan

__all__ = [
    "DistributedStrategy",
    "distributed_model",
    "distributed_optimizer",
    "distributed_scaler",
    "engine",
    "init",
    "is_first_worker",
    "worker_index",
    "worker_num",
]

_DEFAULTS: dict[str, Any] = {
    "hybrid_configs": {},
    "amp": False,
    "amp_configs": {},
    "recompute": False,
    "recompute_configs": {},
    "sharding": False,
    "sharding_configs": {},
    "pipeline": False,
    "pipeline_configs": {},
    "tensor_parallel": False,
    "tensor_parallel_configs": {},
    # Paddle's own way of working, which decides nothing that is computed.
    "find_unused_parameters": False,
    "fuse_all_reduce_ops": True,
    "fuse_grad_size_in_MB": 32,
    "fuse_grad_size_in_num": 8,
    "last_comm_group_size_MB": 1,
    "nccl_comm_num": 1,
    "use_hierarchical_allreduce": False,
    "sync_nccl_allreduce": True,
    "cudnn_exhaustive_search": False,
    "cudnn_batchnorm_spatial_persistent": False,
    "conv_workspace_size_limit": 512,
    "without_graph_optimization": True,
}
_REFUSED = {
    "gradient_merge": "divide the loss by k_steps, and call optimizer.step() and clear_grad() every k_steps batches",
    "gradient_merge_configs": "divide the loss by k_steps, and call optimizer.step() every k_steps batches",
    "lamb": "build the optimizer that you want, of torch.optim or a class of your own",
    "lars": "build the optimizer that you want, of torch.optim or a class of your own",
    "dgc": "gradients are sent whole",
    "localsgd": "gradients are averaged in every step",
    "adaptive_localsgd": "gradients are averaged in every step",
    "fp16_allreduce": "Plan(reduce_dtype='bf16') sums gradients in 16 bits",
    "sync_batch_norm": "Plan(batch_norm=...) says how statistics are made",
    "a_sync": "there are no parameter servers",
    "auto": "tensorshard.parallelize(model, 'auto', ...) finds a plan",
    "semi_auto": "tensorshard.parallelize(model, 'auto', ...) finds a plan",
    "asp": "weights are not pruned in training",
    "qat": "weights are not quantized in training",
}
_DEGREES = {"dp_degree": -1, "mp_degree": 1, "pp_degree": 1, "sharding_degree": 1, "sep_degree": 1}
_IN_HYBRID = ("order", "mp_configs", "pp_configs", "dp_comm_configs", "cp_comm_configs", "sharding_configs")


class DistributedStrategy:
    """Paddle's strategy: its fields by their names. What cannot be honoured is refused when it is set.

    Raises:
        AttributeError: a name that Paddle does not have; names the nearest.
        NotImplementedError: a field that is not there, with what to do instead.
    """

    def __init__(self) -> None:
        for name, value in _DEFAULTS.items():
            vars(self)[name] = dict(value) if isinstance(value, dict) else value

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _REFUSED:
            if value:
                raise NotImplementedError(f"DistributedStrategy.{name}={value!r} is not there: {_REFUSED[name]}")
        elif name not in _DEFAULTS:
            near = difflib.get_close_matches(name, [*_DEFAULTS, *_REFUSED], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise AttributeError(f"DistributedStrategy has no {name!r}{hint}")
        elif isinstance(_DEFAULTS[name], dict):
            if not isinstance(value, dict):
                raise TypeError(f"DistributedStrategy.{name} is {kind_of(value)}; it must be a dict")
            vars(self)[name] = {**vars(self)[name], **value}
        else:
            vars(self)[name] = value

    def plan(self, processes: int) -> Plan:
        """The Plan that says the same for `processes`, with its ledger.

        Raises:
            ValueError: a degree, a level or a key that nobody knows.
        """
        fields = vars(self)
        hybrid, sharding, pipeline = fields["hybrid_configs"], fields["sharding_configs"], fields["pipeline_configs"]
        _check_keys("hybrid_configs", hybrid, [*_DEGREES, *_IN_HYBRID])
        stage = sharding.get(
            "stage", sharding.get("sharding_stage", hybrid.get("sharding_configs", {}).get("stage", 1))
        )
        degrees = {name: int(hybrid.get(name, default)) for name, default in _DEGREES.items()}
        if fields["sharding"] and "sharding_degree" in sharding:
            degrees["sharding_degree"] = int(sharding["sharding_degree"])
        shards = degrees.pop("sharding_degree")
        pp_configs = hybrid.get("pp_configs", {})
        config: dict[str, Any] = {"Distributed": dict(degrees), "Engine": {}, "Model": {}}
        config["Distributed"]["sharding"] = {"sharding_degree": shards, "sharding_stage": int(stage)}
        if shards == 1:
            config["Distributed"].pop("sharding")
        parts = pipeline.get("accumulate_steps", pp_configs.get("accumulate_steps"))
        if parts is not None and degrees["pp_degree"] > 1:
            config["Engine"]["accumulate_steps"] = int(parts)
        if fields["amp"]:
            amp = fields["amp_configs"]
            narrow = "bfloat16" if amp.get("use_pure_bf16") or amp.get("dtype") == "bfloat16" else "float16"
            config["Engine"]["mix_precision"] = {"enable": True, "dtype": narrow}
        if fields["recompute"]:
            config["Model"]["use_recompute"] = True
        return Plan.from_paddle({name: group for name, group in config.items() if group}, world_size=processes)


class _Fleet:
    """What Paddle's global calls share: the plan, and what waits for the other one of the two."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.engine: Engine | None = None
        self.model: nn.Module | None = None
        self.loss_fn: Callable[..., Any] = model_loss
        self.optimizer: torch.optim.Optimizer | None = None
        self.hook: Any = None

    def lay_out(self) -> None:
        """Makes the Engine once both are there."""
        if self.engine is not None or self.model is None or self.optimizer is None:
            return
        factory = rebuilt(self.optimizer, self.model, "fleet.distributed_optimizer")
        if self.hook is not None:
            self.hook.remove()
        self.engine = parallelize(self.model, self.plan, optimizer=factory, loss_fn=self.loss_fn)
        _delegate(self.optimizer, self.engine.optimizer)


_fleet: _Fleet | None = None  # Paddle's API has one for the process


def init(
    role_maker: Any = None,
    is_collective: bool = False,
    strategy: DistributedStrategy | None = None,
    log_level: int | str = "INFO",
) -> None:
    """Joins torchrun's processes, and reads the strategy. A second call begins anew, with another model.

    Raises:
        ValueError: ``is_collective=False``, which is Paddle's way to ask for parameter servers; a strategy that this
            world cannot have.
    """
    global _fleet  # noqa: PLW0603
    if not is_collective or role_maker is not None:
        raise ValueError("fleet.init was called for parameter servers: pass is_collective=True and no role_maker")
    if strategy is not None and not isinstance(strategy, DistributedStrategy):
        raise TypeError(f"strategy is {kind_of(strategy)}; it must be a fleet.DistributedStrategy")
    plan = (strategy or DistributedStrategy()).plan(world_size())
    plan.resolve(world_size())
    join_world(default_device())
    _fleet = _Fleet(plan)


def _ready(call: str) -> _Fleet:
    if _fleet is None:
        raise RuntimeError(f"fleet.{call} was called before fleet.init(is_collective=True, strategy=...)")
    return _fleet


def distributed_model(model: nn.Module, loss_fn: Callable[..., Any] | None = None) -> Any:
    """The model, laid out once its optimizer is there, too.

    Args:
        model: a module of torch.
        loss_fn: with a pipeline: ``loss_fn(output, labels)``, which Paddle's ``PipelineLayer`` is given.

    Returns:
        The same module; with a pipeline, what has ``train_batch`` and ``eval_batch``.

    Raises:
        ValueError: a second model; a pipeline without `loss_fn`.
    """
    fleet = _ready("distributed_model")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {kind_of(model)}; it must be an nn.Module")
    if fleet.model is not None:
        raise ValueError("fleet.distributed_model was given a second model; call fleet.init again for another one")
    if fleet.plan.pp > 1 and loss_fn is None:
        raise ValueError(
            f"the strategy has pp_degree={fleet.plan.pp}, whose last stage computes the loss: call "
            f"fleet.distributed_model(model, loss_fn=...)"
        )
    fleet.model = model
    fleet.loss_fn = loss_fn or model_loss

    def refuse(*_: Any) -> NoReturn:
        raise RuntimeError(
            "the model was given to fleet.distributed_model, and is laid out once its optimizer is there: call "
            "fleet.distributed_optimizer before the first forward"
        )

    if fleet.optimizer is None:
        fleet.hook = model.register_forward_pre_hook(refuse)
    fleet.lay_out()
    return model if fleet.plan.pp == 1 else _PipelineModel(fleet)


def distributed_optimizer(optimizer: torch.optim.Optimizer, strategy: Any = None) -> torch.optim.Optimizer:
    """The optimizer, which updates this rank's part of the weights once its model is there, too.

    Returns:
        The same object, with Paddle's ``clear_grad()``.

    Raises:
        ValueError: a `strategy`, which belongs to ``fleet.init``; a second optimizer; one that has stepped.
    """
    fleet = _ready("distributed_optimizer")
    if strategy is not None:
        raise ValueError("fleet.distributed_optimizer was given a strategy; give it to fleet.init")
    if fleet.optimizer is not None:
        raise ValueError("fleet.distributed_optimizer was given a second optimizer; one trains the model")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is {kind_of(optimizer)}; it must be a torch Optimizer")
    fleet.optimizer = optimizer
    vars(optimizer)["clear_grad"] = MethodType(lambda own, set_to_zero=True: own.zero_grad(), optimizer)
    fleet.lay_out()
    return optimizer


def distributed_scaler(scaler: Any = None) -> "_Scaler":
    """In place of a ``GradScaler`` under fp16, whose scale the Engine keeps: ``scaler.scale(loss).backward()``."""
    return _Scaler(_ready("distributed_scaler"))


def engine() -> Engine:
    """The Engine, for checkpoints and all else.

    Raises:
        RuntimeError: the model or its optimizer is not there yet.
    """
    current_engine = _ready("engine").engine
    if current_engine is None:
        raise RuntimeError("fleet.engine() was called before distributed_model and distributed_optimizer")
    return current_engine


def worker_num() -> int:
    """How many processes there are."""
    return world_size()


def worker_index() -> int:
    """This process's rank."""
    return world_group().rank()


def is_first_worker() -> bool:
    """Whether this is rank 0."""
    return worker_index() == 0


class _Scaler:
    """The names of a GradScaler; the Engine scales, unscales and skips."""

    def __init__(self, fleet: _Fleet) -> None:
        self._fleet = fleet

    def scale(self, loss: torch.Tensor) -> "_ScaledLoss":
        return _ScaledLoss(loss)

    def unscale_(self, optimizer: Any) -> None:
        """Does nothing: gradients are unscaled after backward."""

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()

    def minimize(self, optimizer: torch.optim.Optimizer, scaled: Any) -> None:
        optimizer.step()

    def update(self) -> None:
        """Does nothing: the update has adapted the scale."""


class _ScaledLoss:
    def __init__(self, loss: torch.Tensor) -> None:
        self._loss = loss

    def backward(self) -> None:
        engine().backward(self._loss)


class _PipelineModel:
    """What Paddle's ``distributed_model`` returns with a pipeline. Other names are those of this rank's stages."""

    def __init__(self, fleet: _Fleet) -> None:
        self._fleet = fleet

    def train_batch(self, data: Any, optimizer: Any, lr_scheduler: Any = None, scaler: Any = None) -> torch.Tensor:
        """One step on this data rank's ``(inputs, labels)``; returns the mean loss, the same on every rank."""
        inputs, labels = data
        loss = engine().step(inputs, labels)
        if lr_scheduler is not None:
            lr_scheduler.step()
        return loss

    def eval_batch(self, data: Any, compute_loss: bool = True) -> Any:
        """The mean loss of ``(inputs, labels)``, or the outputs."""
        inputs, labels = data
        return engine().evaluate(inputs, labels) if compute_loss else engine().predict(inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(engine().model, name)


def _delegate(optimizer: torch.optim.Optimizer, own: torch.optim.Optimizer) -> None:
    """Lets the script's `optimizer` act by the Engine's `own`: schedulers and variables go on to refer to it."""

    def link() -> None:
        optimizer.param_groups, optimizer.state = own.param_groups, own.state

    def load(_: Any, state: Any) -> None:
        own.load_state_dict(state)
        link()

    link()
    mark_wrapper(optimizer)
    for name in ("step", "zero_grad", "add_param_group", "state_dict"):
        vars(optimizer)[name] = getattr(own, name)
    vars(optimizer)["load_state_dict"] = MethodType(load, optimizer)


def _check_keys(name: str, given: dict[str, Any], known: list[str]) -> None:
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"DistributedStrategy.{name} has the key {key!r}, which nobody knows{hint}")
