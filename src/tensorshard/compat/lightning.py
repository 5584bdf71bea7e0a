"""A strategy for Lightning's Trainer: ``Trainer(strategy=TensorshardStrategy(plan=ts.Plan(zero=3)))``.

Lightning's loop, callbacks, loggers, schedulers and data loaders stay. The LightningModule is laid out by the Plan;
backward, clipping, updates and checkpoints are the Engine's.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tensorshard.compat.taken_over import agreed, follow_optimizer, given_plan, rebuilt
from tensorshard.engine.engine import Engine
from tensorshard.engine.loss import model_loss
from tensorshard.parallelize.build import parallelize
from tensorshard.plan.plan import Plan

try:
    import lightning.pytorch as pl  # type: ignore[import-not-found, unused-ignore]
    from lightning.pytorch.plugins.precision import Precision  # type: ignore[import-not-found, unused-ignore]
    from lightning.pytorch.strategies import DDPStrategy  # type: ignore[import-not-found, unused-ignore]
    from lightning.pytorch.trainer.states import TrainerFn  # type: ignore[import-not-found, unused-ignore]
except ImportError as error:
    raise ImportError(
        "tensorshard.compat.lightning is a strategy for Lightning's Trainer, and lightning is not installed: "
        "pip install lightning"
    ) from error

_FOLDER, _FILE = "engine", "trainer.ckpt"  # in the folder of a checkpoint


class TensorshardStrategy(DDPStrategy):  # type: ignore[misc, unused-ignore]
    """Trains a LightningModule under a Plan of data ranks: ZeRO 0 to 3 and hybrid sharding.

    Losses are those of one process on the same samples, up to rounding. A checkpoint is a folder: the Engine's, which
    any Plan reads, and Lightning's own state beside it. Before a ``fit``, ``validate``, ``test`` and ``predict`` hold
    the whole model on each rank.

    Args:
        plan: what to do: a Plan, or the path of its YAML file. By default the file that the variable
            ``TENSORSHARD_PLAN`` names; without it whole replicas. Its `micro_batches` and `clip_grad_norm` are the
            Trainer's ``accumulate_grad_batches`` and ``gradient_clip_val``; its `precision` is how the model computes.
        options: of Lightning's ``DDPStrategy``, such as ``timeout`` and ``process_group_backend``.

    Attributes:
        engine: the Engine, once ``fit`` has laid out the module; None before.

    Raises:
        ValueError: the Plan has another axis; the Trainer has a precision of its own; module or Trainer ask for what
            the Engine does not do: manual optimization, no optimizer, a ``backward`` of the module's own.
    """

    strategy_name = "tensorshard"
    optimizers: list[Any]

    def __init__(self, plan: Plan | str | os.PathLike[str] | None = None, **options: Any) -> None:
        self.plan = given_plan(plan)
        split = [f"{axis}={getattr(self.plan, axis)}" for axis in ("tp", "cp", "pp") if getattr(self.plan, axis) > 1]
        if split:
            raise ValueError(
                f"TensorshardStrategy was given a plan with {', '.join(split)}. Lightning's metrics and all_gather "
                f"count each process as one with data of its own, and its loop cannot hand a whole step to a pipeline: "
                f"take dp_shard and dp_replicate with any zero, or call tensorshard.parallelize and engine.step"
            )
        super().__init__(**options)
        self.engine: Engine | None = None
        self._read_from: Path | None = None  # the Engine's folder of the checkpoint that is being read

    # -- the module --

    def setup(self, trainer: Any) -> None:
        """Lays the module out, with the optimizer that ``configure_optimizers`` returns."""
        self.accelerator.setup(trainer)
        if self.engine is not None and self.engine.model is not self.lightning_module:
            self.engine = None  # another module
        if trainer.state.fn != TrainerFn.FITTING:
            if self.engine is None:
                self.model_to_device()
            return
        self._check(trainer)
        plan = replace(
            self.plan,
            micro_batches=agreed(
                "accumulate_grad_batches", trainer.accumulate_grad_batches, "micro_batches", self.plan.micro_batches, 1
            ),
            clip_grad_norm=agreed(
                "gradient_clip_val", trainer.gradient_clip_val, "clip_grad_norm", self.plan.clip_grad_norm, None
            ),
        )
        self.precision_plugin = _Precision(self)
        if self.engine is None:
            self._lay_out(trainer, plan)
        self.model = self.lightning_module

    def _lay_out(self, trainer: Any, plan: Plan) -> None:
        module = self.lightning_module
        self.model_to_device()
        self.setup_optimizers(trainer)
        if not any(group["params"] for optimizer in self.optimizers for group in optimizer.param_groups):
            raise ValueError(
                f"{type(module).__name__}.configure_optimizers returned no optimizer, and the Engine updates with one: "
                f"return it, or call tensorshard.parallelize_frozen for a module that is not trained"
            )
        by_value = trainer.gradient_clip_algorithm == "value"
        self.engine = parallelize(
            module,
            replace(plan, clip_grad_norm=None if by_value or trainer.gradient_clip_val else plan.clip_grad_norm),
            optimizer=rebuilt(self.optimizers[0], module, "TensorshardStrategy"),
            loss_fn=model_loss,
            device=self.root_device,
        )
        for config in self.lr_scheduler_configs:
            follow_optimizer(config.scheduler, self.engine.optimizer)
        self.optimizers = [self.engine.optimizer]

    def _check(self, trainer: Any) -> None:
        module, name = self.lightning_module, type(self.lightning_module).__name__
        if trainer.precision != "32-true":
            raise ValueError(
                f"Trainer(precision={trainer.precision!r}) was given with a Plan of precision={self.plan.precision!r}: "
                f"the Plan says how the model computes; leave the Trainer's out, and set Plan(precision='bf16')"
            )
        if not module.automatic_optimization:
            raise ValueError(
                f"{name}.automatic_optimization is False, and the strategy has to know which backward is a step's last "
                f"one: call tensorshard.parallelize, engine.backward and engine.optimizer.step() in your own loop"
            )
        if type(module).backward is not pl.LightningModule.backward:
            raise ValueError(f"{name} has a backward of its own; the Engine runs it, so add terms to the loss instead")
        if getattr(trainer, "accumulation_scheduler", None) is not None or any(
            type(one).__name__ == "GradientAccumulationScheduler" for one in trainer.callbacks
        ):
            raise ValueError(
                "the Trainer has a GradientAccumulationScheduler, and a Plan has one number of micro-batches: set "
                "accumulate_grad_batches"
            )

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's ``training_step``, as its forward, so that all that its code reads is there."""
        return self._forward_redirection(self.lightning_module, self.lightning_module, "training_step", *args, **kwargs)

    def _evaluated(self, step: str, *args: Any, **kwargs: Any) -> Any:
        return self._forward_redirection(self.lightning_module, self.lightning_module, step, *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`training_step`."""
        return self._evaluated("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`training_step`."""
        return self._evaluated("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`training_step`."""
        return self._evaluated("predict_step", *args, **kwargs)

    # -- a step --

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Forward and backward of the step's last micro-batch, and the Engine's update."""
        closure_result = self.precision_plugin._wrap_closure(model or self.lightning_module, optimizer, closure)
        self._laid_out().optimizer.step(**kwargs)
        return closure_result

    def _laid_out(self) -> Engine:
        if self.engine is None:
            raise RuntimeError("the module is laid out by trainer.fit, which was not called")
        return self.engine

    # -- files --

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Checkpoints are read once the module is laid out."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing: the Engine's folder has the weights."""
        return {} if self.engine is not None else super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Nothing: the Engine's folder has the states."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes a folder: the Engine's checkpoint, and Lightning's own state. Every rank calls it."""
        if self.engine is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        folder = Path(filepath)
        self.engine.save(folder / _FOLDER, overwrite=True)
        super().save_checkpoint(checkpoint, folder / _FILE, storage_options)
        self.barrier()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads a folder of :meth:`save_checkpoint`, or one of Lightning's files before a ``fit``."""
        folder = Path(checkpoint_path)
        self._read_from = folder / _FOLDER if (folder / _FOLDER).is_dir() else None
        if self._read_from is None and self.engine is not None:
            raise ValueError(
                f"{folder} is no checkpoint of TensorshardStrategy, a folder with {_FOLDER!r} in it: load the weights "
                f"of Lightning's file before fit, by {type(self.lightning_module).__name__}.load_from_checkpoint(path)"
            )
        if self._read_from is not None and self.engine is None:
            raise ValueError(
                f"{folder} is read by trainer.fit(ckpt_path=...), which lays the module out: call it first"
            )
        read: dict[str, Any] = super().load_checkpoint(
            folder if self._read_from is None else folder / _FILE, weights_only
        )
        return read

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Reads the Engine's checkpoint: weights and optimizer states."""
        if self._read_from is None:
            super().load_model_state_dict(checkpoint, strict)
        else:
            self._laid_out().load(self._read_from)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: :meth:`load_model_state_dict` has read the states."""

    def teardown(self) -> None:
        """Leaves a module that is laid out where it is."""
        if self.engine is None:
            super().teardown()
            return
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


class _Precision(Precision):  # type: ignore[misc, unused-ignore]
    """The Engine's backward and clipping, at the places where Lightning calls a precision's."""

    def __init__(self, strategy: TensorshardStrategy) -> None:
        super().__init__()
        self._strategy = strategy

    def backward(self, tensor: torch.Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Lightning has divided the loss by the micro-batches of the step."""
        engine = self._strategy._laid_out()
        engine.backward(tensor * engine.plan.micro_batches, last=not model.trainer.fit_loop._should_accumulate())

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        if clip_val > 0:
            self._strategy._laid_out().clip_grad_norm_(clip_val)

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        engine = self._strategy._laid_out()
        engine.gradient_norm()  # completes the gradients
        torch.nn.utils.clip_grad_value_(engine.model.parameters(), clip_val)
