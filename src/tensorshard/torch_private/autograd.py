"""Asking whether backward is running, and steering it; what recomputation compares with the forward that it repeats."""

import hashlib
import inspect
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import Node
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointFunction

_ENGINES_BACKWARD = "tensorshard_engines_backward"


def is_in_backward() -> bool:
    """Whether the caller runs inside of a backward pass, as recomputation does.

    Why: code that is recomputed in backward runs outside of the forward of ``DistributedDataParallel``.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    return torch._C._current_graph_task_id() != -1


def current_backward() -> int:
    """A number of the backward pass that the caller runs in. One that runs within another has its own; -1 for none.

    Why: a backward within a backward adds to gradients that may be added to again.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    return torch._C._current_graph_task_id()


def are_saved_tensors_hooked() -> bool:
    """Whether ``torch.autograd.graph.saved_tensors_hooks`` is on.

    Why: such hooks tell recomputation with ``use_reentrant=False``, which sets them, from recomputation with True.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def is_in_reentrant_checkpoint() -> bool:
    """Whether the caller runs in ``torch.utils.checkpoint`` with ``use_reentrant=True``, and will again in backward.

    Why: what is called without gradients for a checkpoint comes again in backward, unlike what a teacher calls.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            return any(frame.f_locals["ctx"].needs_input_grad)
        frame = frame.f_back
    return False


def is_function_transformed() -> bool:
    """Whether the caller runs inside of a function that ``torch.func`` transforms (``grad``, ``vmap`` and so on).

    Why: the derivative of such a function goes through all modules that it calls, and a pipeline's stage has some.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


def keeps_graph() -> bool:
    """Whether the backward that is running keeps its graph for another one.

    Why: parameters that a second backward needs stay gathered until no more backwards can follow.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def next_node() -> int:
    """The number of the next node of autograd's graph that this thread makes.

    Why: what a module made in a call tells itself from what it was given.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    return torch._C._autograd._get_sequence_nr()


def base_made_since(tensor: torch.Tensor, number: int) -> torch.Tensor | None:
    """What `tensor` is a view of, if autograd has made its node since :func:`next_node` gave `number`; else None.

    Why: a write in place makes a view's gradient come from what it is a view of, and hooks of the view are called no
    more.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    base: Any = tensor._base
    if base is None or base.grad_fn is None or base.grad_fn._sequence_nr() < number:
        return None
    return base  # type: ignore[no-any-return]


def call_after_backward(callback: Callable[[], None]) -> None:
    """Makes the backward that is running call `callback` when it is over.

    Why: ZeRO 0 to 2 wait for reductions that are still under way, no matter who called backward.

    Checked: torch 2.13 and 2.15.

    Public way: a call after ``backward()``, if the training loop is one's own.
    """
    Variable._execution_engine.queue_callback(callback)


def will_run(node: Node) -> bool:
    """Whether the backward that is running computes `node` of its graph.

    Why: ``autograd.grad`` of an input goes through a model without reaching its parameters, ``backward`` reaches them.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf whose gradient autograd.grad was asked for: it is returned, and not accumulated
        return False


@contextmanager
def engines_backward() -> Iterator[None]:
    """A context around an Engine's own backward, in which :func:`is_in_engines_backward` is true.

    Why: hooks that run in backward, of other Engines' models too, need to know. Those on a GPU run in threads of
    autograd, which get this thread's local objects, but not its context variables.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    before = is_in_engines_backward()
    torch._C._stash_obj_in_tls(_ENGINES_BACKWARD, True)
    try:
        yield
    finally:
        torch._C._stash_obj_in_tls(_ENGINES_BACKWARD, before)


def is_in_engines_backward() -> bool:
    """Whether this runs within :func:`engines_backward`.

    Why: as for that function.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    return torch._C._is_key_in_tls(_ENGINES_BACKWARD) and bool(torch._C._get_obj_in_tls(_ENGINES_BACKWARD))


_OWN = ("tensorshard.", "torch._functorch.")  # autograd functions that run none but their own operations


def operations_of_backward(loss: torch.Tensor) -> list[Node] | None:
    """All operations of the backward of `loss`. None if there are autograd functions of the user's, or reentrant
    checkpointing: they may run another backward within this one, or give no gradient.

    Why: reductions of gradients that may be added to once more wait for the end of a backward.

    Checked: torch 2.13 and 2.15.

    Public way: none for the class of an autograd function.
    """
    nodes: list[Any] = [] if loss.grad_fn is None else [loss.grad_fn]
    seen = set(nodes)
    for node in nodes:  # which grows
        function = getattr(node, "_forward_cls", None)  # the class of an autograd function that is written in Python
        if function is not None and not function.__module__.startswith(_OWN):
            return None
        for before, _ in node.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                nodes.append(before)
    return nodes


def order_of_backward(loss: torch.Tensor, numbers: Mapping[torch.Tensor, int]) -> int | None:
    """A number that is the same for backwards that run the same operations, and give parameters their gradients, in the
    same order. None if that cannot be told: see :func:`operations_of_backward`; or there are tensors on several
    devices, each of which has a thread of autograd's own.

    Args:
        numbers: of the parameters.

    Why: a reduction of gradients comes between the same two collectives of a backward on all ranks, or after them all.

    Checked: torch 2.13 and 2.15. Of the operations whose outputs' gradients are complete, autograd's thread takes the
    one that was recorded last.

    Public way: none for the order in which operations were recorded.
    """
    nodes: list[Any] | None = operations_of_backward(loss)
    if nodes is None or len({metadata.device for node in nodes for metadata in node._input_metadata}) > 1:
        return None
    places = {node: place for place, node in enumerate(nodes)}
    described: list[Any] = []
    for node in nodes:
        edges = [(places.get(before, -1), place) for before, place in node.next_functions]
        variable = getattr(node, "variable", None)
        described.append((node.name(), edges, None if variable is None else numbers.get(variable)))
    recorded = [node._sequence_nr() for node in nodes]
    described.append(sorted(range(len(nodes)), key=recorded.__getitem__))
    return int.from_bytes(hashlib.blake2b(repr(described).encode(), digest_size=8).digest(), "big") >> 1


# What a scalar passes through on its way from the means that it is made of.
_ARITHMETIC = ("Add", "Alias", "Clone", "Div", "Mul", "Neg", "Select", "Squeeze", "Sub", "ToCopy", "View")
_NLL_MEAN = 1
_UNCHANGED = ("Alias", "Clone", "Squeeze", "ToCopy", "View")  # these do not change a scalar's value
_LOSSES = ("NllLoss", "BinaryCrossEntropy", "MseLoss", "SmoothL1Loss", "HuberLoss")
_HALVED = ("MseLoss", "SmoothL1Loss", "HuberLoss")  # by convention, half of it is a loss, too
_MOST_NODES = 64
_REDUCTIONS = ("Sum", "Mean", "Std", "Var", "Amax", "Amin", "Logsumexp", "Norm", "LinalgVectorNorm")
_SELECTIONS = ("Index", "MaskedSelect", "Gather", "Take")  # of samples or tokens, any number of them
_NONLINEAR = ("Pow", "Sqrt", "Rsqrt", "Reciprocal", "Exp", "Log", "Sigmoid", "Tanh", "Softplus", "Std", "Var", "Amax",
              "Amin", "Max", "Min", "Norm", "LinalgVectorNorm", "Clamp", "Relu", "Abs")  # fmt: skip


def means_of(loss: torch.Tensor) -> list[torch.Tensor]:
    """What the means that the scalar `loss` is made of have divided by, as its graph says: scalars.

    These are ``nll_loss`` and ``cross_entropy`` (the targets that are not ignored, or their weights), ``mean`` (the
    elements) and division by a tensor; and custom functions with an attribute ``mean_over`` of their ``ctx``.

    Why: what a loss function divides by is told by nothing else; torch keeps it for backward.

    Checked: torch 2.13.

    Public way: none. A ``TorchFunctionMode`` sees the calls, but would make ``torch.compile`` compile again.
    """
    divisors: list[torch.Tensor] = []
    seen: set[Node] = set()
    todo = [loss.grad_fn]
    while todo and len(seen) < _MOST_NODES:
        node: Any = todo.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        name = node.name()
        if name.startswith("NllLoss"):
            if node._saved_reduction == _NLL_MEAN:
                divisors.append(node._saved_total_weight)
        elif name == "MeanBackward0":
            divisors.append(torch.tensor(float(node._saved_self_sym_numel)))
        elif getattr(node, "mean_over", None) is not None:
            divisors.append(node.mean_over)
        elif name.startswith(_ARITHMETIC):
            if name == "DivBackward0" and node._saved_other.dim() == 0:
                divisors.append(node._saved_other)
            todo.extend(before for before, _ in node.next_functions)
    return [value.detach() for value in divisors]


def divisor_of_mean(loss: torch.Tensor) -> int | None:
    """The whole number by which a mean over samples or tokens was divided last, to be all of the scalar `loss`.

    None where it is another quotient: one of a sum, of several terms, of a mean that is written out (which may be of
    such), by a number with a point, or half a squared error.

    Why: a loop of one's own may divide by its micro-batches, which nothing else tells.

    Checked: torch 2.13.

    Public way: none, as for :func:`means_of`.
    """

    def unchanged(node: Any) -> Any:
        while node is not None and node.name().startswith(_UNCHANGED):
            node = node.next_functions[0][0]
        return node

    quotient = unchanged(loss.grad_fn)
    if quotient is None or quotient.name() != "DivBackward0":
        return None
    by, mean = quotient._saved_other, unchanged(quotient.next_functions[0][0])
    if mean is None or by.dim() or by.is_floating_point() or by.requires_grad:
        return None
    kind = mean.name()
    is_loss = kind.startswith(_LOSSES) and mean._saved_reduction == _NLL_MEAN
    if not is_loss and getattr(mean, "mean_over", None) is None:
        return None
    return None if kind.startswith(_HALVED) and int(by) == 2 else int(by)


def statistics_in(loss: torch.Tensor, samples: int) -> tuple[bool, list[torch.Tensor]]:
    """What the graph of the scalar `loss` has that a mean over samples has not.

    Returns:
        Whether there is a statistic of the batch with several elements, such as the mean over its first dimension; a
        product, a root or another nonlinear function of a sum over the batch; or a matrix of [samples, samples]. And
        the tensors that are no samples, have no gradient, and by which something is multiplied.

    Why: what a loss function does with its batch is told by nothing else.

    Checked: torch 2.13.

    Public way: none, as for :func:`means_of`.
    """
    seen: set[Node] = set()
    todo: list[Any] = [loss.grad_fn]
    has_statistics, factors = False, []
    while todo and len(seen) < _MOST_NODES:
        node = todo.pop(0)
        if node is None or node in seen or node.name() == "torch::autograd::AccumulateGrad":
            continue
        seen.add(node)
        before = [each for each, _ in node.next_functions if each is not None]
        shape, kind = _result_shape(node), node.name()
        if kind.startswith(("Mul", "Div")) and len(before) == 1 and math.prod(shape) > 1:
            factor = _saved_factor(node)
            if factor is not None and factor.numel() > 1 and not _is_of_samples(tuple(factor.shape), samples):
                factors.append(factor.detach())
        dims = getattr(node, "_saved_dim", ()) if kind.startswith(_REDUCTIONS) else ()
        over = dims if isinstance(dims, tuple) else (dims,)
        has_statistics |= math.prod(shape) > 1 and any(dim in (0, 2**64 - len(shape) - 1) for dim in over)
        has_statistics |= shape == (samples, samples) and samples > 1
        if _is_of_samples(shape, samples):
            todo.extend(before if kind.startswith((*_ARITHMETIC, "Sum", "Mean", "Unsqueeze")) else ())
            continue
        if kind.startswith(_SELECTIONS):
            continue
        if math.prod(shape) > 1:
            has_statistics |= any(_is_of_samples(_result_shape(each), samples) for each in before)
        else:
            has_statistics |= kind.startswith(_NONLINEAR) or (len(before) > 1 and kind.startswith(("Mul", "Div")))
        todo.extend(before)
    return has_statistics, factors


def _result_shape(node: Any) -> tuple[int, ...]:
    metadata = node._input_metadata
    return tuple(metadata[0].shape) if metadata else ()


def _saved_factor(node: Any) -> torch.Tensor | None:
    """What the one operand with a gradient was multiplied by, or divided by."""
    try:
        values = [getattr(node, name, None) for name in ("_saved_other", "_saved_self")]
    except RuntimeError:  # it was freed, or moved
        return None
    return next((value for value in values if isinstance(value, torch.Tensor) and not value.requires_grad), None)


def _is_of_samples(shape: tuple[int, ...], samples: int) -> bool:
    return samples > 1 and len(shape) > 0 and shape[0] % samples == 0


def compare_saved_tensors(owner: object, describe: Callable[[torch.Tensor], Any]) -> str:
    """Returns a value of ``determinism_check`` for ``torch.utils.checkpoint.checkpoint``.

    With it, torch compares (by ``!=``) what `describe` returns for each tensor that forward saves, and for each that is
    recomputed in its place.

    It holds as long as `owner` lives, to which `describe` must not refer.

    Why: by default, torch compares shapes and types only, so a forward that computes other values the second time
    gives wrong gradients without a word.

    Checked: torch 2.13 and 2.15.

    Public way: none; ``determinism_check`` takes the names of two checks that torch has.
    """
    checks: dict[str, Callable[[torch.Tensor], Any]] = checkpoint._allowed_determinism_checks_to_fns
    name = f"tensorshard-{id(owner)}"
    checks[name] = describe
    weakref.finalize(owner, checks.pop, name, None)
    return name


def stops_early() -> bool:
    """Whether a repeated forward ends as soon as it has saved as many tensors as the first one did.

    Why: one that runs to its end has saved fewer, and torch's error does not name the block.

    Checked: torch 2.13 and 2.15.

    Public way: none; ``set_checkpoint_early_stop`` sets it.
    """
    return checkpoint._enable_checkpoint_early_stop is not False
