"""What happens to a step's gradients between the last backward and the update: unscaling, hooks, checks, clipping."""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from tensorshard.engine.gradients import clip_factor, global_norm, scale_gradients
from tensorshard.engine.loss_scaler import LossScaler
from tensorshard.mesh import Mesh
from tensorshard.offload.offloaded_gradients import OffloadedGradients
from tensorshard.plan import Plan
from tensorshard.sharded_model import ShardedModel
from tensorshard.torch_private.fake_tensors import detect_fake_mode
from tensorshard.torch_private.tensors import count_gradient_hooks

GradientHook = Callable[[str, torch.Tensor], torch.Tensor | None]


class NonFiniteLossError(FloatingPointError):
    """The loss (or the gradient's norm) of a step is not a finite number; the step was not taken."""


class HookHandle:
    """Removes a gradient hook."""

    def __init__(self, hooks: dict[int, GradientHook], key: int) -> None:
        self._hooks, self._key = hooks, key

    def remove(self) -> None:
        """The hook is no longer called. A second call does nothing."""
        self._hooks.pop(self._key, None)


class FinalGradients:
    """The complete gradients of a laid-out model. All calls are collectives of the mesh.

    Args:
        scaler: the loss scaler of fp16, or None.
        device: where the norm travels.

    Attributes:
        norm: L2 norm of the whole model's gradient in the last step, before clipping; None if not measured.
        offloaded: the gradients in host memory or on disk; None if they stay on the device.
        left: the factor of the last gradients: they were multiplied by it, or the update still has to do so. None for
            no factor.
    """

    def __init__(
        self, sharded: ShardedModel, plan: Plan, mesh: Mesh, scaler: LossScaler | None, device: torch.device
    ) -> None:
        self.trained = sharded.trained_masters()
        self.norm: torch.Tensor | None = None
        self.left: torch.Tensor | float | None = None
        self.offloaded: OffloadedGradients | None = None
        self._num_shards = sharded.num_shards()
        self._plan = plan
        self._mesh = mesh
        self._scaler = scaler
        self._device = device
        self._hooks: dict[int, GradientHook] = {}
        self._sharded = sharded
        self._own_hooks = {name: count_gradient_hooks(p) for name, p in sharded.shown_parameters().items()}
        self._registered = 0

    def register_hook(self, hook: GradientHook) -> HookHandle:
        """Registers a `hook` that :meth:`prepare` calls, after earlier ones.

        Raises:
            TypeError: `hook` cannot be called.
        """
        if not callable(hook):
            raise TypeError(
                f"hook is a {type(hook).__name__}; it must be a function, which is called as hook(name, gradient)"
            )
        self._registered += 1
        self._hooks[self._registered] = hook
        return HookHandle(self._hooks, self._registered)

    def prepare(
        self,
        loss: torch.Tensor | None,
        factor: torch.Tensor | float | None,
        *,
        steps_taken: int,
        measure: bool = False,
        scale: bool = True,
    ) -> bool:
        """Normalizes, checks and clips the gradients in one pass. False: fp16 overflowed, and the step is skipped.

        Args:
            loss: whose gradients they are; None if it is not known.
            factor: the gradients still have to be multiplied by it; None for no factor.
            steps_taken: how many steps were taken before this one.
            measure: whether :attr:`norm` is set even where the plan does not need it.
            scale: whether this multiplies the gradients; else the update does, by :attr:`left`.

        Raises:
            NonFiniteLossError: the `loss`, or the gradient, is not finite.
            RuntimeError: a parameter has a hook of torch's, which would see gradients of one rank alone, or none.
        """
        self._check_no_hooks_of_torch()
        self.refresh()
        if self._hooks:
            factor = self._call_hooks(factor)
        clip = self._plan.clip_grad_norm
        norm = self.measure(spoil=self._sharded.writers if self._has_others else None)
        finite, written = _read([norm] if loss is None else [norm, loss], self._sharded.writers)
        if self._has_others:
            if not finite[0]:  # on every rank
                self._compare_written_everywhere(written)
                norm = self.measure()
                finite[0] = _are_finite(norm)
        elif written:
            self._sharded.compare_written()
        if not all(finite):
            if loss is not None:
                _check_finite(loss, "loss", steps_taken)
            norm = self.measure(torch.float64)  # squares of large numbers overflow in fp32
        norm = norm if factor is None else norm * factor
        self.norm = norm if clip is not None or self._scaler is not None or measure else None
        if self._scaler is not None:
            overflowed = not _are_finite(norm)
            exhausted = overflowed and self._scaler.is_smallest
            self._scaler.update(overflowed)
            if overflowed and not exhausted:
                return False
        _check_finite(norm, "norm of the gradient", steps_taken)
        if clip is not None:
            clipping = clip_factor(norm, clip)
            factor = clipping if factor is None else factor * clipping
        self.left = None if factor is None or _is_one(factor) else factor
        if scale and self.left is not None:
            self.scale(self.left)
        return True

    @property
    def _has_others(self) -> bool:
        """Whether there are ranks that are no data ranks of this one. What was written to their parts of the model, its
        stages or shards, they compare with their own; the norm shows all ranks that someone has to."""
        return self._mesh.dp_size < self._mesh.world_size

    def _compare_written_everywhere(self, written: bool) -> None:
        """Compares what was `written`, by user code of some data rank, to this rank's part of the model. A collective
        of all ranks, so that they raise together."""
        refused: str | None = None
        if written:
            try:
                self._sharded.compare_written()
            except RuntimeError as error:
                refused = str(error)
        messages: list[str | None] = [None] * self._mesh.world_size
        dist.all_gather_object(messages, refused, group=self._mesh.world_group)
        for message in messages:
            if message is not None:
                raise RuntimeError(message)

    def refresh(self) -> list[str]:
        """Looks which parameters are trained now; returns the names of those that were not before."""
        before, self.trained = self.trained, self._sharded.trained_masters()
        return [name for name in self.trained if name not in before]

    def measure(self, dtype: torch.dtype | None = None, *, spoil: torch.Tensor | None = None) -> torch.Tensor:
        """The L2 norm of the gradients as they are: a scalar in fp64, the same on every rank.

        Args:
            dtype: of the sum of squares; that of the gradients by default.
            spoil: if it is above 0 on some rank, the norm is NaN on all.
        """
        return global_norm(
            self.trained.values(),
            self._num_shards,
            self._mesh.world_group,
            device=self._device,
            always_sum=self._has_others,
            dtype=dtype,
            known=None if self.offloaded is None else self.offloaded.norm,
            spoil=spoil,
        )

    def scale(self, factor: torch.Tensor | float) -> None:
        """Multiplies all gradients by `factor`."""
        scale_gradients(self.trained.values(), factor)

    def _check_no_hooks_of_torch(self) -> None:
        for name, parameter in self._sharded.shown_parameters().items():
            if count_gradient_hooks(parameter) > self._own_hooks[name]:
                raise RuntimeError(
                    f"parameter {name!r} has a hook (register_hook, register_post_accumulate_grad_hook), which sees "
                    f"gradients of one rank alone, or none: use engine.register_gradient_hook(hook), which is called "
                    f"as hook(name, gradient) before each update"
                )

    @torch.no_grad()
    def _call_hooks(self, factor: torch.Tensor | float | None) -> None:
        """Calls the hooks with the final gradients; no factor is left after that."""
        if factor is not None and not _is_one(factor):
            self.scale(factor)
        for hook in list(self._hooks.values()):
            for name, parameter in self.trained.items():
                if parameter.grad is None:
                    continue
                changed = hook(name, parameter.grad)
                if changed is not None:
                    _check_like(changed, parameter.grad, name)
                    parameter.grad = changed


def _check_like(changed: object, gradient: torch.Tensor, name: str) -> None:
    alike = isinstance(changed, torch.Tensor) and type(changed) is type(gradient)
    if alike and changed.shape == gradient.shape and changed.dtype == gradient.dtype:  # type: ignore[attr-defined]
        return
    found = f"{type(changed).__name__}" + (f" {list(changed.shape)}" if isinstance(changed, torch.Tensor) else "")
    raise TypeError(
        f"a gradient hook returned {found} for {name!r}; it must return None, or a tensor like the gradient that it "
        f"was given: {type(gradient).__name__} {list(gradient.shape)} of {gradient.dtype}"
    )


def _check_finite(value: torch.Tensor, what: str, steps_taken: int) -> None:
    if _are_finite(value):
        return
    raise NonFiniteLossError(
        f"the {what} of step {steps_taken + 1} is {value.item()}; the step was not taken, so weights and "
        f"optimizer are those after step {steps_taken}. A lower learning rate, clip_grad_norm, or "
        f"precision='bf16' or 'fp32' instead of 'fp16' are the usual remedies"
    )


def _read(values: list[torch.Tensor], flag: torch.Tensor | None) -> tuple[list[bool], bool]:
    """Which of `values` are finite, and whether `flag` is above 0. One read from the device."""
    if detect_fake_mode(values) is not None:
        return [True] * len(values), False
    everything = values if flag is None else [*values, flag]
    numbers = torch.stack([value.detach().double() for value in everything]).tolist()
    return [math.isfinite(number) for number in numbers[: len(values)]], flag is not None and numbers[-1] > 0


def _are_finite(*values: torch.Tensor) -> bool:
    """Whether all `values` are finite. They are read together, since each read from a GPU has to wait for it."""
    if detect_fake_mode(values) is not None:
        return True
    return all(map(math.isfinite, torch.stack([value.detach().double() for value in values]).tolist()))


def _is_one(factor: torch.Tensor | float) -> bool:
    """Whether `factor` is known to be 1. One on a GPU is not read, since that costs more than multiplying."""
    if isinstance(factor, torch.Tensor):
        return factor.device.type == "cpu" and detect_fake_mode(factor) is None and factor.item() == 1.0
    return factor == 1.0
