"""Forwards of a model that user code calls itself: precision, checks of the batch, and explained errors.

Forwards that the Engine runs have all of this from the Engine's own calls.

Also here: backwards through a model's output that its Engine did not start: which of them reach the model's parameters.

A generator's loss goes back through a critic, and an attack differentiates by the inputs. Neither trains the model
that it goes through.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from tensorshard.data_parallel.sharded_model import ShardedModel
from tensorshard.engine.guards.uneven_means import UnevenMeans
from tensorshard.engine.guards.wrong_batch import SameBatch, note_inputs
from tensorshard.engine.last_batch import BatchShares
from tensorshard.model.forward_contexts import RootRole, hook_root, surround_parts, surround_root
from tensorshard.passes.precision import autocast, widen_output
from tensorshard.plan.mesh import Mesh
from tensorshard.plan.plan import Plan
from tensorshard.torch_private.autograd import engines_backward, is_in_engines_backward, will_run
from tensorshard.torch_private.pytree import tree_leaves
from tensorshard.torch_private.recomputation import CHECKPOINT_NODE

# The node of torch's reentrant checkpoint: what it recomputes in backward is no part of the graph.


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
            surround_parts(model, lambda *_: self._forward_context(), self._is_called_alone)
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


class PartOfGraph:
    """The nodes between a model's output and its inputs.

    It refers to the nodes after that of the output, since that node's hook holds this object.

    Args:
        output: a tensor with a graph.
        inputs: the arguments of the model's call, of any structure.
    """

    def __init__(self, output: torch.Tensor, inputs: Any) -> None:
        assert output.grad_fn is not None
        self._first = _next(output.grad_fn)
        given = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        self._before = {leaf.grad_fn for leaf in given if leaf.grad_fn is not None}
        self._leaves = [leaf for leaf in given if leaf.grad_fn is None]

    def reaches_parameters(self) -> bool:
        """Whether the backward that is running adds to the gradients of leaves other than the inputs."""
        seen: set[Node] = set(self._before)
        todo = list(self._first)
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)
            is_users = leaf is not None and all(leaf is not given for given in self._leaves)
            counts = is_users or node.name() == CHECKPOINT_NODE
            if counts and will_run(node):
                return True
            todo += _next(node)
        return False


def _next(node: Node) -> list[Node]:
    return [after for after, _ in node.next_functions if after is not None]


class ForeignBackwards:
    """Refuses backwards whose losses the Engine would have to scale, but that it did not start.

    Args:
        plan: which says whether losses are scaled, or cut into micro-batches.
    """

    def __init__(self, plan: Plan) -> None:
        self._by_engine = False  # whether this Engine's own backward is running
        self._added = False  # whether another Engine's backward has added to the gradients
        self._losses: list[str] = []
        if plan.precision == "fp16":
            self._losses.append("precision='fp16', whose losses are scaled")
        if plan.micro_batches > 1 or not self._losses:
            self._losses.append(f"micro_batches={plan.micro_batches}")
        self.need_engine = plan.precision == "fp16" or plan.micro_batches > 1

    @contextmanager
    def by_engine(self) -> Iterator[None]:
        """A context for a backward that the Engine runs."""
        self._by_engine = True
        try:
            with engines_backward():
                yield
        finally:
            self._by_engine = False

    def check(self, part: PartOfGraph) -> None:
        """Called in every backward through the model's output.

        Args:
            part: of the graph, from the output to the model's inputs.

        Raises:
            RuntimeError: the backward is no Engine's, and adds to this Engine's gradients.
        """
        if self._by_engine or self._added or not part.reaches_parameters():
            return
        if is_in_engines_backward():  # a generator's, through this critic; its zero_grad drops what is added here
            self._added = True
            return
        raise RuntimeError(
            f"loss.backward() was called under a plan with {', and '.join(self._losses)}: call engine.backward(loss) "
            f"in its place (docs/your-own-loop.md), or engine.step(inputs, targets), which does all of a step; the "
            f"gradient by inputs alone is torch.autograd.grad(loss, inputs)"
        )

    def check_no_foreign_gradient(self, call: str) -> None:
        """Refuses gradients that another Engine's backward has added to."""
        if self._added:
            raise RuntimeError(
                f"{call} was called with gradients to which another Engine's backward has added, through this Engine's "
                f"model, under a plan with {', and '.join(self._losses)}: call engine.optimizer.zero_grad() after that "
                f"backward, or let this model's parameters need no gradient in it (requires_grad_(False)). To train "
                f"both models by one loss, make one Engine of both, as of torch.nn.ModuleDict, or take "
                f"precision='bf16' and micro_batches=1"
            )

    def forget(self) -> None:
        """Called when all gradients are dropped."""
        self._added = False


def watch_output(output: Any, inputs: Any, called: Callable[[PartOfGraph], None]) -> None:
    """Calls `called` in each backward through a tensor of `output`."""
    for leaf in _with_graph(output):
        leaf.register_hook(_Notice(called, PartOfGraph(leaf, inputs)))


class _Notice:
    """A hook that only has to run when backward begins."""

    takes_gradient = False

    def __init__(self, called: Callable[[PartOfGraph], None], part: PartOfGraph) -> None:
        self._called, self._part = called, part

    def __call__(self, _: torch.Tensor) -> None:
        self._called(self._part)


def _with_graph(output: Any) -> Iterable[torch.Tensor]:
    return (leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None)
