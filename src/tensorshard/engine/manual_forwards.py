"""Forwards of a model that user code calls itself: precision, checks of the batch, and explained errors.

Forwards that the Engine runs have all of this from the Engine's own calls.
"""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from tensorshard.data_parallel.sharded_model import ShardedModel
from tensorshard.engine.guards.foreign_backward import ForeignBackwards, watch_output
from tensorshard.engine.guards.same_batch import SameBatch
from tensorshard.engine.guards.uneven_means import UnevenMeans
from tensorshard.engine.guards.wrong_batch import note_inputs
from tensorshard.engine.last_batch import BatchShares
from tensorshard.model.forward_contexts import RootRole, hook_root, surround_parts, surround_root
from tensorshard.passes.precision import autocast, widen_output
from tensorshard.plan.mesh import Mesh
from tensorshard.plan.plan import Plan


class ManualForwards:
    """Makes forwards that the user calls follow the plan.

    Args:
        device: of this rank.
        shares, means: are told what the model is called with.

    Attributes:
        is_engine_call: whether the Engine itself runs the model and the optimizer now.
        backwards: those through the outputs of these forwards.
    """

    def __init__(
        self,
        sharded: ShardedModel,
        plan: Plan,
        mesh: Mesh,
        device: torch.device,
        shares: BatchShares,
        means: UnevenMeans,
    ) -> None:
        self.is_engine_call = False
        self.backwards = ForeignBackwards(plan)
        self._sharded = sharded
        self._plan = plan
        self._mesh = mesh
        self._device = device
        self._same_batch = SameBatch(mesh, device)
        self._shares = shares
        self._means = means
        self._in_forward = False
        self._in_loss = False  # whether the loss function of an Engine call runs, whose batch was compared already
        if plan.pp > 1:  # its stages cannot be called
            return
        model = sharded.model
        surround_root(model, RootRole.PRECISION, self._whole_forward)
        if plan.precision != "fp32":
            surround_parts(model, self._forward_context, self._is_called_alone)
        hook_root(model, RootRole.MANUAL_LOOP, before=self._before, after=self._after, with_kwargs=True)
        hook_root(model, RootRole.MANUAL_LOOP, after=self._after_failure, always=True, with_kwargs=True)

    @contextmanager
    def inside_engine_call(self) -> Iterator[None]:
        """A context in which the Engine itself runs the model and the optimizer."""
        before, self.is_engine_call = self.is_engine_call, True
        try:
            with self._sharded.computing_on_parts():
                yield
        finally:
            self.is_engine_call = before

    @contextmanager
    def in_loss(self) -> Iterator[None]:
        """A context, within :meth:`inside_engine_call`, for a loss function that calls the model: its forwards are the
        user's, as in a loop of one's own."""
        before = self.is_engine_call, self._in_loss
        self.is_engine_call, self._in_loss = False, True
        try:
            with self._sharded.calling_user():
                yield
        finally:
            self.is_engine_call, self._in_loss = before

    @contextmanager
    def _whole_forward(self) -> Iterator[None]:
        before, self._in_forward = self._in_forward, True
        try:
            with self._forward_context():
                yield
        finally:
            self._in_forward = before

    def _forward_context(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.is_engine_call else autocast(self._plan.precision, self._device)

    def _is_called_alone(self) -> bool:
        """Whether user code calls a part of the model, or another method of it, itself."""
        return not self.is_engine_call and not self._in_forward

    def _before(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        if self.is_engine_call or self._in_loss or not torch.is_grad_enabled():
            return
        self._shares.note_inputs((args, kwargs))
        self._means.note_batch((args, kwargs))
        self._same_batch.check("model", (args, kwargs), None)

    def _after(self, _: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if self.is_engine_call:
            return None
        if self._plan.precision != "fp32":
            output = widen_output(output)
        if torch.is_grad_enabled() and self.backwards.need_engine:
            watch_output(output, (args, kwargs), self.backwards.check)
        return output

    def _after_failure(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        error = sys.exception()
        if output is None and error is not None and not self.is_engine_call:
            note_inputs(error, model, (*args, *([kwargs] if kwargs else [])))
