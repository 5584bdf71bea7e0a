"""What happens to a step's gradients between the last backward and the update: unscaling, hooks, checks, clipping."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tensorshard.comm.collectives import all_gather_into, all_reduce_
from tensorshard.comm.sharding import distribute_like, local_gradients, on_mesh_device, scale_gradients
from tensorshard.comm.world import world
from tensorshard.common.words import kind_of
from tensorshard.data_parallel.sharded_model import ShardedModel
from tensorshard.model.watched_parameters import gradient_hooks, have_gradient_hooks
from tensorshard.plan.mesh import Mesh
from tensorshard.plan.plan import Plan
from tensorshard.plan.storage import Update
from tensorshard.torch_private.operators import foreach_norm

GradientHook = Callable[[str, torch.Tensor], torch.Tensor | None]


_SMALLEST_SCALE = 1.0
_USUAL_REMEDIES = (
    "A lower learning rate, clip_grad_norm, or precision='bf16' or 'fp32' instead of 'fp16' are the usual remedies"
)

# The largest relative difference between ranks, in the norm of gradients that all hold, that rounding explains.
_ROUNDING = 1e-3
_NOTHING = 1e-5  # of the norm of all gradients; a smaller norm is rounding alone


@dataclass
class LossScaler:
    """Dynamic loss scaling for fp16 (Micikevicius et al. 2018).

    It keeps the largest power of two that gradients can be multiplied by without overflowing.

    A step whose gradients overflowed on any rank is skipped on all of them and halves the scale; `growth_interval`
    steps without one double it.
    """

    scale: float = 2.0**16
    growth_interval: int = 2000
    steps_since_overflow: int = 0

    @property
    def is_smallest(self) -> bool:
        """Whether the scale is as small as it gets: gradients that overflow would do so without scaling, too."""
        return self.scale <= _SMALLEST_SCALE

    def update(self, overflowed: bool) -> None:
        """Adapts the scale after a step."""
        if overflowed:
            self.scale = max(_SMALLEST_SCALE, self.scale / 2)
            self.steps_since_overflow = 0
            return
        self.steps_since_overflow += 1
        if self.steps_since_overflow >= self.growth_interval:
            self.scale *= 2
            self.steps_since_overflow = 0

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "steps_since_overflow": self.steps_since_overflow}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale = float(state["scale"])
        self.steps_since_overflow = int(state["steps_since_overflow"])


class NonFiniteLossError(FloatingPointError):
    """The loss (or the gradient's norm) of a step is not a finite number; the step was not taken.

    Args:
        fact: what is not finite, at which step.
        cause: where it comes from, and what would work, if that is known.
    """

    def __init__(self, fact: str, cause: str | None = None) -> None:
        super().__init__(f"{fact}. {cause or _USUAL_REMEDIES}")
        self.fact = fact


class GradientNorm(float):
    """The norm of a gradient: a number. Its ``item()`` is for code that expects a tensor."""

    def item(self) -> float:
        """The number."""
        return float(self)


class HookHandle:
    """Removes a gradient hook."""

    def __init__(self, hooks: dict[int, GradientHook], key: int) -> None:
        self._hooks, self._key = hooks, key

    def remove(self) -> None:
        """The hook is no longer called. A second call does nothing."""
        self._hooks.pop(self._key, None)


@dataclass(frozen=True)
class CheckedGradients:
    """Gradients that are finite and complete.

    Args:
        scale: what the update multiplies them by; None for 1.
    """

    scale: torch.Tensor | float | None


class NotTakenError(Exception):
    """Raised where an update was launched, and is not to be taken, so that it has changed nothing."""


@dataclass(frozen=True)
class LaunchedCheck:
    """A check of gradients whose result is on its way to the host, so that the update can be launched before it is.

    Args:
        skip: 1 where the update is not to be taken, in fp32.
        scale: what the update multiplies gradients by; 1 where `skip` is, None for 1 everywhere.
    """

    norm: torch.Tensor
    skip: torch.Tensor
    scale: torch.Tensor | None
    _read: Callable[[], float]

    def passed(self) -> bool:
        """Whether the update is taken. Waits until that is known here, and not for the update."""
        return self._read() == 0.0


class FinalGradients:
    """The complete gradients of a sharded model. All calls are collectives of the mesh.

    Args:
        scaler: the loss scaler of fp16, or None.
        device: where the norm travels.
        update: the one that the gradients are for.

    Attributes:
        norm: L2 norm of the whole model's gradient in the last step, before clipping; None before the first.
        moves_gradients: whether they leave the device when they are reduced.
    """

    def __init__(
        self,
        sharded: ShardedModel,
        plan: Plan,
        mesh: Mesh,
        scaler: LossScaler | None,
        device: torch.device,
        update: Update,
    ) -> None:
        self.trained = sharded.trained_masters()
        self.norm: torch.Tensor | None = None
        self.moves_gradients = update.moves_gradients
        self._known_norm = update.gradient_norm if update.moves_gradients else None
        self._num_shards = sharded.num_shards()
        self._plan = plan
        self._mesh = mesh
        self._scaler = scaler
        self._device = device
        self._hooks: dict[int, GradientHook] = {}
        self._sharded = sharded
        self._shown = sharded.shown_parameters()
        self._registered = 0

    def register_hook(self, hook: GradientHook) -> HookHandle:
        """Registers a `hook` that :meth:`prepare` calls, after earlier ones.

        Raises:
            TypeError: `hook` cannot be called.
        """
        if not callable(hook):
            raise TypeError(f"hook is {kind_of(hook)}; it must be a function, which is called as hook(name, gradient)")
        self._registered += 1
        self._hooks[self._registered] = hook
        return HookHandle(self._hooks, self._registered)

    def launch_check(self, loss: torch.Tensor, factor: torch.Tensor | float | None) -> "LaunchedCheck | None":
        """Checks gradients as :meth:`prepare` does, without its result yet. None where that cannot wait: for gradients
        on the host, and where hooks get them."""
        has_hooks = bool(self._hooks) or self.has_parameter_hooks()
        if not _reads_later(self._device) or has_hooks or self.moves_gradients or world().is_simulated:
            return None
        self.refresh()
        writers = self._sharded.writers
        norm = self.measure(spoil=writers if self._has_others else None)
        final = _scaled(norm, factor)
        values = torch.stack([value.detach().double() for value in (norm, final, loss)])
        fails = ~values.isfinite().all()
        if writers is not None:
            fails = fails | (writers > 0)
        if self._plan.clip_grad_norm is not None:
            clipping = clip_factor(final, self._plan.clip_grad_norm)
            factor = clipping if factor is None else factor * clipping
        if isinstance(factor, float):
            factor = torch.full((), factor, dtype=torch.float64, device=fails.device)
        scale = None if factor is None else torch.where(fails, 1.0, factor)
        skip = fails.float()
        return LaunchedCheck(final, skip, scale, _started_read(skip))

    def conclude(self, check: LaunchedCheck) -> bool:
        """Whether the update is taken whose `check` was launched; if so, notes it as :meth:`prepare` does."""
        if not check.passed():
            return False
        self.norm = check.norm
        if self._scaler is not None:
            self._scaler.update(overflowed=False)
        return True

    def prepare(
        self,
        loss: torch.Tensor | None,
        factor: torch.Tensor | float | None,
        *,
        steps_taken: int,
    ) -> "CheckedGradients | None":
        """Checks the gradients, and finds the scale by which the update normalizes and clips them, in one pass.

        None: fp16 overflowed, and the step is skipped.

        Args:
            loss: whose gradients they are; None if it is not known.
            factor: the gradients still have to be multiplied by it; None for no factor.
            steps_taken: how many steps were taken before this one.

        Raises:
            NonFiniteLossError: the `loss`, or the gradient, is not finite.
        """
        self.refresh()
        if self._hooks:
            factor = self._call_hooks(factor)
        clip = self._plan.clip_grad_norm
        norm = self.measure(spoil=self._sharded.writers if self._has_others else None)
        final = _scaled(norm, factor)
        checked = [norm, final] if loss is None else [norm, final, loss]
        finite, written = _read(checked, self._sharded.writers)
        if self._has_others:
            if not finite[0]:  # on every rank
                self._compare_written_everywhere(written)
                norm = self.measure()
                final = _scaled(norm, factor)
                finite[:2], _ = _read([norm, final], None)
        elif written:
            self._sharded.compare_written()
        is_finite = finite.pop(1)
        if not all(finite):
            if loss is not None:
                _check_finite(loss, "loss", steps_taken)
            norm = self.measure(torch.float64)  # squares of large numbers overflow in fp32
            final = _scaled(norm, factor)
            is_finite = _are_finite(final)
        self.norm = norm = final
        if self._scaler is not None:
            exhausted = not is_finite and self._scaler.is_smallest
            self._scaler.update(not is_finite)
            if not is_finite and not exhausted:
                return None
        if not is_finite:
            _check_finite(norm, "norm of the gradient", steps_taken)
        if clip is not None:
            clipping = clip_factor(norm, clip)
            factor = clipping if factor is None else factor * clipping
        return CheckedGradients(None if factor is None or _is_one(factor) else factor)

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
            known=self._known_norm,
            spoil=spoil,
        )

    def scale(self, factor: torch.Tensor | float | None) -> None:
        """Multiplies all gradients by `factor`; None for 1."""
        if factor is None:
            return
        scale_gradients(self.trained.values(), factor)

    def check_equal_on_tensor_ranks(self) -> None:
        """Refuses gradients that each rank has clipped by the norm of its own parts.

        All tensor-parallel ranks must clip by the same factor.

        Raises:
            RuntimeError: the tensor-parallel ranks' norms differ, of gradients that all of them hold.
        """
        if self._mesh.degrees["tp"] == 1:
            return
        with_gradient = {name: p for name, p in self.trained.items() if p.grad is not None}
        squares = torch.zeros(2, dtype=torch.float64, device=self._device)  # of those that all ranks hold; of all
        if with_gradient:
            norms = foreach_norm(local_gradients(with_gradient.values()), 2.0, None)
            each = torch.stack([norm.double().to(self._device) for norm in norms]).square()
            shared_by_all = [self._sharded.split.num_shards(name) == 1 for name in with_gradient]
            squares = torch.stack([each[torch.tensor(shared_by_all, device=each.device)].sum(), each.sum()])
        everyone = squares.new_empty(2 * self._mesh.degrees["tp"])
        all_gather_into(
            everyone, squares.sqrt(), self._mesh.group("tp"), what="the norms of gradients before an update"
        )
        if world().is_simulated:
            return
        shared, all_of_them = everyone.view(-1, 2).unbind(1)
        least, most = shared.min().item(), shared.max().item()
        # A norm that is only rounding may differ.
        if most - least > _ROUNDING * most and most > _NOTHING * all_of_them.max().item():
            raise RuntimeError(
                f"the tensor-parallel ranks hold different gradients of the same parameters (norms {least:.6g} to "
                f"{most:.6g}), so something changed them rank by rank, as torch.nn.utils.clip_grad_norm_ does, which "
                f"measures the parts that a rank holds: set Plan(clip_grad_norm=...), by which "
                f"engine.optimizer.step() clips, or call engine.clip_grad_norm_(max_norm)"
            )

    def has_parameter_hooks(self) -> bool:
        """Whether user code has called ``register_hook``, or its sibling, on parameters of the model."""
        return have_gradient_hooks(self._shown.values())

    @torch.no_grad()
    def call_parameter_hooks(self) -> None:
        """Calls those hooks with the complete gradients, which need no more factor. A collective."""
        shown = self._shown
        hooks = {name: gradient_hooks(shown[name]) for name in self.trained if name in shown}
        for name, (before, _) in hooks.items():
            master = self.trained[name]
            whole, held = self._sharded.whole(name), master.grad
            if not before:
                continue
            with self._sharded.calling_user():
                if whole is not None:
                    gradient = whole.whole_gradient(master, held)
                else:
                    gradient = on_mesh_device(held).full_tensor() if isinstance(held, DTensor) else held
                for hook in before if gradient is not None else ():
                    changed = hook(gradient)
                    if changed is not None:
                        _check_like(changed, gradient, name)
                        gradient = changed
            if held is None or gradient is None:
                continue
            if whole is not None:
                master.grad = whole.part_like(master, gradient)
            else:
                master.grad = distribute_like(gradient, held) if isinstance(held, DTensor) else gradient
        if any(after for _, after in hooks.values()):
            self._sharded.show_gradients()
            for name, (_, after) in hooks.items():
                for hook in after:
                    with self._sharded.calling_user():
                        hook(shown[name])
            self._sharded.average_given_gradients()

    @torch.no_grad()
    def _call_hooks(self, factor: torch.Tensor | float | None) -> None:
        """Calls the hooks with the final gradients; no factor is left after that."""
        if factor is not None and not _is_one(factor):
            self.scale(factor)
        wholes = {name: self._sharded.whole(name) for name in self.trained}
        for hook in list(self._hooks.values()):
            for name, parameter in self.trained.items():
                whole, held = wholes[name], parameter.grad
                with self._sharded.calling_user():
                    gradient = parameter.grad if whole is None else whole.whole_gradient(parameter, held)
                    if gradient is None:
                        continue
                    changed = hook(name, gradient)
                if changed is None:
                    continue
                _check_like(changed, gradient, name)
                if held is not None:  # else this rank has no part of it
                    parameter.grad = changed if whole is None else whole.part_like(parameter, changed)


def _check_like(changed: object, gradient: torch.Tensor, name: str) -> None:
    same_kind = isinstance(changed, torch.Tensor) and isinstance(changed, DTensor) is isinstance(gradient, DTensor)
    if same_kind and changed.shape == gradient.shape and changed.dtype == gradient.dtype:  # type: ignore[attr-defined]
        return
    given = f"{type(changed).__name__}" + (f" {list(changed.shape)}" if isinstance(changed, torch.Tensor) else "")
    raise TypeError(
        f"a gradient hook returned {given} for {name!r}; it must return None, or a tensor like the gradient that it "
        f"was given: {type(gradient).__name__} {list(gradient.shape)} of {gradient.dtype}"
    )


def _scaled(norm: torch.Tensor, factor: torch.Tensor | float | None) -> torch.Tensor:
    return norm if factor is None else norm * factor


def _check_finite(value: torch.Tensor, what: str, steps_taken: int) -> None:
    if _are_finite(value):
        return
    raise NonFiniteLossError(
        f"the {what} of step {steps_taken + 1} is {value.item()}; the step was not taken, so weights and "
        f"optimizer are those after step {steps_taken}"
    )


def _read(values: list[torch.Tensor], flag: torch.Tensor | None) -> tuple[list[bool], bool]:
    """Which of `values` are finite, and whether `flag` is above 0. One read from the device."""
    if world().is_simulated:
        return [True] * len(values), False
    everything = values if flag is None else [*values, flag]
    numbers = torch.stack([value.detach().double() for value in everything]).tolist()
    return [math.isfinite(number) for number in numbers[: len(values)]], flag is not None and numbers[-1] > 0


def _reads_later(device: torch.device) -> bool:
    """Whether a value of `device` reaches the host later than it is computed."""
    return device.type == "cuda"


def _started_read(value: torch.Tensor) -> Callable[[], float]:
    """Starts to copy a scalar to the host; what is returned waits for that, and not for what is launched meanwhile."""
    there = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.device.type == "cuda")
    there.copy_(value, non_blocking=True)
    arrived = torch.get_device_module(value.device).Event()
    arrived.record()

    def read() -> float:
        arrived.synchronize()
        return float(there.item())

    return read


def _are_finite(*values: torch.Tensor) -> bool:
    """Whether all `values` are finite. They are read together, since each read from a GPU has to wait for it."""
    if world().is_simulated:
        return True
    return all(map(math.isfinite, torch.stack([value.detach().double() for value in values]).tolist()))


def _is_one(factor: torch.Tensor | float) -> bool:
    """Whether `factor` is known to be 1. One on a GPU is not read, since that costs more than multiplying."""
    if isinstance(factor, torch.Tensor):
        return factor.device.type == "cpu" and world().known(factor, 0.0) == 1.0
    return factor == 1.0


def global_norm(
    parameters: Iterable[torch.Tensor],
    num_shards: Mapping[torch.Tensor, float],
    group: dist.ProcessGroup,
    *,
    device: torch.device | None = None,
    always_sum: bool = False,
    dtype: torch.dtype | None = None,
    known: Callable[[Any], torch.Tensor | None] | None = None,
    spoil: torch.Tensor | None = None,
) -> torch.Tensor:
    """L2 norm over the gradients of all `parameters`, on every rank the same: a scalar in fp64.

    Each tensor counts once however many ranks hold a copy: a rank's share of the sum of squares is divided by the
    number of copies, and one sum over `group`, the world, does the rest.

    Args:
        num_shards: over how many ranks each parameter's elements are split; the other ranks hold copies.
        device: on which the sum is sent.
        always_sum: whether every rank takes part in the sum, even if it could compute the norm alone. This is needed
            where ranks have different parameters, as in a pipeline.
        dtype: of the sum of squares; that of the gradients by default.
        known: this rank's norm of a parameter's gradient if it is known already, else None.
        spoil: if it is above 0 on some rank, the norm is NaN on all, with `always_sum`.
    """
    world_size = group.size()
    with_gradient = [p for p in parameters if p.grad is not None]
    if not with_gradient:
        total = _spoiled(torch.zeros((), dtype=torch.float64, device=device), spoil)
        if always_sum:
            all_reduce_(total, group, what="the norm of the gradient")
        return total.sqrt()
    norms = _local_norms(with_gradient, dtype, known)
    if device is not None:  # offloaded gradients may be on another device
        norms = [norm.to(device) for norm in norms]
    same_type = len({n.dtype for n in norms}) == 1
    squares = (torch.stack(list(norms)).double() if same_type else torch.stack([n.double() for n in norms])).square()
    shards = [num_shards[p] for p in with_gradient]
    if len(set(shards)) == 1:
        total = squares.sum() * (shards[0] / world_size)
    else:
        total = (squares * torch.tensor(shards, dtype=torch.float64, device=squares.device)).sum() / world_size
    total = _spoiled(total, spoil)
    if always_sum or any(count > 1 for count in shards):
        all_reduce_(total, group, what="the norm of the gradient")
    else:
        total = total * world_size  # every rank holds everything
    return total.sqrt()


def _spoiled(total: torch.Tensor, spoil: torch.Tensor | None) -> torch.Tensor:
    """`total`, or NaN where `spoil` is above 0. Nothing is read from a GPU."""
    return total if spoil is None else total.masked_fill(spoil.to(total.device) > 0, torch.nan)


def _local_norms(
    parameters: list[torch.Tensor], dtype: torch.dtype | None, known: Callable[[Any], torch.Tensor | None] | None
) -> list[torch.Tensor]:
    if known is None or dtype is not None:
        return list(foreach_norm(local_gradients(parameters), 2.0, dtype))
    norms = {p: norm for p in parameters if (norm := known(p)) is not None}
    others = [p for p in parameters if p not in norms]
    norms.update(zip(others, foreach_norm(local_gradients(others), 2.0) if others else (), strict=True))
    return [norms[p] for p in parameters]


def clip_factor(norm: torch.Tensor, largest: float) -> torch.Tensor:
    """The factor that makes the gradients' norm at most `largest` (Pascanu et al. 2013)."""
    return (largest / (norm + 1e-6)).clamp(max=1.0)
