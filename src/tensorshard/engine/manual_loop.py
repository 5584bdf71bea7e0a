"""A training loop of the user's own, in place of ``engine.step``, under any Plan.

The user calls the model, a backward and the optimizer. The code here adds to each call what the plan says: precision
and loss scaling, micro-batches, finite gradients and clipping. If a field cannot be honoured, an error names it.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Real
from types import MethodType
from typing import Any

import torch
from torch import nn

from tensorshard.comm.call_watch import CallWatch
from tensorshard.comm.sharding import to_local
from tensorshard.data_parallel.sharded_model import ShardedModel
from tensorshard.engine.combined_optimizer import methods_beside_step
from tensorshard.engine.gradients import FinalGradients, LossScaler, NonFiniteLossError, clip_factor
from tensorshard.engine.guards.foreign_optimizers import ModuleChanges
from tensorshard.engine.guards.own_collectives import explained
from tensorshard.engine.guards.uneven_means import UnevenMeans
from tensorshard.engine.guards.wrong_batch import cause_in_batches
from tensorshard.engine.loss import GlobalLoss, LossTally, check_has_gradient, sum_and_count
from tensorshard.engine.manual_forwards import ManualForwards
from tensorshard.engine.optimizer import StepCounter, TrainedParameters
from tensorshard.plan.mesh import Mesh
from tensorshard.plan.plan import Plan

logger = logging.getLogger("tensorshard")


class ManualLoop:
    """Backwards, micro-batches and updates that the user's loop asks for.

    Args:
        optimizer: whose updates do what the plan needs already.
        gradients: shared with ``engine.step``.
        scaler: the loss scaler of fp16, or None.
        device: of this rank.
        forwards: the user's, of the model.
        trained: the parameters that are trained.
        changes: of the model's modules.
        steps: counts the optimizer steps.
        watch: compares what the ranks call.
        means: looks at the mean losses of the first step.
    """

    def __init__(
        self,
        sharded: ShardedModel,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        mesh: Mesh,
        gradients: FinalGradients,
        scaler: LossScaler | None,
        device: torch.device,
        forwards: ManualForwards,
        trained: TrainedParameters,
        changes: ModuleChanges,
        steps: StepCounter,
        watch: CallWatch,
        means: UnevenMeans,
    ) -> None:
        self._sharded = sharded
        self._plan = plan
        self._mesh = mesh
        self._gradients = gradients
        self._scaler = scaler
        self._device = device
        self._forwards = forwards
        self._backwards = forwards.backwards
        self._trained = trained
        self._changes = changes
        self._steps = steps
        self._watch = watch
        self._means = means
        self._foreign_optimizers: set[str] = set()  # classes of those that user code has built
        self._accumulating = False
        self._ends = False  # with the micro-batch that runs
        self._done = 0  # micro-batches of the step under way whose backward is over
        self._calls = 0  # of backward, in all steps
        self._tally: LossTally | None = None  # of the step under way, if its losses are sums and counts
        self._global_loss: GlobalLoss | None = None  # of the latest micro-batch
        self._hooked = False  # hooks of parameters were called with the gradients that are there
        self._earlier: list[tuple[nn.Parameter, torch.Tensor]] = []  # gradients from before the step under way
        self._losses: list[torch.Tensor] = []  # of the backwards since the latest update, on this rank
        self._global_means: list[torch.Tensor] = []  # those over all ranks
        self._replace_methods(optimizer)

    def _replace_methods(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes calls of `optimizer` by the user follow the plan. Those of the Engine go through as they are."""
        update: Callable[[], Any] = optimizer.step  # type: ignore[assignment]
        clear = optimizer.zero_grad

        def step(_: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return update() if self._forwards.is_engine_call else self._step(update, closure)

        def zero_grad(_: torch.optim.Optimizer, set_to_none: bool = True) -> None:
            if self._forwards.is_engine_call:
                clear(set_to_none)
            else:
                self._zero_grad(clear, set_to_none)

        # Bound methods: learning-rate schedulers wrap them, and expect bound ones.
        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
        optimizer.zero_grad = MethodType(zero_grad, optimizer)  # type: ignore[method-assign]
        for name in methods_beside_step(optimizer):
            setattr(optimizer, name, MethodType(self._adopting(getattr(optimizer, name)), optimizer))

    def _adopting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """`method` of an optimizer, which may write to the masters, as ``eval()`` of schedule-free ones does."""

        def call(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            if not self._forwards.is_engine_call:
                self._sharded.adopt_writes()
            return result

        return call

    # -- backward --

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        """See :meth:`tensorshard.Engine.accumulate`."""
        self._check_no_pipeline("engine.accumulate()")
        if self._accumulating:
            raise RuntimeError("engine.accumulate() was entered within itself; it surrounds one micro-batch")
        before, self._accumulating, self._ends = self._calls, True, last
        try:
            yield
        except BaseException:
            self.abandon()
            raise
        finally:
            self._accumulating = self._ends = False
        if self._plan.micro_batches > 1 and self._calls != before + 1:
            raise RuntimeError(
                f"engine.accumulate() surrounded {self._calls - before} calls of engine.backward(loss); it "
                f"surrounds one micro-batch: its forward, one backward (of the sum of its losses), and perhaps "
                f"engine.optimizer.step() and zero_grad()"
            )

    def backward(self, loss: Any, share: float = 1.0, ends: bool = False) -> torch.Tensor:
        """See :meth:`tensorshard.Engine.backward`.

        Args:
            share: what a mean counts, where 1 is the average of the data ranks.
            ends: whether this micro-batch is the step's last, although the plan has more.
        """
        self._check_no_pipeline("engine.backward(loss)")
        total, count = sum_and_count(loss, self._device, "engine.backward was given", "be given")
        check_has_gradient(total)
        try:
            with explained("engine.backward", self._watch):
                return self._backward(total, count, share, ends)
        except BaseException:
            self.abandon()
            raise

    def _backward(self, total: torch.Tensor, count: torch.Tensor | None, share: float, ends: bool) -> torch.Tensor:
        self._backwards.check_no_foreign_gradient("engine.backward(loss)")
        micro_batches = self._plan.micro_batches
        if self._done == micro_batches:
            self._done = 0
        if self._done == 0:
            self._begin(count is not None)
        if (count is None) != (self._tally is None):
            raise TypeError(
                "engine.backward was given a mean for one micro-batch and (sum, count) for another of the same step; "
                "give all of them in one form"
            )
        self._losses.append(total.detach())
        weight: Any = self._scaler.scale if self._scaler is not None else 1.0
        if share:
            self._means.note_loss(total)
        if self._tally is None or count is None:
            if share:
                self._means.note(total, share)
            weight = weight * share / (micro_batches * self._mesh.gradient_ranks)
        else:
            self._tally.add(total, count, micro_batches=micro_batches)
            assert self._tally.normalizer is not None
            weight = weight / self._tally.normalizer
        last = ends or self._ends or self._done + 1 == micro_batches
        self._sharded.begin_micro_batch(last, shown=True)
        if last and self._tally is not None:
            self._tally.start_total()
        # The mean of no samples is NaN, and counts nothing.
        counted = total if count is not None else total.detach() * share if share else torch.zeros_like(total)
        self._global_loss = GlobalLoss(counted, total.new_ones(()) if count is None else count, self._mesh)
        scaled = total * weight
        self._sharded.begin_backward(scaled)
        with self._backwards.by_engine():
            scaled.backward()
        self._sharded.finish_micro_batch()
        if last:
            # A mean is one over the micro-batches that there were.
            self._complete(micro_batches / (self._done + 1) if self._ends and self._tally is None else None)
        self._done = micro_batches if last else self._done + 1
        self._calls += 1
        self._global_means.append(self._global_loss.mean())
        return self._global_means[-1].clone()

    def _begin(self, counted: bool) -> None:
        self._tally = LossTally(self._mesh) if counted else None
        self._earlier = []
        # These gradients still need a factor, or hooks, and earlier ones do not.
        if self._scaler is not None or counted or self._gradients.has_parameter_hooks():
            for parameter in self._gradients.trained.values():
                if parameter.grad is not None:
                    moves = self._gradients.moves_gradients  # to where the next one will be, too
                    self._earlier.append((parameter, parameter.grad.clone() if moves else parameter.grad))
                    parameter.grad = None

    @torch.no_grad()
    def _complete(self, factor: torch.Tensor | float | None) -> None:
        """Completes the gradients: those of the mean loss of all micro-batches.

        Args:
            factor: multiplies them; None for 1.
        """
        self._sharded.finish_backward()
        if self._tally is not None:
            factor = self._tally.correction()
        self._tally = None
        if self._scaler is not None:
            factor = (1.0 if factor is None else factor) / self._scaler.scale
        if factor is not None:
            self._gradients.scale(factor)
        self._call_parameter_hooks()
        for parameter, gradient in self._earlier:
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                to_local(parameter.grad).add_(to_local(gradient))
        self._earlier = []

    def _call_parameter_hooks(self) -> None:
        if self._gradients.has_parameter_hooks():
            self._gradients.refresh()
            self._gradients.call_parameter_hooks()
        self._hooked = True

    def forget(self) -> None:
        """Forgets the micro-batches so far, whose gradients are dropped."""
        for loss in (self._tally, self._global_loss):
            if loss is not None:
                loss.abandon()
        self._tally = self._global_loss = None
        if 0 < self._done < self._plan.micro_batches:
            self._sharded.abandon_step()
        self._earlier, self._losses, self._global_means = [], [], []
        self._hooked = False
        self._done = 0
        self._backwards.forget()

    def abandon(self) -> None:
        """Drops the step under way, after a failure."""
        self.forget()
        self._sharded.abandon_step()

    # -- update --

    @property
    def _is_complete(self) -> bool:
        """Whether the gradients are those of all micro-batches, or of none: user code may set gradients itself."""
        return self._done in (0, self._plan.micro_batches) or self._plan.micro_batches == 1

    def _step(self, update: Callable[[], Any], closure: Callable[[], Any] | None) -> Any:
        self._check_no_pipeline("engine.optimizer.step()")
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        if self._accumulating and not self._is_complete:
            return result
        self._backwards.check_no_foreign_gradient("engine.optimizer.step()")
        self._check_complete("engine.optimizer.step()")
        with explained("engine.optimizer.step", self._watch), self._forwards.inside_engine_call():
            self._means.compare()
            self._changes.check()
            self._trained.check()
            if self._prepare_gradients():
                update()
        self._steps.count()
        return result

    def before_foreign_optimizer(self, name: str) -> None:
        """Called before the step of an optimizer that user code has built on the model's parameters.

        Args:
            name: of its class.

        Raises:
            RuntimeError: a field of the plan cannot be honoured.
        """
        self._check_no_pipeline(f"step() of this {name} on engine.model.parameters()")
        fields = []
        if self._scaler is not None:
            fields.append("precision='fp16', which skips steps whose gradients overflow")
        if self._gradients.moves_gradients:
            fields.append("offloaded gradients, which engine.optimizer alone can read")
        if fields:
            raise RuntimeError(
                f"this {name} was built on engine.model.parameters(), under a plan with {' and '.join(fields)}: train "
                f"with engine.optimizer, whose param_groups you can change between steps, or take a plan without it"
            )
        if not self._foreign_optimizers and self._mesh.rank == 0:
            logger.warning(
                "a %s that was built on engine.model.parameters() trains the model: checkpoints by engine.save do not "
                "hold its states; keep its state_dict() beside them",
                name,
            )
        self._foreign_optimizers.add(name)
        self._check_complete(f"step() of this {name}")
        with explained(f"step() of this {name}"), self._forwards.inside_engine_call():
            self._changes.check()
            self._prepare_gradients()

    def _prepare_gradients(self) -> bool:
        """Completes, checks, clips and scales the gradients for an update; False if fp16 overflowed."""
        self._complete_gradients()
        if not self._hooked:  # user code has called loss.backward() itself
            self._call_parameter_hooks()
        self._gradients.check_equal_on_tensor_ranks()
        try:
            # Means over nothing are NaN on one rank alone, and give no gradient. In fp16 a loss may overflow.
            loss = torch.stack(self._global_means).sum() if self._global_means and self._scaler is None else None
            checked = self._gradients.prepare(loss, None, steps_taken=self._steps.taken)
        except NonFiniteLossError as error:
            raise NonFiniteLossError(error.fact, cause_in_batches(self._mesh, losses=self._losses)) from None
        self._losses, self._global_means = [], []
        if checked is None:
            return False
        self._gradients.scale(checked.scale)
        return True

    def _complete_gradients(self) -> None:
        self._sharded.finish_backward()
        self._sharded.average_given_gradients()
        self._gradients.refresh()

    def _zero_grad(self, clear: Callable[[bool], None], set_to_none: bool) -> None:
        if self._accumulating and 0 < self._done < self._plan.micro_batches:
            return
        self.forget()
        kept = {} if set_to_none else {p: p.grad for p in self._gradients.trained.values()}
        self._sharded.discard_gradients()
        for parameter, gradient in kept.items():
            parameter.grad = gradient
        clear(set_to_none)

    def gradient_norm(self) -> torch.Tensor:
        """See :meth:`tensorshard.Engine.gradient_norm`."""
        self._check_no_pipeline("engine.gradient_norm()")
        self._check_complete("engine.gradient_norm()")
        with explained("engine.gradient_norm", self._watch):
            self._complete_gradients()
            norm = self._gradients.measure()
        if not bool(norm.isfinite()):
            norm = self._gradients.measure(torch.float64)
        return norm

    # -- refusals --

    def _check_no_pipeline(self, call: str) -> None:
        if self._plan.pp > 1:
            raise RuntimeError(
                f"{call} was called under a plan with pp={self._plan.pp}, whose ranks each hold some stages of the "
                f"model: use engine.step(inputs, targets), which runs forward, backward and update on all of them, or "
                f"set pp=1"
            )

    def _check_complete(self, call: str) -> None:
        if not self._is_complete:
            raise RuntimeError(
                f"{call} was called after {self._done} of the plan's micro_batches={self._plan.micro_batches}: call "
                f"engine.backward(loss) for each of them first, or put each one's forward, backward, step and "
                f"zero_grad under `with engine.accumulate():`, which waits for the last; zero_grad drops what is left"
            )

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """See :meth:`tensorshard.Engine.clip_grad_norm_`."""
        if isinstance(max_norm, bool) or not isinstance(max_norm, Real | torch.Tensor) or not max_norm > 0:
            raise ValueError(f"max_norm is {max_norm!r}; it must be a number above 0")
        norm = self.gradient_norm()
        self._gradients.scale(clip_factor(norm, max_norm))
        return norm
