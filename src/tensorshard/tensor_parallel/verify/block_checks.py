"""The checks of a model's blocks, and of modules inside of them.

A way to split a part of a block is tried on the module that holds this part first: it runs faster than the block. Most
ways are wrong. If the module refuses a way, so does the block. If it passes, the block is checked as a whole.
"""

from collections.abc import Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tensorshard.model.model_errors import raised_by_model
from tensorshard.model.provenance import OperationCounter
from tensorshard.model.tensors import map_tensors_once, tensor_leaves
from tensorshard.tensor_parallel.apply.apply_table import apply_tensor_parallel
from tensorshard.tensor_parallel.table.layer_styles import Style
from tensorshard.tensor_parallel.table.styles import Divide, owner_of
from tensorshard.tensor_parallel.table.table import TensorTable
from tensorshard.tensor_parallel.verify.block_calls import BlockCall, InTraining
from tensorshard.tensor_parallel.verify.block_check import BlockCheck
from tensorshard.tensor_parallel.verify.comparison import MismatchError, not_running
from tensorshard.tensor_parallel.verify.model_check import ModelCheck
from tensorshard.tensor_parallel.verify.model_run import ModelRun
from tensorshard.tensor_parallel.verify.simulated_ranks import fake_process_group
from tensorshard.torch_private.modules import own_buffers, own_parameters
from tensorshard.torch_private.pytree import tree_leaves

Styles = Mapping[str, Style]

# The largest number of weights' elements that are kept for another check.
_MOST_KEPT = 1 << 22


class BlockChecks:
    """The checks of blocks, one for blocks that are alike: making a check costs more than using it.

    Args:
        units: the blocks, by name.
        run: how the model calls them.
        size: number of ranks to split them over.

    Attributes:
        passed: what a caller found about blocks that passed, in case another table asks the same.
        around: the check of the model around the blocks, once a caller has made it.
    """

    def __init__(self, units: Mapping[str, nn.Module], run: ModelRun, size: int) -> None:
        self.size = size
        self._units, self._run = units, run
        self._made: dict[int, BlockCheck] = {}
        self.passed: dict[Hashable, Any] = {}
        self.around: ModelCheck | None = None

    def of(self, name: str) -> BlockCheck:
        """The check of blocks like the one called `name`."""
        kind = self._run.kinds[name]
        if kind not in self._made:
            call = self._run.calls[name]
            self._made[kind] = BlockCheck(
                self._units[name],
                call,
                self.size,
                read_outside=self._read_outside(kind),
                training=self._in_training(kind),
            )
        return self._made[kind]

    def _in_training(self, kind: int) -> InTraining:
        """What any block of this kind does in training."""
        capture = self._run.capture
        names = [name for name, other in self._run.kinds.items() if other == kind]
        written = frozenset().union(*(capture.training.inside(name).written for name in names))
        return InTraining(any(name in capture.trained_otherwise for name in names), written)

    def _read_outside(self, kind: int) -> frozenset[str]:
        """Parameters of blocks of this kind that code outside of their block reads, by their names in the block."""
        names: set[str] = set()
        for name, other in self._run.kinds.items():
            if name and other == kind:
                for parameter, reader in self._run.capture.forward_readers.items():
                    if parameter.startswith(f"{name}.") and not f"{reader}.".startswith(f"{name}."):
                        names.add(parameter.removeprefix(f"{name}."))
        return frozenset(names)

    def forget_large(self) -> None:
        """Frees the numbers of the checks made so far, if they are many. They are made again when they are needed."""
        if sum(check.num_elements for check in self._made.values()) > _MOST_KEPT:
            self._made.clear()


def styles_inside(name: str, styles: Styles) -> dict[str, Style]:
    """The styles of what is inside the block `name`, by the names in it."""
    prefix = f"{name}." if name else ""
    itself = {"": styles[name]} if name and name in styles else {}
    return itself | {key.removeprefix(prefix): style for key, style in styles.items() if key.startswith(prefix)}


@dataclass
class _Kind:
    """Modules that compute the same, and the ways to split them that were tried.

    Args:
        described: their classes and shapes, and what they are called with.
        check: the check of one of them.
        refusals: for each way, why it is refused; None if it is not.
    """

    described: Hashable
    check: BlockCheck
    refusals: dict[Hashable, MismatchError | None] = field(default_factory=dict)


class KnownModules:
    """The modules inside of a model's blocks on which ways were tried. Of modules that compute the same, one is tried.

    Such modules have the same classes and shapes. With the same weights they return the same numbers for the same
    inputs, bit by bit. Blocks of different kinds often have such modules: the attention of a layer with experts and of
    one without.
    """

    def __init__(self) -> None:
        self._kinds: list[_Kind] = []

    def of(self, module: nn.Module, call: BlockCall, size: int, training: InTraining) -> _Kind:
        """The kind of `module`, which is called with the tensors of `call`. A kind that is not known yet is added."""
        described = (_structure(module), _arguments(call.args, call.kwargs), training)
        check = BlockCheck(module, call, size, own_inputs=True, training=training)
        for kind in self._kinds:
            if kind.described == described and check.computes_like(kind.check):
                return kind
        self._kinds.append(_Kind(described, check))
        return self._kinds[-1]


class InnerCheck:
    """Tries ways on the module inside of a block that holds everything that they split.

    Args:
        block: the check of the block.
        name: name of the module in the block.
        call: how the block calls it, with real tensors.
        operations: how many operations the block runs before.
        known: the modules on which ways were tried so far.
    """

    def __init__(self, block: BlockCheck, name: str, call: BlockCall, operations: int, known: KnownModules) -> None:
        self._block, self._name, self._call, self._operations = block, name, call, operations
        self._module = block.make_copy().get_submodule(name)
        self._kind = known.of(self._module, call, block.size, block.training.inside(name))
        self._upstream: dict[Hashable, tuple[bool, MismatchError | None]] = {}

    def check(self, styles: Styles) -> None:
        """Tries `styles`, by names in the block.

        If the styles of modules around this one change the arguments of its call, nothing is decided: the block has to
        be tried.

        Raises:
            MismatchError: the block would refuse the styles, too.
        """
        prefix = f"{self._name}."
        inside = {key[len(prefix) :]: style for key, style in styles.items() if f"{key}.".startswith(prefix)}
        outside = {key: style for key, style in styles.items() if not f"{key}.".startswith(prefix)}
        if outside:
            key = tuple(outside.items())
            if key not in self._upstream:
                self._upstream[key] = self._effect(outside)
            changes, refusal = self._upstream[key]
            if refusal is not None:
                raise refusal.again()
            if changes:
                return
        self._check_inside(inside)

    def _check_inside(self, styles: Styles) -> None:
        key = tuple((name, style, self._divided(name, style)) for name, style in styles.items())
        refusals = self._kind.refusals
        if key not in refusals:
            try:
                self._kind.check.check(styles)
                refusals[key] = None
            except MismatchError as error:
                refusals[key] = error.again()
        refusal = refusals[key]
        if refusal is not None:
            raise refusal.again(self._operations)

    def _divided(self, name: str, style: Style) -> Hashable:
        """The numbers that `style` divides. Modules that compute the same may have different numbers there."""
        if not isinstance(style, Divide):
            return ()
        owned = (owner_of(self._module.get_submodule(name), target.partition("/")[0]) for target in style.targets)
        return tuple(getattr(owner, attribute, None) for owner, attribute in owned)

    def _effect(self, outside: Styles) -> tuple[bool, MismatchError | None]:
        """Whether `outside` changes what the module is called with; and if the block fails before the call, why."""
        counter = OperationCounter()
        try:
            call = _call_inside(self._block, self._name, counter, outside)
        except Exception as error:
            if not raised_by_model(error):
                raise
            return True, not_running(error).again(counter.operations)
        same = call is not None and _same((call[0].args, call[0].kwargs), (self._call.args, self._call.kwargs))
        return not same, None


def inner_check(block: BlockCheck, names: Iterable[str], known: KnownModules) -> InnerCheck | None:
    """The check of the smallest module in a block that holds all `names` and is called once; None if there is none.

    Args:
        names: of modules and parameters in the block.
    """
    name = _common([key.rpartition(".")[0] for key in names])
    while name:
        call = _call_inside(block, name, OperationCounter())
        if call is not None:
            try:
                return InnerCheck(block, name, *call, known)
            except Exception as error:  # any error of the block on random weights
                if not raised_by_model(error):
                    raise
                return None
        name = name.rpartition(".")[0]
    return None


def _call_inside(
    block: BlockCheck, name: str, counter: OperationCounter, styles: Styles | None = None
) -> tuple[BlockCall, int] | None:
    """The arguments that a block calls the module `name` in it with, and the number of operations before the call.

    Args:
        counter: counts the operations.
        styles: applied to the block first, as for the first of its ranks. The run then ends with the first call.

    Returns:
        None if the block never calls it, or calls it several times.

    Raises:
        Any error that the block raises before the call.
    """
    copied = block.make_copy()
    if styles:
        apply_tensor_parallel(copied, TensorTable(dict(styles)), fake_process_group(0, block.size))
    calls: list[tuple[BlockCall, int]] = []

    def called(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        operations = counter.operations
        calls.append((BlockCall(*map_tensors_once(_kept, (args, kwargs))), operations))
        if styles:
            raise _Reached

    copied.get_submodule(name).register_forward_pre_hook(called, with_kwargs=True)
    args, kwargs = block.make_inputs()
    with suppress(_Reached), counter:
        copied(*args, **kwargs)
    return calls[0] if len(calls) == 1 else None


class _Reached(BaseException):
    """Ends a run."""


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _common(names: Iterable[str]) -> str:
    """The innermost module that holds all `names`, or is one of them."""
    paths = [name.split(".") for name in names]
    common = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


def _structure(module: nn.Module) -> Hashable:
    return tuple(
        (
            name,
            type(inner),
            tuple((key, tuple(p.shape)) for key, p in own_parameters(inner).items()),
            tuple((key, tuple(b.shape), b.dtype) for key, b in own_buffers(inner).items()),
        )
        for name, inner in module.named_modules()
    )


def _arguments(*given: Any) -> Hashable:
    return tuple(
        (tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
        if isinstance(leaf, torch.Tensor)
        else (type(leaf), leaf if isinstance(leaf, bool | int | float | str) else None)
        for leaf in tree_leaves(given)
    )


def _same(inputs: Any, expected: Any) -> bool:
    return _arguments(*inputs) == _arguments(*expected) and all(
        torch.equal(ours, theirs) for ours, theirs in zip(tensor_leaves(inputs), tensor_leaves(expected), strict=True)
    )
