"""parallelize() and the Engine: one optimizer step under any plan."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._guards import detect_fake_mode

from tensorshard.distributed.world import default_device, join_world, world_size
from tensorshard.loss_tally import Objective
from tensorshard.materialize import TensorSource, from_meta, from_module, record
from tensorshard.mesh import Mesh
from tensorshard.optim.build import OptimizerFactory, build_optimizer
from tensorshard.optim.gradients import clip_factor, global_norm, scale_gradients
from tensorshard.optim.head_groups import HeadGroup
from tensorshard.optim.loss_scaler import LossScaler
from tensorshard.passes import Passes, WholeModelPasses
from tensorshard.plan import Plan
from tensorshard.summary import Summary, summarize
from tensorshard.transforms.apply import apply_plan
from tensorshard.transforms.batch_norm import running_statistics
from tensorshard.transforms.checks import check_model
from tensorshard.transforms.head_checks import check_loss_function
from tensorshard.transforms.head_updates import HeadUpdate, check_updates, find_updates, take_updates, tell_updates
from tensorshard.transforms.precision import check_supported
from tensorshard.transforms.shard import ShardedModel

logger = logging.getLogger("tensorshard")

LossFunction = Callable[[Any, Any], Any]


class NonFiniteLossError(FloatingPointError):
    """The loss (or the gradient's norm) of a step is not a finite number; the step was not taken."""


def parallelize(
    model: nn.Module | Callable[[], nn.Module],
    plan: Plan,
    *,
    optimizer: OptimizerFactory,
    loss_fn: LossFunction,
    seed: int = 0,
    device: torch.device | str | None = None,
    sample_inputs: Any = None,
) -> "Engine":
    """Lays `model` out over the world as `plan` says.

    Under torchrun this joins that world; under plain ``python`` it is a world of one.

    Args:
        model: an ``nn.Module``, one on the meta device, or a callable that returns one. A callable is best: its
            constructor runs on fake tensors, and each weight is then made alone and cut to this rank's part, so that no
            rank ever holds the whole model. A module's own weights are those of rank 0 on every rank.
        plan: what to do.
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
            tensors to find out where `tp` can split and `pp` cut it. By default they are guessed from its layers.

    Raises:
        ValueError, TypeError: the plan or an argument cannot be honoured; raised before any memory is taken.
    """
    _check_arguments(model, plan, optimizer, loss_fn)
    device = torch.device(device) if device is not None else default_device()
    plan = plan.resolve(world_size())
    check_supported(plan.precision, device)
    if isinstance(model, nn.Module):
        check_model(model, plan)
        check_updates(model, find_updates(model), optimizer)
    join_world(device)
    source, agreed, updates = _weights_of(model, seed)
    check_model(source.module, plan)
    if not isinstance(model, nn.Module):
        check_updates(source.module, updates, optimizer)
    mesh = Mesh(plan, device.type)
    broadcast = not agreed and mesh.world_size > 1
    sharded = apply_plan(source, plan, mesh, device, broadcast=broadcast, sample_inputs=sample_inputs)
    # Dropout differs between data ranks and between pipeline ranks, and is repeatable.
    torch.manual_seed(seed * 1_000_003 + mesh.index("pp") * mesh.dp_size + mesh.dp_rank)
    if mesh.rank == 0:
        tell_updates(updates)
    groups = [update.group() for update in updates]
    return Engine(sharded, plan, mesh, optimizer=optimizer, loss_fn=loss_fn, device=device, head_groups=groups)


class Engine:
    """A model, its optimizer and one call, :meth:`step`, under any plan. Made by :func:`parallelize`.

    Attributes:
        model: callable as before; its parameters are this rank's. A loop of one's own works too:
            ``engine.model(x)``, ``loss.backward()``, ``engine.optimizer.step()``, ``engine.optimizer.zero_grad()``:
            gradients are then averaged over the data ranks, as with DistributedDataParallel.
            With a pipeline it holds this rank's stages, and cannot be called.
        optimizer: updates the masters; learning-rate schedulers are built on it.
        step_count: optimizer steps taken, skipped ones of fp16 included.
        measure_grad_norm: whether the next steps set :attr:`grad_norm` even where the plan does not need it.
        grad_norm: L2 norm of the whole model's gradient in the last step, before clipping; None if not measured.
        scaler: the loss scaler of fp16, or None.
    """

    def __init__(
        self,
        sharded: ShardedModel,
        plan: Plan,
        mesh: Mesh,
        *,
        optimizer: OptimizerFactory,
        loss_fn: LossFunction,
        device: torch.device,
        head_groups: Sequence[HeadGroup] = (),
    ) -> None:
        self.plan = plan
        self.mesh = mesh
        self.device = device
        self.model = sharded.model
        self.sharded = sharded
        self.loss_fn = loss_fn
        self.step_count = 0
        self.measure_grad_norm = False
        self.grad_norm: torch.Tensor | None = None
        self.scaler = LossScaler() if plan.precision == "fp16" else None
        self._trained = {name: p for name, p in sharded.masters().items() if p.requires_grad}
        self._ways_split = sharded.ways_split()
        objective = Objective(loss_fn, plan.precision, device)
        self._passes = _passes_for(sharded, plan, mesh, objective, device)
        self._running_statistics = running_statistics(sharded.model)
        self.optimizer = build_optimizer(optimizer, self._trained, head_groups)
        self.optimizer.register_step_pre_hook(lambda *_: sharded.finish_backward())
        self.optimizer.register_step_post_hook(lambda *_: sharded.publish_update())

    # -- one step --

    def step(self, inputs: Any, targets: Any) -> torch.Tensor:
        """One optimizer step on this data rank's batch, all its micro-batches. Gradients from before are discarded.

        Args:
            inputs: a tensor, or a tuple or dict of them (positional or keyword arguments of the model), samples first.
            targets: what the loss function takes beside the output, samples first.

        Returns:
            The mean loss over the whole global batch before the update: a scalar, the same on every rank.

        Raises:
            ValueError: the batch does not split into ``plan.micro_batches``.
            NonFiniteLossError: the loss is NaN or infinite. Weights, optimizer and the running statistics of batch
                normalizations are as before the step.
        """
        kept = [buffer.clone() for buffer in self._running_statistics]
        try:
            return self._step(inputs, targets)
        except NonFiniteLossError:
            self.optimizer.zero_grad(set_to_none=True)
            for buffer, value in zip(self._running_statistics, kept, strict=True):
                buffer.copy_(value)
            raise

    def _step(self, inputs: Any, targets: Any) -> torch.Tensor:
        loss = self._passes.train(inputs, targets, self.scaler.scale if self.scaler else 1.0)
        self._check_finite(loss.mean, "loss")
        if self._rescale_gradients(loss.correction):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step_count += 1
        return loss.mean

    @torch.no_grad()
    def evaluate(self, inputs: Any, targets: Any) -> torch.Tensor:
        """The mean loss over the global batch, in evaluation mode: a scalar, the same on every rank."""
        with self._evaluation_mode():
            return self._passes.evaluate(inputs, targets)

    @torch.no_grad()
    def predict(self, inputs: Any) -> Any:
        """The model's output for this data rank's batch, in evaluation mode, 16-bit tensors as fp32.

        Ranks that differ only along tp, cp or pp pass the same batch and all get the output. With a pipeline the batch
        goes through it in micro-batches, whose outputs are put together along their first dimension.

        Raises:
            ValueError: outputs of micro-batches that cannot be put together.
        """
        with self._evaluation_mode():
            return self._passes.predict(inputs)

    @contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        training = [module for module in self.model.modules() if module.training]  # some may be frozen in eval mode
        self.model.eval()
        try:
            yield
        finally:
            for module in training:
                module.training = True

    def _rescale_gradients(self, correction: torch.Tensor | None) -> bool:
        """Normalizes, unscales and clips the gradients in one pass; False if fp16 overflowed and the step is off."""
        clip = self.plan.clip_grad_norm
        factor: torch.Tensor | float | None = correction
        if self.scaler is not None:
            factor = (1.0 if factor is None else factor) / self.scaler.scale
        self.grad_norm = None
        if clip is not None or self.scaler is not None or self.measure_grad_norm:
            norm = global_norm(
                self._trained.values(),
                self._ways_split,
                self.mesh.world_group,
                device=self.device,
                always_sum=self.mesh.degrees["pp"] > 1,
            )
            self.grad_norm = norm if factor is None else norm * factor
            if self.scaler is not None:
                overflowed = not _is_finite(self.grad_norm)
                exhausted = overflowed and self.scaler.is_smallest
                self.scaler.update(overflowed)
                if overflowed and not exhausted:
                    return False
            self._check_finite(self.grad_norm, "norm of the gradient")
            if clip is not None:
                clipping = clip_factor(self.grad_norm, clip)
                factor = clipping if factor is None else factor * clipping
        if factor is not None and not _is_one(factor):
            scale_gradients(self._trained.values(), factor)
        return True

    def _check_finite(self, value: torch.Tensor, what: str) -> None:
        if _is_finite(value):
            return
        raise NonFiniteLossError(
            f"the {what} of step {self.step_count + 1} is {value.item()}; the step was not taken, so weights and "
            f"optimizer are those after step {self.step_count}. A lower learning rate, clip_grad_norm, or "
            f"precision='bf16' or 'fp32' instead of 'fp16' are the usual remedies"
        )

    # -- state --

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The original model's state dict: full tensors on the CPU, fp32 or wider, on rank 0; {} elsewhere.

        A collective: every rank must call it.
        """
        return self.sharded.full_state_dict(keep=self.mesh.rank == 0)

    def save(self, path: Any, *, extra: dict[str, Any] | None = None) -> None:
        """Writes a checkpoint to the folder `path`: weights, optimizer, scaler, random state, step count and `extra`.

        It is written under a temporary name and renamed, so that `path` is whole or absent. A collective.

        Raises:
            FileExistsError: `path` is there already; nothing is overwritten.
        """
        from tensorshard.checkpoint import save

        save(self, path, extra or {})

    def load(self, path: Any) -> dict[str, Any]:
        """Reads a checkpoint, written under any plan on any number of ranks; returns its `extra`. A collective.

        Raises:
            FileNotFoundError: `path` is no checkpoint.
            ValueError: its tensors are not those of this model or optimizer; names the first that differ.
        """
        from tensorshard.checkpoint import load

        return load(self, path)

    def draw_schedule(self, path: Any = None, *, micro_batches: int | None = None) -> str:
        """Who computes what when in a step of the plan's pipeline, and its bubble's share, as text.

        A forward is drawn as long as a backward of inputs, and as one of parameters, and all stages alike.

        Args:
            path: where to write a drawing, too: "schedule.svg", or "schedule.txt" for the text.
            micro_batches: how many, if not as the plan says.

        Raises:
            ValueError: the plan has no pipeline.
        """
        from tensorshard.pipeline.draw import timeline

        if self.plan.pp == 1:
            raise ValueError("the plan has pp=1, so there is no schedule to draw; set pp to 2 or more")
        drawn = timeline(
            self.plan.pp_schedule,
            ranks=self.plan.pp,
            stages_per_rank=self.plan.stages_per_rank,
            micro_batches=micro_batches or self.plan.micro_batches,
        )
        if path is not None and self.mesh.rank == 0:
            drawn.save(path)
        return drawn.text()

    def summary(self) -> Summary:
        """What is held where: dtypes, and parameters on this rank."""
        return summarize(self.plan, self.sharded, self.optimizer)


def _passes_for(sharded: ShardedModel, plan: Plan, mesh: Mesh, objective: Objective, device: torch.device) -> Passes:
    if plan.pp == 1:
        return WholeModelPasses(sharded, plan, mesh, objective, device)
    from tensorshard.pipeline_passes import PipelinePasses
    from tensorshard.transforms.pipelined import PipelinedModel

    assert isinstance(sharded, PipelinedModel)
    return PipelinePasses(sharded, plan, mesh, objective, device)


def _weights_of(model: nn.Module | Callable[[], nn.Module], seed: int) -> tuple[TensorSource, bool, list[HeadUpdate]]:
    """Where the initial weights come from, whether they are the same on every rank by construction, and what the
    model's heads were to update by themselves, which is switched off."""
    if not isinstance(model, nn.Module):
        updates: list[HeadUpdate] = []

        def build() -> nn.Module:
            built = model()
            if isinstance(built, nn.Module):
                updates[:] = take_updates(built)
            return built

        return record(build, seed=seed), True, updates
    updates = take_updates(model)
    if any(parameter.is_meta for parameter in model.parameters()):
        return from_meta(model, seed=seed), True, updates
    return from_module(model), False, updates


def _check_arguments(model: Any, plan: Any, optimizer: Any, loss_fn: Any) -> None:
    if not isinstance(plan, Plan):
        raise TypeError(f"plan is a {type(plan).__name__}; it must be a tensorshard.Plan")
    if not callable(model):
        raise TypeError(f"model is a {type(model).__name__}; it must be an nn.Module or a callable that returns one")
    if isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}; it must be a callable from parameters to an optimizer, such "
            f"as functools.partial(torch.optim.AdamW, lr=3e-4), because the parameters it updates do not exist yet"
        )
    if not callable(loss_fn):
        raise TypeError(f"loss_fn is a {type(loss_fn).__name__}; it must be a callable (output, targets) -> loss")
    check_loss_function(loss_fn)


def _is_finite(value: torch.Tensor) -> bool:
    return detect_fake_mode(value) is not None or math.isfinite(value.item())


def _is_one(factor: torch.Tensor | float) -> bool:
    """Whether multiplying can be left out; not asked of a GPU, where reading the answer costs more."""
    if isinstance(factor, torch.Tensor):
        return factor.device.type == "cpu" and detect_fake_mode(factor) is None and factor.item() == 1.0
    return factor == 1.0
