"""Backwards through a model's output that its Engine did not start: which of them reach the model's parameters.

A generator's loss goes back through a critic, and an attack differentiates by the inputs. Neither trains the model
that it goes through.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd.graph import Node

from tensorshard.torch_private.autograd import will_run
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


def watch_output(output: Any, inputs: Any, called: Callable[[PartOfGraph], None]) -> None:
    """Calls `called` in each backward through a tensor of `output`."""
    for leaf in _with_graph(output):
        part = PartOfGraph(leaf, inputs)
        leaf.register_hook(lambda _, part=part: called(part))


def _with_graph(output: Any) -> Iterable[torch.Tensor]:
    return (leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None)
