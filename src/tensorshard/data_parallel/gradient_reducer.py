"""Gradients of replicated parameters, which are averaged over the data ranks while backward goes on, by buckets."""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from tensorshard.comm.collectives import all_gather_into, finish_unasked
from tensorshard.comm.world import world
from tensorshard.data_parallel.buckets import MOST_BYTES, Bucket, Buckets, Reduction
from tensorshard.data_parallel.published_weights import PublishedWeights
from tensorshard.data_parallel.unit_order import UnitOrder
from tensorshard.data_parallel.zero_parameter import Groups, ZeroParameter
from tensorshard.model.watched_parameters import (
    Watch,
    held_gradient,
    held_gradients,
    hold_gradient,
    take_held_gradients,
    unwatch,
    watch,
)
from tensorshard.passes.precision import master_dtype
from tensorshard.plan.storage import TakeGradient
from tensorshard.torch_private.autograd import (
    call_after_backward,
    current_backward,
    is_in_engines_backward,
    operations_of_backward,
    order_of_backward,
)
from tensorshard.torch_private.fake_tensors import FakeTensor
from tensorshard.torch_private.process_groups import group_device
from tensorshard.torch_private.tensors import PausedHooks

_UNKNOWN = -1


class EqualBackwards:
    """Whether the backwards of all data ranks run the same operations in the same order.

    A batch normalization's backward is a collective of the data ranks, and so is the reduction of gradients. All ranks
    must make both in one order. They do if their graphs are equal, since autograd then computes the same gradients
    between the same two collectives. A rank that uses other parameters has another graph.

    It asks all ranks of `group` for the order of the backward that is about to begin: a message of 8 bytes over the
    group's half for the CPU, so that nothing waits for a GPU. A collective.

    Args:
        loss: whose backward it is.
        numbers: of the parameters, the same on all ranks.
    """

    def __init__(self, loss: torch.Tensor, numbers: Mapping[torch.Tensor, int], group: dist.ProcessGroup) -> None:
        self._everyone: torch.Tensor | None = None
        self._work: dist.Work | None = None
        self._known: bool | None = None
        if dist.get_backend(group) == "fake" or world().is_simulated:
            self._known = True  # there are no others
            return
        if group_device(group, torch.device("cpu")).type != "cpu":
            self._known = False
            return
        order = order_of_backward(loss, numbers)
        self._own = torch.tensor([_UNKNOWN if order is None else order])
        self._everyone = self._own.new_empty(group.size())
        what = "the order of backward"
        self._work = all_gather_into(self._everyone, self._own, group, async_op=True, what=what)

    def hold(self) -> bool:
        """Whether they are known to be equal: the same answer on all ranks. Waits for their messages."""
        if self._known is None:
            assert self._work is not None and self._everyone is not None
            self._work.wait()
            orders = set(self._everyone.tolist())
            self._known = len(orders) == 1 and _UNKNOWN not in orders
        return self._known

    def abandon(self) -> None:
        """Ends it without an answer."""
        if self._known is None and self._work is not None:
            finish_unasked(self._work)
            self._known = False


class GradientReducer:
    """Averages the gradients of a model's parameters over the data ranks.

    Args:
        parameters: all of them.
        weights: knows which parameters user code has written.
        reduce_dtype: gradients are summed in this type.
        level: of ZeRO.
        meets: whether the data ranks make other collectives in a backward, as those of batch normalizations.

    Attributes:
        take: called with each master whose gradient was reduced; None to leave it there.
        finish: called before a gradient that was taken is added to, and at the end of each backward; None for nothing.
        writers: above 0 if some data rank has written parameters, when the last gradients were reduced; None if that is
            not known.
    """

    def __init__(
        self,
        parameters: Iterable[ZeroParameter],
        buckets: Buckets,
        weights: PublishedWeights,
        groups: Groups,
        *,
        reduce_dtype: torch.dtype,
        level: int,
        meets: bool,
    ) -> None:
        self.take: TakeGradient | None = None
        self.finish: Callable[[], None] | None = None
        self.writers: torch.Tensor | None = None
        self.order: UnitOrder | None = None
        self._differed: list[torch.Tensor] = []  # above 0 if some rank has differed from it
        self._parameters = list(parameters)
        self._buckets = buckets
        self._is_told = groups.releases  # which buckets to reduce; else it finds out
        self._reduced: set[Bucket] = set()  # in the running backward
        self._weights = weights
        self._groups = groups
        self._reduce_dtype = reduce_dtype
        self._level = level
        self._in_flight: deque[Reduction] = deque()
        self._gives_back = groups.shard is not None  # a reduction that is over gives back its message
        self._accumulated: dict[ZeroParameter, torch.Tensor] = {}
        self._in_backward = False
        self._wrote: bool | None = None  # whether this backward's forward wrote parameters; None if nobody has looked
        self._is_guided = False  # the Engine says when backwards begin and end
        self._is_share = False  # the loss is this rank's share of the whole batch's, so that gradients are summed
        self._are_shown = True  # to the user's code, at the end of a backward
        self._complete = True  # the gradients of the last backward have been averaged
        self._last = True
        self._final = True  # the step's gradients are complete after its next backward
        self._late: dict[Bucket, None] = {}  # gradients came after these were reduced in the same backward
        # A backward within a backward (reentrant checkpointing, reversible functions) adds to gradients again. The
        # first backward shows whether there is one, if its graph does not. If so, reductions wait for the end.
        self._backwards_seen: set[int] | None = set()
        self._at_the_end = False
        # Where ranks meet in other collectives of a backward, they must reduce the same buckets between the same two.
        self._meets = meets and groups.communicate and not groups.releases
        self._equal: EqualBackwards | None = None  # whether they will, in the backward that is running
        self._numbers: dict[torch.Tensor, int] = {p.compute: number for number, p in enumerate(self._parameters)}
        self._shown_gradients: dict[ZeroParameter, _ShownGradient] = {}
        # A hook costs a small parameter more than its gradient. In a step of the Engine only that parameter of each
        # bucket has one whose gradient came last before.
        self._hooks = {parameter: self._watch(parameter) for parameter in self._parameters}
        self._are_paused = False  # the others', while a backward runs
        self._last_ones: list[ZeroParameter] = []  # of the buckets
        self._others = PausedHooks([])  # the hooks of all but these
        self._are_all_known = False  # `_others` are all hooks

    def watch(self, take: TakeGradient, finish: Callable[[], None]) -> None:
        """Sets :attr:`take` and :attr:`finish`."""
        self.take, self.finish = take, finish
        self._gives_back = True
        for parameter in self._parameters:
            parameter.take_gradient, parameter.finish_gradients = take, finish

    # -- steps --

    def discard(self) -> None:
        """Drops all gradients, and what reduces them."""
        self._resume_hooks()
        while self._in_flight:
            self._in_flight.popleft().finish()
        self._buckets.launched = 0
        self._accumulated.clear()
        self._late.clear()
        self._reduced.clear()
        self._differed.clear()
        for bucket in self._buckets.trained:
            bucket.ready.clear()
        for p, shown in self._shown_gradients.items():
            unwatch(p.compute, shown)
        self._shown_gradients.clear()
        take_held_gradients(self._buckets.computes)
        for p in self._parameters:
            p.forget_gradient()
        self._equal = None
        self._in_backward = self._is_guided = False

    def abandon(self) -> None:
        """The same after a failed step. Reductions end without a result."""
        while self._in_flight:
            self._in_flight.popleft().abandon()
        if self._equal is not None:
            self._equal.abandon()
        self.discard()
        self._complete = True
        self._is_share, self._are_shown = False, True

    def begin_micro_batch(self, last: bool, *, shown: bool) -> None:
        """See :meth:`~tensorshard.data_parallel.sharded_model.ShardedModel.begin_micro_batch`."""
        if self._complete and shown and self._groups.communicate:
            self._share_held_gradients()
        self._final = last
        self._last = last or (self._level >= 2 and self._groups.shard is not None)
        self._complete = False
        self._is_share, self._are_shown = True, shown
        self._is_guided = True

    @torch.no_grad()
    def _share_held_gradients(self) -> None:
        """Makes gradients from before a step this rank's share of them, as those that the step will add."""
        for p, held in zip(self._parameters, held_gradients(self._buckets.computes), strict=True):
            for gradient in (held, p.given):
                if gradient is not None and p.groups.all is not None:
                    gradient.div_(p.groups.all.size())

    def begin_backward(self, loss: torch.Tensor) -> None:
        """See :meth:`~tensorshard.data_parallel.sharded_model.ShardedModel.begin_backward`."""
        if self._backwards_seen is not None and operations_of_backward(loss) is not None:
            self._backwards_seen = None
        if self._meets and self._last and not self._at_the_end and self._backwards_seen is None:
            assert self._groups.all is not None
            self._equal = EqualBackwards(loss, self._numbers, self._groups.all)
        self._pause_hooks()

    def finish_micro_batch(self) -> None:
        """Called when a backward of a step, or a part of one, is over."""
        self._end_of_backward()
        self._is_guided = True  # until finish_backward

    def finish_backward(self) -> None:
        """Called after a step's last backward: reduces what is left."""
        if not self._complete:
            self._finish()
        self._is_guided = self._is_share = False
        self._are_shown = True

    # -- in a backward --

    def _watch(self, parameter: ZeroParameter) -> RemovableHandle | None:
        # Weak references: the garbage collector does not see those of such a hook, and would never free the model.
        gradients, watched = weakref.ref(self), weakref.ref(parameter)

        def ready(_: torch.Tensor) -> None:
            this, its = gradients(), watched()
            assert this is not None and its is not None
            this._gradient_ready(its)

        compute = parameter.compute
        if not (compute.is_floating_point() or compute.is_complex()):
            return None
        trained = compute.requires_grad
        compute.requires_grad_(True)  # else no hook could be registered, which one needs when it is trained later
        handle = torch.Tensor.register_post_accumulate_grad_hook(compute, ready)
        compute.requires_grad_(trained)
        return handle

    def _begin_backward(self) -> None:
        self._in_backward, self._wrote = True, None
        if self.order is not None:
            self.order.end_after_backward()  # the end of its backward comes before that of this one
        if not self._are_paused:  # else they were arranged before the hooks were
            self._buckets.arrange()
        if not self._is_guided:
            self._is_share = is_in_engines_backward()  # another Engine's, whose loss is each rank's share, too
            call_after_backward(self._end_of_backward)

    def _pause_hooks(self) -> None:
        """Takes the hooks of all but the last parameter of each bucket away, if gradients that are there at its end
        can only be those of the backward that begins, and if ranks may reduce a bucket at different times."""
        if not (self._groups.communicate and not self._are_shown and self._final and self._last):
            return
        if self._is_told:
            self._pause_all_hooks()
            return
        if self._waits_for_end or self._meets:
            return
        self._buckets.arrange()
        last = [bucket.last for bucket in self._buckets.trained if bucket.last is not None]
        is_known = len(last) == len(self._buckets.trained)
        if not is_known or any(gradient is not None for gradient in held_gradients(self._buckets.computes)):
            return
        if self._last_ones != last:
            self._last_ones = last
            others = self._hooks.keys() - last
            self._others = PausedHooks(hook for p, hook in self._hooks.items() if p in others and hook is not None)
        self._are_paused = True
        self._others.pause()

    def _pause_all_hooks(self) -> None:
        self._buckets.arrange()
        if self._backwards_seen is not None:
            return
        if not self._are_all_known:
            self._are_all_known = True
            self._others = PausedHooks(hook for hook in self._hooks.values() if hook is not None)
        self._are_paused = True
        self._others.pause()

    def reduce(self, numbers: Iterable[int]) -> None:
        """Begins to reduce the gradients of the buckets with these `numbers`. All ranks do so in one order."""
        if not self._groups.communicate or not self._last:
            return
        if not self._in_backward:
            self._begin_backward()
        self._complete = False
        for number in numbers:
            bucket = self._buckets.of_units.get(number)
            if bucket is not None:
                self._reduce(bucket)
                self._reduced.add(bucket)

    def _resume_hooks(self) -> None:
        if self._are_paused:
            self._are_paused = False
            self._others.resume()

    def _look_for_late_gradients(self) -> None:
        """Finds those that came after their bucket was reduced, for which no hook was called."""
        launched = self._buckets.backward_order[: self._buckets.launched]
        for bucket in [b for b in self._buckets.backward_order if b in self._reduced] if self._is_told else launched:
            held = held_gradients([p.compute for p in bucket.parameters])
            if any(g is not None and g is not p.averaged for p, g in zip(bucket.parameters, held, strict=True)):
                bucket.last = None  # it is learned anew
                self._late[bucket] = None

    def _note_ready(self, bucket: Bucket, parameter: ZeroParameter) -> None:
        if not self._are_paused:
            bucket.ready.add(parameter)
            if len(bucket.ready) == len(bucket.parameters):
                bucket.last = parameter
        elif all(gradient is not None for gradient in held_gradients([p.compute for p in bucket.parameters])):
            bucket.ready.update(bucket.parameters)
        else:
            bucket.last = None  # the order has changed: it is reduced at the end, and learned anew

    def _gradient_ready(self, parameter: ZeroParameter) -> None:
        if not self._in_backward:
            self._begin_backward()
        bucket = self._buckets.bucket_of[parameter]
        if self._backwards_seen is not None:
            self._backwards_seen.add(current_backward())
        if not self._last and (self._groups.communicate or self.take is None):
            self._keep(parameter)
            return
        self._complete = False
        if not self._groups.communicate:
            self._take_local(parameter)
            return
        if self._is_told:
            if bucket in self._reduced:
                self._late[bucket] = None
            return
        order = self._buckets.backward_order
        if self._buckets.launched and bucket in order[: self._buckets.launched]:
            self._late[bucket] = None
            return
        self._note_ready(bucket, parameter)
        if len(bucket.ready) < len(bucket.parameters) or not self._may_reduce():
            return
        while self._buckets.launched < len(order):
            bucket = order[self._buckets.launched]
            if len(bucket.ready) < len(bucket.parameters):
                break
            self._reduce(bucket)
            self._buckets.launched += 1

    @property
    def _waits_for_end(self) -> bool:
        return self._at_the_end or self._backwards_seen is not None

    def _may_reduce(self) -> bool:
        """Whether reductions may begin before the end of the backward: the same answer on all ranks."""
        if self._waits_for_end:
            return False
        return not self._meets or (self._equal is not None and self._equal.hold())

    def _keep(self, parameter: ZeroParameter) -> None:
        """Between micro-batches: 16-bit gradients are summed in fp32, others where autograd sums them."""
        gradient = held_gradient(parameter.compute)
        assert gradient is not None
        if gradient.dtype == master_dtype(gradient.dtype):
            return
        if parameter in self._accumulated:
            self._accumulated[parameter].add_(gradient)
        else:
            self._accumulated[parameter] = gradient.float()
        hold_gradient(parameter.compute, None)

    def _take_local(self, parameter: ZeroParameter) -> None:
        """Takes a gradient on one rank, where it needs no reduction."""
        if parameter.master is not parameter.compute:
            (gradient,) = self._take([parameter])
            assert gradient is not None
            parameter.set_gradient(gradient.reshape(-1))
        elif self.take is not None:
            self.take(parameter.master)

    def _take(self, parameters: Sequence[ZeroParameter]) -> list[torch.Tensor | None]:
        """Takes each parameter's gradient of all micro-batches since the last reduction."""
        gradients = take_held_gradients([p.compute for p in parameters])
        for index, p in enumerate(parameters):
            if p.given is not None:
                gradients[index], p.given = p.given, None
            if p in self._accumulated:
                earlier, latest = self._accumulated.pop(p), gradients[index]
                gradients[index] = earlier if latest is None else earlier.add_(latest)
        return gradients

    def _end_of_backward(self) -> None:
        self._in_backward = False
        if self._are_paused:
            self._resume_hooks()
            self._look_for_late_gradients()
        if self._backwards_seen is not None and not self._last:
            self._note_backwards()
        if self._last and not (self._is_guided and self._final):
            self._finish()
        if self.finish is not None:
            self.finish()

    def _finish(self) -> None:
        if self._equal is not None:
            self._equal.hold()  # a message that other ranks wait for
            self._equal = None
        self._buckets.arrange()
        if self._groups.communicate:
            order = self._buckets.backward_order
            rest = [b for b in order if b not in self._reduced] if self._is_told else order[self._buckets.launched :]
            for bucket in [*rest, *self._late]:
                self._reduce(bucket)
            for reduction in self._in_flight:
                reduction.advance()
            while self._in_flight:
                self._collect(self._in_flight.popleft())
            self._buckets.launched = 0
            self._late.clear()
            self._reduced.clear()
        else:  # parameters that had a gradient only in an earlier micro-batch
            for parameter in list(self._accumulated):
                self._take_local(parameter)
        if self.order is not None and self._final:  # one read a step
            if self._differed:
                self.order.take_note(world().known(torch.stack(self._differed).max(), 0.0) > 0.0)
            self._differed.clear()
        if self.finish is not None:
            self.finish()
        if self._backwards_seen is not None:
            self._note_backwards()
            self._backwards_seen = None
        self._in_backward = False
        self._complete = True
        if self._are_shown:
            self.show_gradients()

    def _note_backwards(self) -> None:
        """Called at the end of a backward, with those that ran within it."""
        assert self._backwards_seen is not None
        self._at_the_end = self._at_the_end or len(self._backwards_seen) > 1
        self._backwards_seen.clear()

    def _reduce(self, bucket: Bucket) -> None:
        while self._in_flight and not self._may_join(bucket):
            self._collect(self._in_flight.popleft())
        for reduction in self._in_flight:
            reduction.advance()
        gradients = dict(zip(bucket.parameters, self._take(bucket.parameters), strict=True))
        scale = 1.0 if self._is_share else 1.0 / self._groups.ranks
        bucket.ready.clear()
        if self._wrote is None:  # the forward may have written some, too
            self._wrote = self._weights.are_written()
        wrote = self._wrote or bool(self._weights.written)
        self._in_flight.append(Reduction(bucket, gradients, self._reduce_dtype, scale, wrote, self._differs()))

    def _differs(self) -> bool:
        return self.order is not None and self.order.differed

    def _may_join(self, bucket: Bucket) -> bool:
        """Whether a reduction of `bucket` may begin beside those under way, whose gradients take memory until they are
        waited for: as many as have the bytes of two buckets on average, or beside one other if that is not too much."""
        if not self._gives_back:
            return True
        numel = bucket.numel + sum(reduction.bucket.numel for reduction in self._in_flight)
        average = sum(each.numel for each in self._buckets.trained) / len(self._buckets.trained)
        fits = len(self._in_flight) == 1 or numel <= 2 * average
        return fits and numel * self._reduce_dtype.itemsize <= MOST_BYTES

    def _collect(self, reduction: Reduction) -> None:
        reduction.finish()
        if not reduction.is_of_experts:  # else not all data ranks know it
            assert reduction.writers is not None
            self.writers = reduction.writers.clone()  # what it is a view of goes with the gradients
            if self.order is not None:
                assert reduction.differed is not None
                self._differed.append(reduction.differed.clone())

    # -- gradients as user code sees and sets them --

    def show_gradients(self) -> None:
        """Makes ``p.grad`` show averaged gradients that the masters hold."""
        for p in self._parameters:
            if p.master is not p.compute and p.master.grad is not None and p not in self._shown_gradients:
                if isinstance(p.storage, FakeTensor):
                    return
                self._shown_gradients[p] = _ShownGradient(p)
                watch(p.compute, self._shown_gradients[p])

    def average_given(self) -> None:
        """Averages gradients that user code has set, each data rank its own."""
        for p in self._shown_gradients:
            p.take_back_gradient()
        self._buckets.arrange()
        given = {p for p in self._buckets.bucket_of if p.has_given_gradient(self._groups.communicate)}
        if not given:
            return
        for bucket in self._buckets.backward_order:
            members = given.intersection(bucket.parameters)
            if not members:
                continue
            if not self._groups.communicate:
                for p in members:
                    self._take_local(p)
                continue
            for p in members:
                p.sum_given_gradient()
            # Averaged gradients of the bucket stay out of the sum.
            averaged = {p: held_gradient(p.compute) for p in bucket.parameters if p not in members}
            for p in averaged:
                hold_gradient(p.compute, None)
            self._reduce(bucket)
            self._collect(self._in_flight.popleft())
            for p, gradient in averaged.items():
                hold_gradient(p.compute, gradient)
        if self.finish is not None:
            self.finish()
        self.show_gradients()


class _ShownGradient(Watch):
    """Shows the averaged gradient of a master, whole, as that of the parameter."""

    def __init__(self, parameter: ZeroParameter) -> None:
        self._parameter = parameter

    def gradient(self, parameter: nn.Parameter, held: torch.Tensor | None) -> torch.Tensor | None:
        return self._parameter.shown_gradient() if held is None else held

    def set_gradient(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> bool:
        return self._parameter.give_gradient(gradient)
