"""DeepSpeed's calls on the Engine: ``from tensorshard.compat import deepspeed`` in place of ``import deepspeed``.

``deepspeed.initialize`` reads DeepSpeed's config (:meth:`tensorshard.Plan.from_deepspeed`), and returns what takes
``engine(batch)``, ``engine.backward(loss)`` and ``engine.step()``. DeepSpeed itself is not needed.
"""

import argparse
import json
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from tensorshard.comm.decisions import decide_once
from tensorshard.comm.world import default_device, join_world, world_size
from tensorshard.compat.taken_over import follow_optimizer, rebuilt
from tensorshard.engine.engine import Engine
from tensorshard.engine.loss import model_loss
from tensorshard.parallelize.build import parallelize
from tensorshard.plan.plan import Plan
from tensorshard.torch_private.modules import own_parameters, set_parameter
from tensorshard.torch_private.pytree import tree_map
from tensorshard.torch_private.tensors import set_class

__all__ = ["DeepSpeedEngine", "add_config_arguments", "get_accelerator", "init_distributed", "initialize", "zero"]

logger = logging.getLogger("tensorshard")

comm = torch.distributed

_LATEST = "latest"
_OWNER = "_tensorshard_module"  # on a parameter: a weak reference to the model that shows it
_WHOLE = "_tensorshard_whole"  # on a parameter, inside GatheredParameters

_ELSEWHERE = {
    "pipe": "any nn.Module takes Plan(pp=2): call tensorshard.parallelize, and engine.step(inputs, targets)",
    "PipelineModule": "any nn.Module takes Plan(pp=2): call tensorshard.parallelize, and engine.step(inputs, targets)",
    "init_inference": "engine.predict and engine.generate run a model under a Plan",
    "tp_model_init": "'tensor_parallel': {'autotp_size': 2} in the config splits the model",
    "checkpointing": "Plan(recompute='full') or 'selective', or torch.utils.checkpoint in the model",
    "moe": "Plan(ep=2) spreads experts of a model as it is",
    "ops": "the config's 'optimizer' names one, or pass one of torch.optim",
    "runtime": "its parts are not here; deepspeed.initialize does what a script needs",
}


def __getattr__(name: str) -> NoReturn:
    hint = f": {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
    raise AttributeError(f"tensorshard.compat.deepspeed has no {name!r}{hint}")


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds ``--deepspeed`` and ``--deepspeed_config`` to a script's command line."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", default=False, action="store_true", help="accepted for scripts that ask for it")
    group.add_argument("--deepspeed_config", default=None, type=str, help="DeepSpeed json configuration file")
    return parser


def init_distributed(dist_backend: str | None = None, *_: Any, **__: Any) -> None:
    """Joins torchrun's processes, or makes a world of one, unless there is one already."""
    join_world(default_device())


def get_accelerator() -> SimpleNamespace:
    """The names and numbers of this rank's device, as DeepSpeed's ``get_accelerator()`` gives them."""
    device = default_device()

    def device_name(index: int | None = None) -> str:
        return device.type if index is None or device.type == "cpu" else f"{device.type}:{index}"

    return SimpleNamespace(
        device_name=device_name,
        current_device=lambda: device.index or 0,
        current_device_name=lambda: str(device),
        device_count=lambda: torch.cuda.device_count() if device.type == "cuda" else 1,
        communication_backend_name=lambda: "nccl" if device.type == "cuda" else "gloo",
        is_available=lambda: True,
        is_bf16_supported=lambda: device.type == "cpu" or torch.cuda.is_bf16_supported(),
        is_fp16_supported=lambda: True,
        set_device=lambda index: torch.cuda.set_device(index) if device.type == "cuda" else None,
    )


def initialize(
    args: Any = None,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    mesh_param: Any = None,
    config_params: Mapping[str, Any] | str | None = None,
) -> tuple["DeepSpeedEngine", torch.optim.Optimizer, "DataLoader[Any] | None", Any]:
    """What DeepSpeed's ``initialize`` does, by :func:`tensorshard.parallelize`.

    Args:
        args: a namespace with ``deepspeed_config``, a path, if there is no `config`.
        model: the module; or a callable that returns it, of which no rank then builds more than its part.
        optimizer: one that was built of the model's parameters, or a callable that makes one of parameters; by default
            the config's.
        model_parameters: what the config's optimizer trains: parameters or groups of them; by default all that require
            gradients.
        training_data: a dataset with an index; each data rank gets its part, in batches of
            ``train_micro_batch_size_per_gpu``, in the order of a ``DistributedSampler``, as with DeepSpeed.
        lr_scheduler: one that was built on `optimizer`, or a callable that makes one of it; by default the config's.
        config: DeepSpeed's, as a dict or the path of its JSON.

    Returns:
        The engine, its optimizer, the loader of `training_data` or None, and the scheduler or None.

    Raises:
        ValueError: the config has a key that cannot be honoured (each with its reason) or that nobody knows; there is
            no model, no optimizer, or no batch size that `training_data` needs; `mpu` or `mesh_param` was given.
    """
    for name, value in (("mpu", mpu), ("mesh_param", mesh_param)):
        if value is not None:
            raise ValueError(
                f"initialize was given {name}, which divides the processes its own way: the Plan does that here; "
                f"'tensor_parallel': {{'autotp_size': N}} in the config splits layers"
            )
    if model is None:
        raise ValueError("initialize was given no model; pass an nn.Module, or a callable that returns one")
    join_world(default_device())
    plan = Plan.from_deepspeed(_read_config(config, config_params, args), world_size=world_size())
    ledger = plan.ledger
    assert ledger is not None
    factory = _factory(model, optimizer, model_parameters, ledger.settings)
    resolved = plan.resolve(world_size())
    whole = ledger.settings.get("train.global_batch_size")
    micro = None if whole is None else whole // (resolved.micro_batches * resolved.dp_size)
    if training_data is not None and micro is None:
        raise ValueError(
            "initialize was given training_data, and the config has no batch size: set train_micro_batch_size_per_gpu"
        )
    if isinstance(training_data, IterableDataset):
        raise ValueError("initialize was given a stream as training_data; give a dataset with len() and an index")
    engine = parallelize(model, plan, optimizer=factory, loss_fn=model_loss)
    made = DeepSpeedEngine(engine, micro, _scheduler(engine, lr_scheduler, ledger.settings))
    loader = None
    if training_data is not None:
        assert micro is not None
        sampler: DistributedSampler[Any] = DistributedSampler(
            training_data, num_replicas=engine.mesh.dp_size, rank=engine.mesh.dp_rank
        )
        loader = DataLoader(training_data, batch_size=micro, sampler=sampler, collate_fn=collate_fn)
    made.training_dataloader = loader
    return made, made.optimizer, loader, made.lr_scheduler


def _read_config(config: Any, config_params: Any, args: Any) -> Mapping[str, Any]:
    named = getattr(args, "deepspeed_config", None)
    given = [one for one in (config, config_params, named) if one is not None]
    if len(given) != 1:
        raise ValueError(
            f"initialize was given {len(given) or 'no'} configs; pass one of config= and --deepspeed_config FILE"
        )
    if isinstance(given[0], Mapping):
        return given[0]
    read: Mapping[str, Any] = json.loads(Path(given[0]).read_text())
    return read


def _group(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key[len(name) :]: value for key, value in settings.items() if key.startswith(name)}


def _factory(model: Any, optimizer: Any, model_parameters: Any, settings: Mapping[str, Any]) -> Any:
    """What makes the optimizer."""
    options = _group(settings, "optimizer.")
    kind = options.pop("_target_", None)
    if optimizer is not None:
        if kind is not None:
            logger.warning("the optimizer that initialize was given is taken, and not the config's, as in DeepSpeed")
        if not isinstance(optimizer, torch.optim.Optimizer):
            return optimizer
        if not isinstance(model, nn.Module):
            raise ValueError(
                "initialize was given an optimizer of parameters, and a callable as the model, which has none yet: "
                "pass a callable as the optimizer, too, or name one in the config"
            )
        return rebuilt(optimizer, model, "initialize")
    if kind is None:
        raise ValueError("initialize was given no optimizer: pass optimizer=, or set 'optimizer' in the config")
    made = partial(getattr(torch.optim, kind.rpartition(".")[2]), **options)
    if model_parameters is None or not isinstance(model, nn.Module):
        return made
    return rebuilt(made(list(model_parameters)), model, "initialize")


def _scheduler(engine: Engine, given: Any, settings: Mapping[str, Any]) -> Any:
    options = _group(settings, "scheduler.")
    if given is not None:
        if hasattr(given, "step"):
            follow_optimizer(given, engine.optimizer)
            return given
        return given(engine.optimizer)
    if not options:
        return None
    from tensorshard.trainer.schedulers import warmup_decay

    total = options.pop("total_steps")
    return warmup_decay(engine.optimizer, total_steps=total if isinstance(total, int) else 2**62, **options)


def _as_torch_counts(scheduler: LambdaLR, last: int) -> dict[str, Any]:
    """The state of `scheduler` where DeepSpeed's, which begins at -1, stands at `last`."""
    rates = [group["lr"] for group in scheduler.optimizer.param_groups]
    return {**scheduler.state_dict(), "last_epoch": last + 1, "_step_count": last + 2, "_last_lr": rates}


class DeepSpeedEngine:
    """DeepSpeed's engine on ours: forward, backward and step of one micro-batch. Made by :func:`initialize`.

    Other names are those of the model, as in DeepSpeed.

    Attributes:
        engine: the :class:`tensorshard.Engine`.
        optimizer, lr_scheduler, training_dataloader: as :func:`initialize` returns them.
        global_steps, micro_steps, skipped_steps: updates; calls of :meth:`step`; updates that fp16 skipped.
    """

    def __init__(self, engine: Engine, micro_batch_size: int | None, lr_scheduler: Any) -> None:
        self.engine = engine
        self.optimizer = engine.optimizer
        self.lr_scheduler = lr_scheduler
        self.training_dataloader: Any = None
        self.global_steps = self.micro_steps = self.skipped_steps = 0
        self.global_rank, self.world_size = engine.mesh.rank, engine.mesh.world_size
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.dp_world_size = engine.mesh.dp_size
        self.device = engine.device
        self._micro_batch_size = micro_batch_size
        self._boundary: bool | None = None
        for parameter in engine.model.parameters():
            vars(parameter)[_OWNER] = weakref.ref(engine.model)

    def __getattr__(self, name: str) -> Any:
        engine = vars(self).get("engine")
        if engine is None:
            raise AttributeError(name)
        return getattr(engine.model, name)

    @property
    def module(self) -> nn.Module:
        """The model."""
        return self.engine.model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.engine.model(*args, **kwargs)

    forward = __call__

    def train(self, mode: bool = True) -> "DeepSpeedEngine":
        """Puts the model into training mode."""
        self.engine.model.train(mode)
        return self

    def eval(self) -> "DeepSpeedEngine":
        """Puts the model into evaluation mode."""
        return self.train(False)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """The backward of a micro-batch's mean loss, which counts ``1 / gradient_accumulation_steps``.

        Raises:
            ValueError: `retain_graph`; more micro-batches than the config has, without a boundary.
        """
        if retain_graph:
            raise ValueError("engine.backward was given retain_graph=True: add the losses that share a graph")
        steps = self.engine.plan.micro_batches
        if self._boundary is False and (self.micro_steps + 1) % steps == 0:
            raise ValueError(
                f"set_gradient_accumulation_boundary(False) was called, and this is the last of the "
                f"gradient_accumulation_steps={steps} of the config: set them to as many as a step can have"
            )
        self.engine.backward(loss if scale_wrt_gas else loss * steps, last=self.is_gradient_accumulation_boundary())
        return loss

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next :meth:`step` updates the weights."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.engine.plan.micro_batches == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Says whether the micro-batches to come are a step's last ones."""
        self._boundary = is_boundary

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """At a boundary: clips, updates, clears the gradients, and steps the scheduler. Counts a micro-batch."""
        if self.is_gradient_accumulation_boundary():
            scaler = self.engine.scaler
            before = None if scaler is None else scaler.scale
            self.optimizer.step()
            self.optimizer.zero_grad()
            skipped = scaler is not None and before is not None and scaler.scale < before
            if skipped:
                self.skipped_steps += 1
            elif self.lr_scheduler is not None:
                self.lr_scheduler.step(**(lr_kwargs or {}))
            self.global_steps += 1
        self.micro_steps += 1

    def zero_grad(self) -> None:
        """Drops the gradients, and the step's micro-batches so far."""
        self.optimizer.zero_grad()

    # -- what the config says --

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step."""
        return self.engine.plan.micro_batches

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of a data rank in a micro-batch.

        Raises:
            ValueError: the config has no batch size.
        """
        if self._micro_batch_size is None:
            raise ValueError("the config has no batch size: set train_micro_batch_size_per_gpu")
        return self._micro_batch_size

    def train_batch_size(self) -> int:
        """Samples of a step, over all data ranks."""
        return self.train_micro_batch_size_per_gpu() * self.engine.plan.micro_batches * self.dp_world_size

    @property
    def global_samples(self) -> int:
        """Samples that were trained on."""
        return self.global_steps * self.train_batch_size()

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage."""
        return int(self.engine.plan.zero)

    def fp16_enabled(self) -> bool:
        """Whether the model computes in fp16."""
        return self.engine.plan.precision == "fp16"

    def bfloat16_enabled(self) -> bool:
        """Whether the model computes in bf16."""
        return self.engine.plan.precision == "bf16"

    def get_lr(self) -> list[float]:
        """The rate of each parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """The whole gradient's norm in the last step, before clipping; None before the first."""
        norm = self.engine.grad_norm
        return None if norm is None else float(norm)

    @property
    def cur_scale(self) -> float:
        """The scale of losses; 1 without fp16."""
        return 1.0 if self.engine.scaler is None else self.engine.scaler.scale

    # -- files --

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes the Engine's checkpoint to ``save_dir/tag``, which any plan reads. Every rank calls it.

        Args:
            tag: ``global_stepN`` by default.
            client_state: numbers, strings, lists and dicts, which :meth:`load_checkpoint` returns.
            save_latest: whether ``save_dir/latest`` names the tag from now on.

        Raises:
            ValueError: `exclude_frozen_parameters`.
        """
        if exclude_frozen_parameters:
            raise ValueError("exclude_frozen_parameters=True was given; a checkpoint has all parameters")
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        scheduler = None if self.lr_scheduler is None else self.lr_scheduler.state_dict()
        extra = {
            "client_state": dict(client_state or {}),
            "lr_scheduler": scheduler,
            "counts": [self.global_steps, self.micro_steps, self.skipped_steps],
        }
        self.engine.save(Path(save_dir) / tag, extra=extra, overwrite=True)
        if save_latest and self.global_rank == 0:
            written = Path(save_dir) / f".{_LATEST}.saving"
            written.write_text(tag)
            written.replace(Path(save_dir) / _LATEST)
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Reads what :meth:`save_checkpoint` wrote, or DeepSpeed's own, under any plan. Every rank calls it.

        Returns:
            The checkpoint's path and its client state; ``(None, None)`` if there is no `tag` and no file ``latest``.

        Raises:
            FileNotFoundError: it is no checkpoint of the Engine or of DeepSpeed.
            ValueError: only a part of it was asked for.
        """
        if not load_module_strict or not load_optimizer_states or load_module_only or custom_load_fn is not None:
            raise ValueError(
                "load_checkpoint was asked for a part of a checkpoint; it reads weights and optimizer together. For "
                "the weights alone, export them ('tensorshard export') and load them before initialize"
            )
        if tag is None:
            latest = Path(load_dir) / _LATEST
            tag = decide_once(
                lambda: latest.read_text().strip() if latest.is_file() else None, self.engine.mesh.world_group
            )
            if tag is None:
                logger.warning("there is no file %s, so nothing was loaded; give load_checkpoint a tag", latest)
                return None, None
        path = Path(load_dir) / str(tag)
        extra = self.engine.load(path)
        scheduler = extra.get("lr_scheduler")
        if load_lr_scheduler_states and self.lr_scheduler is not None and scheduler is not None:
            if set(scheduler) == {"last_batch_iteration"} and isinstance(self.lr_scheduler, LambdaLR):
                scheduler = _as_torch_counts(self.lr_scheduler, scheduler["last_batch_iteration"])
            self.lr_scheduler.load_state_dict(scheduler)
        steps = self.engine.step_count
        theirs = [steps, steps * self.engine.plan.micro_batches, extra.get("skipped_steps", 0)]  # of DeepSpeed's own
        self.global_steps, self.micro_steps, self.skipped_steps = extra.get("counts", theirs)
        return str(path), extra["client_state"]

    def save_16bit_model(self, save_dir: str | os.PathLike[str], save_filename: str = "pytorch_model.bin") -> bool:
        """Writes the whole weights in the precision of computation, for ``torch.load``. Every rank calls it."""
        state = self.engine.full_state_dict()
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.engine.plan.precision)
        if self.global_rank == 0:
            Path(save_dir).mkdir(parents=True, exist_ok=True)
            narrow = {n: t.to(dtype) if dtype and t.is_floating_point() else t for n, t in state.items()}
            torch.save(narrow, Path(save_dir) / save_filename)
        return True

    save_fp16_model = save_16bit_model


class _Init:
    """``deepspeed.zero.Init()``: the constructor runs as it would without. Each process builds the whole model in its
    host memory; ``initialize(model=lambda: Model(...))`` builds no more than a rank's part."""

    def __init__(self, *_: Any, enabled: bool = True, **__: Any) -> None:
        self._enabled = enabled

    def __enter__(self) -> None:
        if self._enabled:
            logger.warning(
                "zero.Init: each process builds the whole model in host memory, and initialize takes its part; with "
                "initialize(model=lambda: Model(...)), no process holds more than that part"
            )

    def __exit__(self, *_: object) -> None:
        pass


class _GatheredParameters:
    """``deepspeed.zero.GatheredParameters``: inside, the modules hold whole parameters, which each rank may read alone.

    Args:
        params: parameters of a model, or one. Before ``initialize``, they are whole already.
        modifier_rank: whose changes all ranks take at the end; None if nothing is changed.
        enabled: whether to do anything.

    The modules (``model.head.weight``) hold whole parameters, and a variable that refers to a parameter from outside
    reads and writes the same whole one.
    """

    def __init__(
        self, params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
    ) -> None:
        given: list[Any] = [params] if isinstance(params, torch.Tensor) else list(params)
        self._parameters: list[nn.Parameter] = given if enabled else []
        self._rank = modifier_rank
        self._wholes: list[nn.Parameter] = []

    def __enter__(self) -> None:
        self._places: list[list[tuple[nn.Module, str]]] = []
        for parameter in self._parameters:
            model = vars(parameter).get(_OWNER, lambda: None)()
            places = [] if model is None else _places(model, parameter)
            whole = parameter
            if places:
                with torch.enable_grad():  # where gradients are recorded, a part reads as the whole
                    whole = nn.Parameter((parameter + 0).detach().clone(), requires_grad=parameter.requires_grad)
                vars(parameter)[_WHOLE] = whole
                set_class(parameter, _standing_for_its_whole(type(parameter)))
            for module, name in places:
                set_parameter(module, name, whole)
            self._wholes.append(whole)
            self._places.append(places)

    @torch.no_grad()
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for parameter, places in zip(self._parameters, self._places, strict=True):
            if vars(parameter).pop(_WHOLE, None) is not None:
                set_class(parameter, type(parameter).__mro__[1])
            for module, name in places:
                set_parameter(module, name, parameter)
        wholes, self._wholes = self._wholes, []
        if self._rank is None or error is not None:
            return
        for parameter, whole in zip(self._parameters, wholes, strict=True):
            if torch.distributed.is_initialized():
                torch.distributed.broadcast(whole.detach(), src=self._rank)
            if whole is not parameter:
                parameter.copy_(whole)


@cache
def _standing_for_its_whole(kind: type) -> type:
    """A subclass of a parameter's class, all of whose functions are those of the whole parameter in its place."""

    def whole(leaf: Any) -> Any:
        return vars(leaf).get(_WHOLE, leaf) if isinstance(leaf, torch.Tensor) else leaf

    def call(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(whole, (args, kwargs or {}))
        return func(*args, **kwargs)

    own = {
        "__torch_function__": classmethod(call),
        "__deepcopy__": lambda self, memo: deepcopy(whole(self), memo),
        "__reduce_ex__": lambda self, protocol: whole(self).__reduce_ex__(protocol),
    }
    return type(kind)(f"Gathered{kind.__name__}", (kind,), own)


def _places(model: nn.Module, parameter: nn.Parameter) -> list[tuple[nn.Module, str]]:
    return [
        (module, name) for module in model.modules() for name, own in own_parameters(module).items() if own is parameter
    ]


def _external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """``deepspeed.zero.register_external_parameter``: not needed here, where any code may read any parameter."""


zero = SimpleNamespace(
    Init=_Init,
    GatheredParameters=_GatheredParameters,
    register_external_parameter=_external_parameter,
    unregister_external_parameter=_external_parameter,
)
