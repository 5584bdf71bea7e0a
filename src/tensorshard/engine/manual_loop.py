"""A training loop of the user's own, in place of ``engine.step``, under any Plan.

The user calls the model, a backward and the optimizer. The code here adds to each call what the plan says: precision
and loss scaling, micro-batches, finite gradients and clipping. If a field cannot be honoured, an error names it.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from numbers import Real
from types import MethodType
from typing import Any

import torch
from torch import nn

from tensorshard.comm.collectives import all_gather_into
from tensorshard.comm.sharding import local_gradients, to_local
from tensorshard.comm.world import world
from tensorshard.engine.fused_updates import fused_updates_of_shards
from tensorshard.engine.gradients import FinalGradients, LossScaler, clip_factor
from tensorshard.engine.guards.collective_errors import explained
from tensorshard.engine.guards.foreign_backward import PartOfGraph, watch_output
from tensorshard.engine.guards.module_changes import ModuleChanges
from tensorshard.engine.guards.same_batch import SameBatch
from tensorshard.engine.guards.wrong_batch import note_inputs
from tensorshard.engine.loss import LossTally, check_has_gradient, sum_and_count
from tensorshard.engine.trained_parameters import TrainedParameters, methods_beside_step
from tensorshard.model.forward_contexts import RootRole, hook_root, surround_parts, surround_root
from tensorshard.passes.precision import autocast, widen_output
from tensorshard.plan.mesh import Mesh
from tensorshard.plan.plan import Plan
from tensorshard.sharded.sharded_model import ShardedModel
from tensorshard.torch_private.autograd import engines_backward, is_in_engines_backward
from tensorshard.torch_private.operators import foreach_norm

logger = logging.getLogger("tensorshard")

# The largest relative difference between ranks, in the norm of gradients that all hold, that rounding explains.
_ROUNDING = 1e-3
_NOTHING = 1e-5  # of the norm of all gradients; a smaller norm is rounding alone


class ManualLoop:
    """Backwards, micro-batches and updates that the user's loop asks for.

    Args:
        gradients: shared with ``engine.step``.
        scaler: the loss scaler of fp16, or None.
        device: of this rank.
        trained: adds parameters that are trained only later to the optimizer.
        changes: of the model's modules.
        steps_taken: how many optimizer steps there were so far.
        count_step: called after each step, skipped ones of fp16 included.
    """

    def __init__(
        self,
        sharded: ShardedModel,
        plan: Plan,
        mesh: Mesh,
        gradients: FinalGradients,
        scaler: LossScaler | None,
        device: torch.device,
        trained: TrainedParameters,
        changes: ModuleChanges,
        *,
        steps_taken: Callable[[], int],
        count_step: Callable[[], None],
    ) -> None:
        self._sharded = sharded
        self._plan = plan
        self._mesh = mesh
        self._gradients = gradients
        self._scaler = scaler
        self._device = device
        self._trained = trained
        self._changes = changes
        self._steps_taken = steps_taken
        self._count_step = count_step
        self._same_batch = SameBatch(mesh, device)
        self._inside_engine_call = False  # within the Engine's own calls
        self._in_forward = False
        self._other_optimizers: set[str] = set()  # classes of those that user code has built
        self._in_backward = False
        self._accumulating = False
        self._done = 0  # micro-batches of the step under way whose backward is over
        self._backwards = 0  # of all steps
        self._foreign = False  # whether another Engine's backward has added to the gradients
        self._tally: LossTally | None = None  # of the step under way, if its losses are sums and counts
        self._earlier: list[tuple[nn.Parameter, torch.Tensor]] = []  # gradients from before the step under way

    # -- what surrounds the model and the optimizer --

    def surround(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Makes the user's own forwards of `model`, and updates by `optimizer`, follow the plan."""
        self._surround_optimizer(optimizer)
        if self._plan.pp > 1:  # its stages cannot be called
            return
        surround_root(model, RootRole.PRECISION, self._whole_forward)
        if self._plan.precision != "fp32":
            surround_parts(model, self._forward_context, self._is_called_alone)
        role = RootRole.MANUAL_LOOP
        hook_root(model, role, before=self._before_forward, after=self._after_forward, with_kwargs=True)
        hook_root(model, role, after=self._after_failure, always=True, with_kwargs=True)

    @contextmanager
    def inside_engine_call(self) -> Iterator[None]:
        """A context in which the Engine itself runs the model and the optimizer."""
        before, self._inside_engine_call = self._inside_engine_call, True
        try:
            with self._sharded.computing_on_parts():
                yield
        finally:
            self._inside_engine_call = before

    @contextmanager
    def _whole_forward(self) -> Iterator[None]:
        before, self._in_forward = self._in_forward, True
        try:
            with self._forward_context():
                yield
        finally:
            self._in_forward = before

    def _forward_context(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._inside_engine_call else autocast(self._plan.precision, self._device)

    def _is_called_alone(self) -> bool:
        """Whether user code calls a part of the model, or another method of it, itself."""
        return not self._inside_engine_call and not self._in_forward

    def _before_forward(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._inside_engine_call and torch.is_grad_enabled() and self._mesh.degrees["tp"] > 1:
            self._same_batch.check("model", (args, kwargs), None)

    def _after_forward(self, _: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if self._inside_engine_call:
            return None
        if self._plan.precision != "fp32":
            output = widen_output(output)
        if torch.is_grad_enabled() and (self._scaler is not None or self._plan.micro_batches > 1):
            watch_output(output, (args, kwargs), self._check_own_backward)
        return output

    def _after_failure(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        error = sys.exception()
        if output is None and error is not None and not self._inside_engine_call:
            note_inputs(error, model, (*args, *([kwargs] if kwargs else [])))

    def _check_own_backward(self, part: PartOfGraph) -> None:
        """Called in every backward through the model's output.

        Args:
            part: of the graph, from the output to the model's inputs.

        Raises:
            RuntimeError: the backward is no Engine's, and adds to this Engine's gradients.
        """
        if self._in_backward or self._foreign or not part.reaches_parameters():
            return
        if is_in_engines_backward():  # a generator's, through this critic; its zero_grad drops what is added here
            self._foreign = True
            return
        raise RuntimeError(
            f"loss.backward() was called under a plan with {self._described_loss()}: call engine.backward(loss) in its "
            f"place (docs/your-own-loop.md), or engine.step(inputs, targets), which does all of a step; the gradient "
            f"by inputs alone is torch.autograd.grad(loss, inputs)"
        )

    def _described_loss(self) -> str:
        field = f"micro_batches={self._plan.micro_batches}"
        if self._scaler is None:
            return field
        return "precision='fp16', whose losses are scaled" + (f", and {field}" if self._plan.micro_batches > 1 else "")

    def _check_no_foreign_gradient(self, call: str) -> None:
        """Refuses gradients that another Engine's backward has added to."""
        if self._foreign:
            raise RuntimeError(
                f"{call} was called with gradients to which another Engine's backward has added, through this Engine's "
                f"model, under a plan with {self._described_loss()}: call engine.optimizer.zero_grad() after that "
                f"backward, or let this model's parameters need no gradient in it (requires_grad_(False))"
            )

    def _surround_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        torch_step, clear = optimizer.step, optimizer.zero_grad

        def update() -> Any:
            self._trained.follow(self._gradients.trained)
            with fused_updates_of_shards(optimizer):
                result = torch_step()  # type: ignore[call-arg]
            self._sharded.adopt_writes()  # of hooks of the optimizer that are the user's
            return result

        def step(_: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return update() if self._inside_engine_call else self._step(update, closure)

        def zero_grad(_: torch.optim.Optimizer, set_to_none: bool = True) -> None:
            if self._inside_engine_call:
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
            if not self._inside_engine_call:
                self._sharded.adopt_writes()
            return result

        return call

    # -- backward --

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """See :meth:`tensorshard.Engine.accumulate`."""
        self._check_no_pipeline("engine.accumulate()")
        if self._accumulating:
            raise RuntimeError("engine.accumulate() was entered within itself; it surrounds one micro-batch")
        before, self._accumulating = self._backwards, True
        try:
            yield
        except BaseException:
            self.abandon()
            raise
        finally:
            self._accumulating = False
        if self._plan.micro_batches > 1 and self._backwards != before + 1:
            raise RuntimeError(
                f"engine.accumulate() surrounded {self._backwards - before} calls of engine.backward(loss); it "
                f"surrounds one micro-batch: its forward, one backward (of the sum of its losses), and perhaps "
                f"engine.optimizer.step() and zero_grad()"
            )

    def backward(self, loss: Any) -> None:
        """See :meth:`tensorshard.Engine.backward`."""
        self._check_no_pipeline("engine.backward(loss)")
        total, count = sum_and_count(loss, self._device, "engine.backward was given", "be given")
        check_has_gradient(total)
        try:
            with explained("engine.backward"):
                self._backward(total, count)
        except BaseException:
            self.abandon()
            raise

    def _backward(self, total: torch.Tensor, count: torch.Tensor | None) -> None:
        self._check_no_foreign_gradient("engine.backward(loss)")
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
        weight: Any = self._scaler.scale if self._scaler is not None else 1.0
        if self._tally is None or count is None:
            weight = weight / micro_batches
        else:
            self._tally.add(total, count, micro_batches=micro_batches)
            assert self._tally.normalizer is not None
            weight = weight * self._mesh.dp_size / self._tally.normalizer  # gradients are averaged over data ranks
        last = self._done + 1 == micro_batches
        self._sharded.begin_micro_batch(last, average=True)
        if last and self._tally is not None:
            self._tally.start_total()
        self._in_backward = True
        try:
            with engines_backward():
                (total * weight).backward()
            self._sharded.finish_micro_batch()
        finally:
            self._in_backward = False
        if last:
            self._complete()
        self._done += 1
        self._backwards += 1

    def _begin(self, counted: bool) -> None:
        self._tally = LossTally(self._mesh) if counted else None
        self._earlier = []
        if self._scaler is not None or counted:  # these gradients still need a factor, and earlier ones do not
            for parameter in self._gradients.trained.values():
                if parameter.grad is not None:
                    moves = self._gradients.moves_gradients  # to where the next one will be, too
                    self._earlier.append((parameter, parameter.grad.clone() if moves else parameter.grad))
                    parameter.grad = None

    @torch.no_grad()
    def _complete(self) -> None:
        """Completes the gradients: those of the mean loss of all micro-batches."""
        self._sharded.finish_backward()
        factor: torch.Tensor | float | None = None if self._tally is None else self._tally.correction()
        self._tally = None
        if self._scaler is not None:
            factor = (1.0 if factor is None else factor) / self._scaler.scale
        if factor is not None:
            self._gradients.scale(factor)
        for parameter, gradient in self._earlier:
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                to_local(parameter.grad).add_(to_local(gradient))
        self._earlier = []

    def forget(self) -> None:
        """Forgets the micro-batches so far, whose gradients are dropped."""
        tally, self._tally = self._tally, None
        if tally is not None:
            tally.abandon()
        if 0 < self._done < self._plan.micro_batches:
            self._sharded.abandon_step()
        self._earlier = []
        self._done = 0
        self._foreign = False

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
        self._check_no_foreign_gradient("engine.optimizer.step()")
        self._check_complete("engine.optimizer.step()")
        with explained("engine.optimizer.step"), self.inside_engine_call():
            self._changes.check()
            self._trained.check()
            self._complete_gradients()
            self._check_alike()
            if self._gradients.prepare(None, None, steps_taken=self._steps_taken(), measure=True):
                update()
        self._count_step()
        return result

    def before_other_optimizer(self, name: str) -> None:
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
        if not self._other_optimizers and self._mesh.rank == 0:
            logger.warning(
                "a %s that was built on engine.model.parameters() trains the model: checkpoints by engine.save do not "
                "hold its states; keep its state_dict() beside them",
                name,
            )
        self._other_optimizers.add(name)
        self._check_complete(f"step() of this {name}")
        with explained(f"step() of this {name}"), self.inside_engine_call():
            self._changes.check()
            self._complete_gradients()
            self._check_alike()
            self._gradients.prepare(None, None, steps_taken=self._steps_taken(), measure=True)

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
        with explained("engine.gradient_norm"):
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

    def _check_alike(self) -> None:
        """Refuses gradients that each rank has clipped by the norm of its own parts. Under tp all ranks must clip
        alike.

        Raises:
            RuntimeError: the tensor-parallel ranks' norms differ, of gradients that all of them hold.
        """
        if self._mesh.degrees["tp"] == 1:
            return
        with_gradient = {name: p for name, p in self._gradients.trained.items() if p.grad is not None}
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

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """See :meth:`tensorshard.Engine.clip_grad_norm_`."""
        if isinstance(max_norm, bool) or not isinstance(max_norm, Real | torch.Tensor) or not max_norm > 0:
            raise ValueError(f"max_norm is {max_norm!r}; it must be a number above 0")
        norm = self.gradient_norm()
        self._gradients.scale(clip_factor(norm, max_norm))
        return norm
