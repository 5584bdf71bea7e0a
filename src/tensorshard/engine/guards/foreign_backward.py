"""Backwards through a model's output that its Engine did not start: which of them reach the model's parameters.

A generator's loss goes back through a critic, and an attack differentiates by the inputs. Neither trains the model
that it goes through.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import Node

from tensorshard.plan.plan import Plan
from tensorshard.torch_private.autograd import engines_backward, is_in_engines_backward, will_run
from tensorshard.torch_private.pytree import tree_leaves

# The node of torch's reentrant checkpoint: what it recomputes in backward is no part of the graph.
_HIDDEN = "CheckpointFunctionBackward"


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
            counts = node.name() == _HIDDEN or (leaf is not None and all(leaf is not given for given in self._leaves))
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
                f"backward, or let this model's parameters need no gradient in it (requires_grad_(False))"
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
