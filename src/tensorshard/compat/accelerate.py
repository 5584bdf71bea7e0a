"""Accelerate's ``Accelerator`` on the Engine: the script stays, and a Plan says how the model is laid out.

``from tensorshard.compat.accelerate import Accelerator`` in place of ``from accelerate import Accelerator``. It is a
subclass: data loaders, trackers, printing and the rest are Accelerate's own. What trains is ours: ``prepare`` calls
:func:`tensorshard.parallelize`, ``backward`` is :meth:`tensorshard.Engine.backward`, checkpoints are the Engine's.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from tensorshard.comm.world import under_torchrun
from tensorshard.compat.taken_over import agreed, follow_optimizer, given_plan, rebuilt
from tensorshard.engine.engine import Engine
from tensorshard.engine.guards.foreign_optimizers import mark_wrapper
from tensorshard.engine.loss import model_loss
from tensorshard.parallelize.build import parallelize
from tensorshard.plan.plan import Plan

try:
    import accelerate
    from accelerate.data_loader import prepare_data_loader
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.state import PartialState
    from accelerate.utils import GradientAccumulationPlugin, recursively_apply
except ImportError as error:
    raise ImportError(
        "tensorshard.compat.accelerate stands on Accelerate's own data loaders and trackers, and accelerate is not "
        "installed: pip install accelerate"
    ) from error

_REFUSED = {
    "deepspeed_plugin": "Plan.from_deepspeed(config) makes a Plan of its config",
    "deepspeed_plugins": "Plan.from_deepspeed(config) makes a Plan of its config",
    "fsdp_plugin": "Plan(zero=3) does what FSDP2 does; Plan.from_fsdp(options) makes a Plan of its options",
    "megatron_lm_plugin": "Plan(tp=, pp=) splits your own model",
    "torch_tp_plugin": "Plan(tp=) splits any model",
    "parallelism_config": "Plan(dp_replicate=, dp_shard=, cp=, tp=) has the same degrees",
    "dynamo_backend": "Plan(compile=True) compiles the model's blocks",
}
_SWITCHES = {
    "ACCELERATE_USE_DEEPSPEED": "deepspeed_plugin",
    "ACCELERATE_USE_FSDP": "fsdp_plugin",
    "ACCELERATE_USE_MEGATRON_LM": "megatron_lm_plugin",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "parallelism_config",
}
_TIMES = "data_ranks"  # in the state of a scheduler
_FOLDER = "engine"  # of the Engine's checkpoint, in a folder of save_state


class Accelerator(accelerate.Accelerator):
    """Accelerate's Accelerator, whose model is laid out by a Plan. Arguments that are not named here are Accelerate's.

    Each process gets its share of the data as under Accelerate: ranks that differ only along `tp` and `cp` get the
    same batches, and schedulers step as often as there are data ranks. Forwards draw dropout from the Engine's own
    random streams.

    Args:
        plan: what to do: a Plan, or the path of its YAML file. By default the file that the variable
            ``TENSORSHARD_PLAN`` names; without it whole replicas, ``Plan(zero=0)``, which is what Accelerate does.
        mixed_precision: as in Accelerate, also by ``accelerate launch``; the Plan's precision if it is not given.
        gradient_accumulation_steps: as in Accelerate; the Plan's `micro_batches` if it is not given.

    Attributes:
        engine: the Engine, once the model and its optimizer were prepared; None before.
        plan: the Plan, resolved for this world.

    Raises:
        ValueError: an argument or ``accelerate launch`` asks for another way to lay out the model; the Plan cannot be
            resolved, has a pipeline, or says something else than an argument.
    """

    _takes_pipelines = False
    _models: list[nn.Module]
    _optimizers: list[Any]
    step: int

    def __init__(
        self,
        *args: Any,
        plan: Plan | str | os.PathLike[str] | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        gradient_accumulation_plugin: Any = None,
        **kwargs: Any,
    ) -> None:
        for name, instead in _REFUSED.items():
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"Accelerator was given {name}, and the Plan says how the model is laid out: {instead}"
                )
        for variable, name in _SWITCHES.items():
            if os.environ.get(variable, "false").lower() == "true":
                raise ValueError(
                    f"{variable} is set, as 'accelerate launch' does, and the Plan says how the model is laid out: "
                    f"{_REFUSED[name]}; start the script with torchrun"
                )
        given = given_plan(plan)
        _check_handlers(kwargs.get("kwargs_handlers") or [])
        mixed_precision = mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION")
        plugin = gradient_accumulation_plugin
        if plugin is None:
            launched = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", gradient_accumulation_steps)
            plugin = GradientAccumulationPlugin(num_steps=int(launched))
        steps = plugin.num_steps
        micro_batches = agreed("gradient_accumulation_steps", steps, "micro_batches", given.micro_batches, 1)
        asked = {None: "fp32", "no": "fp32"}.get(mixed_precision, str(mixed_precision))
        if asked not in ("fp32", "bf16", "fp16"):
            raise ValueError(f"mixed_precision is {mixed_precision!r}; the Plan knows 'no', 'bf16' and 'fp16'")
        precision = agreed("mixed_precision", asked, "precision", given.precision, "fp32")
        if given.pp != 1 and not self._takes_pipelines:
            raise ValueError(
                f"Accelerator was given a plan with pp={given.pp}, and a loop with accelerator.backward(loss) runs the "
                f"whole model: call tensorshard.parallelize and engine.step(inputs, targets), or set pp=1"
            )
        plugin.num_steps = micro_batches
        kwargs["gradient_accumulation_plugin"] = plugin
        if under_torchrun() and not torch.cuda.is_available():
            kwargs.setdefault("cpu", True)  # or each process would train alone
        super().__init__(*args, mixed_precision={"fp32": "no"}.get(precision, precision), **kwargs)
        if str(self.state.dynamo_plugin.backend) not in ("NO", "DynamoBackend.NO", "no"):
            raise ValueError(f"Accelerator was asked to compile; {_REFUSED['dynamo_backend']}")
        self.scaler = None  # the Engine has its own
        self.plan = replace(given, precision=precision, micro_batches=micro_batches).resolve(self.state.num_processes)
        self.engine: Engine | None = None
        self.seed = 0
        self._waiting: nn.Module | None = None
        self._held: Any = None  # the hook that holds forwards back
        self._holds_back = False  # inside no_sync

    # -- the parts that train --

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Lays out the model and its optimizer by the Plan; data loaders and schedulers as Accelerate does.

        A model may come first and its optimizer in a later call.

        Raises:
            ValueError: a second model that is trained; an optimizer without its model; a `device_placement`.
        """
        if device_placement is not None and not all(device_placement):
            raise ValueError("device_placement was given; the Engine keeps the model and its optimizer on its device")
        for one in args:
            if self.engine is None and isinstance(one, _Optimizer):  # prepared before free_memory
                self.engine, self.plan = one.of, one.of.plan
        models = [one for one in args if isinstance(one, nn.Module) and not self._is_laid_out(one)]
        optimizers = [
            one for one in args if isinstance(one, torch.optim.Optimizer) and not isinstance(one, AcceleratedOptimizer)
        ]
        trained = [model for model in models if any(p.requires_grad for p in model.parameters())]
        if len(trained) + (self.engine is not None) > 1:
            raise ValueError(
                "accelerator.prepare was given a second model that is trained, and one Accelerator has one Engine: "
                "make an Accelerator for each, call requires_grad_(False) on one that is only read, or "
                "accelerator.free_memory() if the first one is done with"
            )
        for model in models:
            model.to(self.device)
            if model not in trained:
                self._models.append(model)  # a whole copy on each rank
        if trained:
            self._waiting = trained[0]
        replaced = {id(one): self._lay_out(one) for one in optimizers}
        if trained and self.engine is None:
            self._hold_forwards(trained[0])
        ours = [replaced.get(id(one), one) for one in args]
        result = tuple(self._prepared(one) for one in ours)
        return result if len(result) != 1 else result[0]

    def _prepared(self, one: Any) -> Any:
        if isinstance(one, DataLoader):
            return self.prepare_data_loader(one)
        if isinstance(one, LRScheduler | ReduceLROnPlateau):
            return self.prepare_scheduler(one)
        for kind, known in ((nn.Module, self._models), (AcceleratedOptimizer, self._optimizers)):
            if isinstance(one, kind) and not any(one is other for other in known) and one is not self._waiting:
                known.append(one)  # after free_memory
        return one

    def _is_laid_out(self, model: nn.Module) -> bool:
        return self.engine is not None and model is self.engine.model

    def _lay_out(self, optimizer: torch.optim.Optimizer) -> AcceleratedOptimizer:
        """The Engine of the model that waits for `optimizer`."""
        model = self._waiting
        if model is None:
            raise ValueError(
                "accelerator.prepare was given an optimizer without its model, or a second one: pass the model with "
                "it, or in an earlier call; a list of optimizers is for tensorshard.parallelize(optimizer=...)"
            )
        factory = rebuilt(optimizer, model, "accelerator.prepare")
        self._release_forwards(model)
        engine = parallelize(
            model, optimizer=factory, loss_fn=model_loss, device=self.device, seed=self.seed, **self._layout()
        )
        if engine.scaler is not None and self.scaler_handler is not None:
            engine.scaler.scale = self.scaler_handler.init_scale
            engine.scaler.growth_interval = self.scaler_handler.growth_interval
        self.engine, self.plan, self._waiting = engine, engine.plan, None
        self._models.append(engine.model)
        made = _Optimizer(engine)
        vars(engine.model)["zero_grad"] = made.zero_grad  # some loops call model.zero_grad()
        vars(engine.model)["no_sync"] = _no_sync
        made.replaces = optimizer
        self._optimizers.append(made)
        return made

    def _layout(self) -> dict[str, Any]:
        """What `parallelize` is given as the plan."""
        return {"plan": self.plan}

    def _hold_forwards(self, model: nn.Module) -> None:
        def refuse(*_: Any) -> None:
            if torch.is_grad_enabled():
                raise RuntimeError(
                    f"the {type(model).__name__} was prepared without its optimizer, and is laid out once both are "
                    f"there: pass the optimizer to accelerator.prepare before the first forward"
                )

        self._held = model.register_forward_pre_hook(refuse)

    def _release_forwards(self, model: nn.Module) -> None:
        if self._held is not None:
            self._held.remove()
            self._held = None

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """A model that is only read, on this rank's device and whole; one that is trained goes to :meth:`prepare`."""
        if self._is_laid_out(model) or not evaluation_mode:
            return self.prepare(model)
        self._models.append(model)
        return model.to(self.device)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """As :meth:`prepare`."""
        return self.prepare(optimizer)

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """The scheduler, which sets the rates of the Engine's optimizer, once a step for each data rank."""
        if isinstance(scheduler, AcceleratedScheduler):
            return scheduler
        for one in self._optimizers:
            if scheduler.optimizer in (one, one.replaces):
                follow_optimizer(scheduler, one.optimizer)
        made = _Scheduler(
            scheduler,
            self._optimizers,
            step_with_optimizer=self.step_scheduler_with_optimizer,
            split_batches=self.split_batches,
        )
        made.times = self.plan.dp_size
        self._schedulers.append(made)
        return made

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Accelerate's data loader of this rank's share. Ranks that differ only along tp, cp or pp get the same."""
        if self.plan.dp_size == self.state.num_processes or getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        if self.dispatch_batches:
            raise ValueError(
                "dispatch_batches=True gives each process another part of a batch, and under this plan some ranks "
                "share one: set it to False"
            )
        prepared = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=self.plan.dp_size,
            process_index=self._data_rank,
            split_batches=self.split_batches,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=self.rng_types.copy(),
            dispatch_batches=False,
            even_batches=self.even_batches,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        prepared._is_accelerate_prepared = True
        self._dataloaders.append(prepared)
        return prepared

    @property
    def _data_rank(self) -> int:
        return int(self.process_index) // (self.plan.tp * self.plan.cp) % self.plan.dp_size

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This rank's part of `inputs`, for inference. Ranks that differ only along tp and cp get the same."""
        state = SimpleNamespace(num_processes=self.plan.dp_size, process_index=self._data_rank, device=self.device)
        with PartialState.split_between_processes(state, inputs, apply_padding) as part:
            yield part

    def _trained(self, call: str) -> Engine:
        if self.engine is None:
            raise RuntimeError(f"accelerator.{call} was called before prepare(model, optimizer)")
        return self.engine

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """The backward of a micro-batch: gradients of the mean over micro-batches and data ranks, as in Accelerate.

        Raises:
            TypeError: an argument of ``torch.Tensor.backward`` was given, such as ``retain_graph``.
        """
        if kwargs:
            raise TypeError(
                f"accelerator.backward was given {', '.join(kwargs)}; the Engine runs one backward a micro-batch: "
                f"add the losses that share a graph, and call it once"
            )
        last = self.sync_gradients and not self._holds_back
        self._trained("backward").backward(loss, last=last)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Inside, a backward is not the step's last. With gradient_accumulation_steps=1 each one is averaged."""
        before, self._holds_back = self._holds_back, True
        try:
            yield
        finally:
            self._holds_back = before

    @contextmanager
    def trigger_sync_in_backward(self, model: nn.Module) -> Iterator[None]:  # type: ignore[override]
        """Inside, a backward is the step's last, also within :meth:`no_sync`."""
        before, self._holds_back = self._holds_back, False
        try:
            yield
        finally:
            self._holds_back = before

    @contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Does nothing: with even batches, ranks have equally many.

        Raises:
            ValueError: batches are not even.
        """
        if self.state.num_processes > 1 and not (self.even_batches and even_batches in (None, True)):
            raise ValueError(
                "join_uneven_inputs was called with even_batches=False, and ranks that have more batches than others "
                "would wait for them: leave even_batches at True, which fills up the last one"
            )
        yield

    @contextmanager
    def maybe_context_parallel(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Does nothing: ``Plan(cp=)`` cuts the sequences of whole inputs inside the model."""
        yield

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step. They cannot be set once the Accelerator is made."""
        return int(self.gradient_state.num_steps)

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        if steps != self.gradient_accumulation_steps:
            raise ValueError(
                f"accelerator.gradient_accumulation_steps was set to {steps}, and the Plan was made for "
                f"{self.gradient_accumulation_steps}: give them to the Accelerator, or to Plan(micro_batches=)"
            )

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> NoReturn:
        """Refused.

        Raises:
            NotImplementedError: always; says what to do.
        """
        raise NotImplementedError(
            "accelerator.lomo_backward updates weights while backward runs, before their gradients are summed over "
            "ranks: take another optimizer; Plan(zero=3, offload=...) saves the memory"
        )

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Clips the norm of the whole model's gradient, under any plan; returns it. Infinity only measures it.

        Raises:
            ValueError: another norm than 2, or parameters of a part of the model.
        """
        engine = self._trained("clip_grad_norm_")
        wanted = {id(p) for p in ([parameters] if isinstance(parameters, torch.Tensor) else parameters)}
        if norm_type != 2 or any(p.requires_grad and id(p) not in wanted for p in engine.model.parameters()):
            raise ValueError(
                "accelerator.clip_grad_norm_ clips the 2-norm of the gradient of all trained parameters: pass "
                "model.parameters() and norm_type=2; other clipping is a hook: "
                "accelerator.engine.register_gradient_hook"
            )
        if max_norm == float("inf"):
            return engine.gradient_norm()
        return engine.clip_grad_norm_(max_norm)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clamps each element of the gradients of `parameters`."""
        self._trained("clip_grad_value_").gradient_norm()  # completes the gradients
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Does nothing: after the last micro-batch, gradients are unscaled under every precision."""

    # -- what ranks have together --

    def gather(self, tensor: Any) -> Any:
        """What the data ranks have, along the first dimension, on every rank."""
        if self.engine is None or self.plan.dp_size == self.state.num_processes:
            return super().gather(tensor)
        return self.engine.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As Accelerate's: without the samples that a last batch was filled up with."""
        if use_gather_object and self.plan.dp_size != self.state.num_processes:
            raise ValueError(
                "gather_for_metrics was asked for objects, under a plan whose ranks share batches: give tensors, or "
                "lists, tuples and dicts of them"
            )
        return super().gather_for_metrics(input_data, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum, the mean or the maximum over the data ranks."""
        reduced = super().reduce(tensor, reduction, scale)
        copies = self.state.num_processes // self.plan.dp_size
        if reduction != "sum" or copies == 1:
            return reduced
        return recursively_apply(lambda one: (one / copies).to(one.dtype), reduced, error_on_other_type=True)

    def check_trigger(self) -> bool:
        """Whether any process has called ``set_trigger``, be it one of those that share a batch."""
        flag = torch.tensor(0, device=self.device) if self.flag_tensor is None else self.flag_tensor
        is_triggered = bool(super().reduce(flag, "max"))
        if is_triggered:
            self.flag_tensor: Any = torch.zeros_like(flag)
        return is_triggered

    # -- state --

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The full state dict on the main process, and {} elsewhere. Every rank calls it."""
        if self._is_laid_out(model):
            return self._trained("get_state_dict").full_state_dict()
        return super().get_state_dict(model, unwrap)

    def save_model(
        self, model: nn.Module, save_directory: str | os.PathLike[str], max_shard_size: Any = "10GB",
        safe_serialization: bool = True,
    ) -> None:  # fmt: skip
        """Writes the weights as safetensors, whole, one tensor at a time. Every rank calls it."""
        if not safe_serialization:
            raise ValueError("save_model was asked for safe_serialization=False; weights are written as safetensors")
        if not self._is_laid_out(model):
            super().save_model(model, save_directory, max_shard_size)
            return
        self._trained("save_model").save_pretrained(save_directory, max_shard_size=max_shard_size, overwrite=True)

    def register_save_state_pre_hook(self, hook: Any) -> Any:
        """Refused: a hook would get state dicts of one rank's parts.

        Raises:
            NotImplementedError: always; says what to call.
        """
        raise NotImplementedError(
            "register_save_state_pre_hook: save_state writes the Engine's checkpoint, and has no whole state dicts to "
            "give to a hook; call accelerator.engine.save_pretrained(path) beside it, or register_for_checkpointing"
        )

    register_load_state_pre_hook = register_save_state_pre_hook

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """As Accelerate's: schedulers, samplers, random states and registered objects. The model and its optimizer are
        the Engine's checkpoint in the folder, which any plan reads. Every rank calls it."""
        engine = self._trained("save_state")
        folders: list[str] = []
        self._save_model_state_pre_hook[-1] = lambda models, weights, folder: folders.append(folder)
        models, optimizers, self._models, self._optimizers = self._models, self._optimizers, [], []
        try:
            saved = super().save_state(output_dir, safe_serialization, **kwargs)
        finally:
            self._models, self._optimizers = models, optimizers
            del self._save_model_state_pre_hook[-1]
        engine.save(Path(folders[0]) / _FOLDER, extra={"step": self.step}, overwrite=True)
        return saved

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        """Reads a folder of :meth:`save_state`, or of Accelerate's. Every rank calls it.

        Raises:
            FileNotFoundError: there is neither an Engine's checkpoint in the folder nor one of Accelerate.
        """
        engine = self._trained("load_state")
        folders: list[str] = []
        self._load_model_state_pre_hook[-1] = lambda models, folder: folders.append(folder)
        models, optimizers, self._models, self._optimizers = self._models, self._optimizers, [], []
        try:
            super().load_state(input_dir, load_kwargs, **kwargs)
        finally:
            self._models, self._optimizers = models, optimizers
            del self._load_model_state_pre_hook[-1]
        # Schedulers have set rates; the checkpoint's options are the same ones.
        own = Path(folders[0]) / _FOLDER
        self.step = engine.load(own if own.is_dir() else folders[0]).get("step", self.step)

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """The model: nothing wraps it."""
        return model if self._is_laid_out(model) else super().unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)

    def free_memory(self, *objects: Any) -> Any:
        """Releases the references to what was prepared. The next model that is prepared gets an Engine of its own."""
        if self._waiting is not None:
            self._release_forwards(self._waiting)
        self.engine = self._waiting = None
        return super().free_memory(*objects)


class _Optimizer(AcceleratedOptimizer):
    """The Engine's optimizer: its updates and ``zero_grad`` wait for the step's last micro-batch."""

    replaces: torch.optim.Optimizer

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.optimizer, device_placement=False, scaler=None)
        self.of = engine
        mark_wrapper(self)

    def step(self, closure: Any = None) -> None:
        if self.of.plan.pp > 1:  # engine.step has updated
            return
        scaler = self.of.scaler
        before = None if scaler is None else scaler.scale
        super().step(closure)
        if self.gradient_state.sync_gradients and scaler is not None and before is not None:
            self._is_overflow = scaler.scale < before

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        if self.of.plan.pp == 1:
            super().zero_grad(set_to_none)


class _Scheduler(AcceleratedScheduler):
    """A scheduler that steps once for each data rank: each has its own batch of the script's batch size."""

    times: int

    def step(self, *args: Any, **kwargs: Any) -> None:
        if self.split_batches or not self.step_with_optimizer or not self.gradient_state.sync_gradients:
            super().step(*args, **kwargs)
            return
        if any(one.step_was_skipped for one in self.optimizers):
            return
        for _ in range(self.times):
            total = getattr(self.scheduler, "total_steps", None)
            if total is None or self.scheduler.last_epoch < total:
                self.scheduler.step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), _TIMES: 1 if self.split_batches else self.times}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        inner = dict(state_dict)
        before, now = inner.pop(_TIMES, self.times), 1 if self.split_batches else self.times
        if before != now and self.step_with_optimizer:
            raise ValueError(
                f"the state of a scheduler was saved with {before} data ranks, and there are {now}: as in Accelerate, "
                f"it steps once a step for each of them, so that its length would be another one. Go on with as many, "
                f"or use split_batches=True from the start"
            )
        super().load_state_dict(inner)


def _no_sync() -> NoReturn:
    """In the place of DistributedDataParallel's method, which Accelerate's LocalSGD calls."""
    raise NotImplementedError(
        "model.no_sync() was called, as accelerate.local_sgd.LocalSGD does, whose ranks have weights of their own for "
        "some steps: under a Plan weights are one model's after each step. To add up micro-batches, use "
        "accelerator.accumulate(model) or accelerator.no_sync(model)"
    )


def _check_handlers(handlers: list[Any]) -> None:
    """Refuses what kwargs_handlers ask for and the Engine does not do."""
    for handler in handlers:
        asked = handler.to_kwargs()  # what differs from the defaults
        hooks = [name for name in ("comm_hook", "comm_wrapper") if str(getattr(handler, name, "no")) != "no"]
        refused = {name: asked[name] for name in ("enabled", "growth_factor", "backoff_factor") if name in asked}
        refused |= {name: str(getattr(handler, name)) for name in hooks}
        if refused:
            named = ", ".join(f"{name}={value!r}" for name, value in refused.items())
            raise ValueError(
                f"Accelerator was given {type(handler).__name__}({named}): gradients are summed as they are, the "
                f"Plan's precision says how the model computes, and fp16's scale is doubled and halved; init_scale and "
                f"growth_interval are taken"
            )
