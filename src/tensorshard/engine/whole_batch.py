"""Functions of tokens that see those of all data ranks and micro-batches, as the balance losses of routers have to.

Such a loss multiplies shares of the batch with each other (Fedus et al. 2021, "Switch Transformers", equation 4). The
mean of the parts' products is not the product of the means. So each part computes the function of everybody's tokens,
and its backward gives the gradient by its own.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from tensorshard.comm.collectives import all_reduce_
from tensorshard.comm.kept_results import as_kept
from tensorshard.comm.primitives import gather_dim, gather_flat
from tensorshard.comm.world import world
from tensorshard.model.forward_contexts import RootRole, surround_root
from tensorshard.plan.mesh import Mesh
from tensorshard.plan.plan import Plan
from tensorshard.torch_private.autograd import is_in_backward
from tensorshard.torch_private.pytree import tree_flatten, tree_unflatten

_LOSSES_OF_ROUTERS = ("load_balancing_loss_func", "router_z_loss_func")
"""Functions of transformers' files that models call with the router's logits of all their tokens."""

_Tokens = list[torch.Tensor]  # the tensors of a call, of one part of the batch


class WholeBatch:
    """Computes functions over the tokens of a whole step.

    Attributes:
        was_called: whether such a function was called in a step, so that several micro-batches need :meth:`collected`.
    """

    def __init__(self, mesh: Mesh, plan: Plan) -> None:
        self._mesh, self._plan = mesh, plan
        self.was_called = False
        self._part: int | None = None  # that is computed now
        self._parts = 1
        self._counts_samples = True
        self._collects = False
        self._calls = 0  # in this part, so far
        self._tokens: list[list[list[_Tokens]]] = []  # by part, call and data rank
        self._factors: list[float] = []  # of each part: the whole count, by the part's

    # -- the Engine says which part is computed --

    @contextmanager
    def part(self, index: int, parts: int, *, counts: bool) -> Iterator[None]:
        """Within this, forwards are those of a micro-batch.

        Args:
            index, parts: which one it is, of how many.
            counts: whether it has samples of this rank's own; else one stands in, whose tokens are left out.
        """
        before = self._part, self._parts, self._counts_samples, self._calls
        self._part, self._parts, self._counts_samples, self._calls = index, parts, counts, 0
        try:
            yield
        finally:
            self._part, self._parts, self._counts_samples, self._calls = before

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Within this, the parts' tokens are collected, for the forwards that follow until :meth:`forget`."""
        self._tokens, self._collects = [], True
        try:
            yield
        finally:
            self._collects = False

    def weigh(self, counts: Sequence[torch.Tensor]) -> None:
        """Says how much each collected part counts. A collective of the data ranks.

        Args:
            counts: of this rank's parts, each a scalar or, of several terms, [terms].

        Raises:
            ValueError: on every rank. A part counts nothing, or not the same share of each term.
        """
        stacked = torch.stack([count.double().reshape(-1) for count in counts])
        if self._mesh.dp_size > 1:
            all_reduce_(stacked, self._mesh.dp_group, what="what micro-batches count")
        rows: list[list[float]] = world().known(stacked, [[1.0] * stacked.size(1)] * len(counts))
        totals = [sum(column) for column in zip(*rows, strict=True)]
        factors = [{round(total / count, 9) for total, count in zip(totals, row, strict=True) if count} for row in rows]
        if any(len(each) != 1 for each in factors) or any(0 in row for row in rows):
            raise ValueError(
                f"the loss has a function of the whole batch, such as a balance loss, and its terms count {rows} in "
                f"the {len(rows)} micro-batches: each must count something, and the same share of every term; set "
                f"micro_batches=1"
            )
        self._factors = [each.pop() for each in factors]

    def forget(self) -> None:
        """Drops what was collected."""
        self._tokens, self._factors = [], []

    # -- calls --

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, computed over the tokens of the whole batch."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = self._call(function, args, kwargs)
            return as_kept(result, self._mesh.dp_group) if isinstance(result, torch.Tensor) else result

        return call

    def install(self, model: nn.Module) -> None:
        """Makes forwards of `model` run within :meth:`_installed`."""
        if self._plan.pp == 1:  # stages have no forward of the whole model
            files = sorted({base.__module__ for module in model.modules() for base in type(module).__mro__})
            surround_root(model, RootRole.WHOLE_BATCH, partial(self._installed, files))

    @contextmanager
    def _installed(self, files: Sequence[str]) -> Iterator[None]:
        """Within this, the functions in `files` of transformers by which models balance their routers see the whole
        batch."""
        replaced = []
        for file in files:
            names = vars(sys.modules[file]) if file.startswith("transformers.") and file in sys.modules else {}
            for name in _LOSSES_OF_ROUTERS:
                function = names.get(name)
                if isinstance(function, FunctionType):
                    replaced.append((names, name, function))
                    names[name] = self.of(function)
        try:
            yield
        finally:
            for names, name, function in replaced:
                names[name] = function

    def _call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._mesh.dp_size * self._plan.micro_batches == 1 and self._counts_samples:
            return function(*args, **kwargs)
        name = getattr(function, "__name__", "the function")
        self._check(name)
        leaves, spec = tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.dim()]
        if not places:
            return function(*args, **kwargs)
        self.was_called = True
        call, self._calls = self._calls, self._calls + 1
        given = [leaves[i] for i in places]
        own = given if self._counts_samples else [tensor[:0] for tensor in given]
        part, parts = self._part or 0, self._parts
        if self._collects:
            self._tokens[part:] = [[*self._tokens[part], self._everyone(own)]] if call else [[self._everyone(own)]]
        if self._collects or (parts > 1 and not self._tokens):  # the values of this pass are not used
            return function(*args, **kwargs)
        everyone = [of_part[call] for of_part in self._tokens] if self._tokens else [self._everyone(own)]
        rank = self._mesh.dp_rank
        mine = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in own]
        everyone[part] = [*everyone[part][:rank], mine, *everyone[part][rank + 1 :]]
        ordered = [of_part[other] for other in range(self._mesh.dp_size) for of_part in everyone]
        trained = [tensor for tensor in mine if tensor.requires_grad] if torch.is_grad_enabled() else []
        with saved_tensors_hooks(_as_it_is, _as_it_is):  # recomputation would run for what is used here, at once
            for place, tensors in zip(places, zip(*ordered, strict=True), strict=True):
                leaves[place] = _joined(tensors, name)
            again_args, again_kwargs = tree_unflatten(leaves, spec)
            result = function(*again_args, **again_kwargs)
            if not isinstance(result, torch.Tensor):
                return result
            if result.dim():
                raise TypeError(
                    f"{name} returned a tensor of shape {list(result.shape)}, and what is computed over the whole "
                    f"batch must be a scalar"
                )
            if not trained or not result.requires_grad:
                return result.detach()
            gradients = torch.autograd.grad(result, trained, allow_unused=True)
        factor = self._factors[part] if self._factors else 1.0
        given = [tensor for tensor in given if tensor.requires_grad]
        if not self._counts_samples:
            gradients = tuple(torch.zeros_like(tensor) for tensor in given)
        return _OfAll.apply(result.detach(), factor, self._mesh, gradients, *given)

    def _check(self, name: str) -> None:
        """Refuses calls where the tokens of the whole batch are not to be had.

        Raises:
            RuntimeError: the plan, or the place of the call, allows none.
        """
        plan = self._plan
        what = None
        if plan.cp > 1:
            what = f"cp={plan.cp}, whose ranks have parts of samples: set cp=1"
        elif plan.pp > 1:
            what = f"pp={plan.pp}, where a rank has the tokens of one micro-batch at a time: set pp=1"
        elif plan.micro_batches > 1 and self._part is None and torch.is_grad_enabled():
            what = (
                f"micro_batches={plan.micro_batches} in a loop of your own, where later micro-batches are not known "
                f"yet: call engine.step, or set micro_batches=1"
            )
        elif self._parts > 1 and is_in_backward():
            what = (
                f"recompute={plan.recompute!r} and micro_batches={plan.micro_batches} in a block that is computed "
                f"again: call it outside of the blocks, or set micro_batches=1 or recompute='none'"
            )
        if what is not None:
            raise RuntimeError(f"{name} is computed over the whole batch, which does not go with {what}")

    def _everyone(self, own: _Tokens) -> list[_Tokens]:
        """The tensors of each data rank: this rank's `own`, and those that the others passed."""
        own = [tensor.detach() for tensor in own]
        group, ranks = self._mesh.dp_group, self._mesh.dp_size
        if ranks == 1:
            return [own]
        shape = [size for tensor in own for size in tensor.shape]
        shapes = [shape] * ranks
        if dist.get_backend(group) != "fake":
            shapes = world().known(gather_flat(torch.tensor(shape, device=own[0].device), group), shapes)
        tokens: list[_Tokens] = [[] for _ in range(ranks)]
        sizes = [_sizes(each, own) for each in shapes]
        flat: dict[torch.dtype, list[list[torch.Tensor]]] = {}
        for dtype in dict.fromkeys(tensor.dtype for tensor in own):
            mine = [index for index, tensor in enumerate(own) if tensor.dtype == dtype]
            numels = [[torch.Size(of_rank[index]).numel() for index in mine] for of_rank in sizes]
            sent = torch.cat([own[index].reshape(-1) for index in mine])
            gathered = gather_dim(_as_numbers(sent), 0, [sum(each) for each in numels], group).to(dtype)
            flat[dtype] = [
                list(part.split(each))
                for part, each in zip(gathered.split([sum(n) for n in numels]), numels, strict=True)
            ]
        for rank, of_rank in enumerate(sizes):
            rest = {dtype: iter(parts[rank]) for dtype, parts in flat.items()}
            tokens[rank] = [next(rest[t.dtype]).view(size) for t, size in zip(own, of_rank, strict=True)]
        return tokens


class _OfAll(Function):
    """A value that all data ranks have, with the gradient by this part's tokens."""

    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, factor: float, mesh: Mesh, gradients: Sequence[Any], *own: torch.Tensor
    ) -> torch.Tensor:
        ctx.factor, ctx.mesh, ctx.gradients = factor, mesh, gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # The loss of each rank has the value in it, by its share. Their sum is the derivative of the whole loss by it.
        upstream = grads[0].clone()
        if ctx.mesh.dp_size > 1:
            all_reduce_(upstream, ctx.mesh.dp_group, what="the derivative by a function of the whole batch")
        upstream = upstream * ctx.factor
        return None, None, None, None, *(None if g is None else (g * upstream).to(g.dtype) for g in ctx.gradients)


def _sizes(shape: Sequence[int], like: _Tokens) -> list[list[int]]:
    rest = iter(shape)
    return [[int(next(rest)) for _ in tensor.shape] for tensor in like]


def _as_numbers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor


def _joined(tensors: Sequence[torch.Tensor], name: str) -> torch.Tensor:
    if len({tensor.shape[1:] for tensor in tensors}) == 1:
        return torch.cat(list(tensors))
    if tensors[0].dim() == 2 and not tensors[0].is_floating_point():  # masks of samples of other lengths: of tokens
        return torch.cat([tensor.reshape(1, -1) for tensor in tensors], 1)
    shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors[:8])
    raise ValueError(
        f"{name} is computed over the whole batch, and its parts gave it tensors of shapes {shapes}, which differ "
        f"beyond the first dimension, that of tokens: pad all samples of a step to one length"
    )


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
