"""Runs a model on fake tensors: the modules that are searched and checked, how they are called, and which are alike."""

from collections import Counter
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tensorshard.model.blocks import find_blocks
from tensorshard.model.copies import copy_module
from tensorshard.model.model_errors import raised_by_model
from tensorshard.model.sample_inputs import example_inputs, smaller_inputs
from tensorshard.model.tensors import tensor_leaves
from tensorshard.tensor_parallel.table.layer_kinds import as_splittable, is_convolution, is_multihead_attention
from tensorshard.tensor_parallel.verify.block_calls import BlockCall, Capture, capture_calls
from tensorshard.tensor_parallel.verify.block_kinds import block_kinds, describe_module
from tensorshard.torch_private.pytree import tree_flatten

# A shrunken model keeps this many of the blocks that are alike, so that one passes its output to the next.
_MOST_OF_A_KIND = 2


def find_units(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that are searched and checked one by one: blocks with layers to split, else the whole model.

    Beside the blocks of a convolutional network, there may be modules that are in no list (the middle of a U-Net). The
    largest of these that have convolutions to split and contain no blocks are added. A stage may have a single block,
    and so show no repetition. If a block is within a module of the same class as other blocks, that module is used
    instead.
    """
    blocks = find_blocks(model)
    classes = {type(block) for block in blocks.values()} - {nn.Sequential}
    units: dict[str, nn.Module] = {}
    for name, block in blocks.items():
        outermost = _outermost_of_classes(model, name, classes)
        if outermost is not None:
            units[outermost] = model.get_submodule(outermost)
        elif _num_splittable(block) > 1:
            units[name] = block
    return {**units, **_beside(model, "", units)} if units else {"": model}


def _outermost_of_classes(model: nn.Module, name: str, classes: set[type[nn.Module]]) -> str | None:
    """The outermost module around the block `name` that has convolutions and is of one of `classes`; None for none."""
    parts = name.split(".")
    for length in range(1, len(parts)):
        around = ".".join(parts[:length])
        module = model.get_submodule(around)
        if type(module) in classes and any(is_convolution(m) for m in module.modules()):
            return around
    return None


def _num_splittable(block: nn.Module) -> int:
    return sum(as_splittable(m) is not None or is_multihead_attention(m) for m in block.modules())


def _beside(module: nn.Module, prefix: str, units: Container[str]) -> dict[str, nn.Module]:
    modules: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if path in units or not any(is_convolution(m) for m in child.modules()):
            continue
        callable_alone = type(child).forward is not nn.Module.forward
        holds_unit = any(f"{path}.{inner}" in units for inner, _ in child.named_modules())
        if callable_alone and not holds_unit:
            if _num_splittable(child) > 1:
                modules[path] = child
        else:
            modules.update(_beside(child, f"{path}.", units))
    return modules


Captures = dict[Hashable, Capture]
"""Runs of one model, shared between searches for several numbers of ranks, so that each run is made once."""

_kept: list[Captures] = []


@contextmanager
def captures_kept(captures: Captures) -> Iterator[None]:
    """Inside, :func:`captured` takes the runs that it finds in `captures`, and adds the others to them.

    All models inside have to be the same one, or copies of it: others may differ in ways that no description shows.
    """
    _kept.append(captures)
    try:
        yield
    finally:
        _kept.pop()


def captured(model: nn.Module, blocks: Iterable[str], inputs: Any) -> Capture:
    """As :func:`capture_calls`. Inside of :func:`captures_kept`, a run is not repeated."""
    names = list(blocks)
    if not _kept:
        return capture_calls(model, names, inputs)
    key = (
        describe_module(model),
        tuple((name, p.dtype, p.requires_grad) for name, p in model.named_parameters(remove_duplicate=False)),
        tuple(names),
        _described(inputs),
    )
    if key not in _kept[-1]:
        _kept[-1][key] = capture_calls(model, names, inputs)
    capture = _kept[-1][key]
    return replace(capture, calls=dict(capture.calls))  # callers leave out the calls of what they cannot examine


def _described(inputs: Any) -> Hashable:
    leaves, spec = tree_flatten(inputs)
    return spec, tuple(
        (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else repr(leaf)
        for leaf in leaves
    )


@dataclass(frozen=True)
class ModelRun:
    """One run of a model on fake tensors.

    Args:
        capture: what the run showed of the units.
        inputs: what the model was run on.
        kinds: a number for each unit that was called. Units that can stand for each other have the same number.
        guessed: whether the inputs were guessed.
    """

    capture: Capture
    inputs: Any
    kinds: dict[str, int]
    guessed: bool = False

    @property
    def calls(self) -> dict[str, BlockCall]:
        """The first call of each unit, in the order of the run."""
        return self.capture.calls


def run_once(model: nn.Module, units: list[str], inputs: Any, size: int = 1, *, sequences: bool = False) -> ModelRun:
    """Runs `model` on fake tensors. If `inputs` is None, they are guessed; `sequences` prefers inputs with positions.

    A large batch is cut to a small one that shows the same: the same operations in the same order, and the same flow
    from block to block.

    Args:
        size: number of ranks to split over.

    Raises:
        ValueError: the model does not run.
    """
    candidates = example_inputs(model) if inputs is None else [inputs]
    if sequences:
        candidates.sort(key=_is_flat)
    error: Exception | None = None
    for candidate in candidates:
        try:
            capture = captured(model, units, candidate)
        except Exception as caught:  # any error of the model on guessed inputs
            if not raised_by_model(caught):
                raise
            error = error or caught
            continue
        blocks = {name: model.get_submodule(name) for name in units}
        run = ModelRun(capture, candidate, block_kinds(blocks, capture.calls), guessed=inputs is None)
        return run if run.guessed else _on_fewer(model, blocks, run, size)
    remedy = (
        "give parallelize(sample_inputs=...), or find_tensor_plan(inputs=...), inputs as for Engine.step, of any "
        "values and any sizes that the model takes"
    )
    if error is None:
        raise ValueError(f"no inputs could be guessed to run {type(model).__name__} with; {remedy}")
    what = "the guessed inputs" if inputs is None else "the given inputs"
    raise ValueError(
        f"{type(model).__name__} does not run on {what}, {type(error).__name__}: {error}"
        + (f"; {remedy}" if inputs is None else "")
    ) from error


def _on_fewer(model: nn.Module, blocks: Mapping[str, nn.Module], run: ModelRun, size: int) -> ModelRun:
    """A run of `model` on a smaller batch than that of `run`, if it shows the same; else `run`."""
    inputs = smaller_inputs(run.inputs, size)
    if inputs is None:
        return run
    try:
        capture = captured(model, blocks, inputs)
    except Exception as error:
        if not raised_by_model(error):
            raise
        return run
    smaller = ModelRun(capture, inputs, block_kinds(blocks, capture.calls))
    same = capture.is_like(run.capture) and smaller.kinds == run.kinds
    return smaller if same else run


def _is_flat(inputs: Any) -> bool:
    return all(tensor.is_floating_point() and tensor.ndim < 3 for tensor in tensor_leaves(inputs))


def without_repetition(model: nn.Module, kinds: Mapping[str, int]) -> nn.Module:
    """A copy of `model` on the meta device that keeps two of each run of blocks that are alike, by their old names.

    Args:
        kinds: of its blocks, as in :class:`ModelRun`.
    """
    parameters = {id(t): _on_meta(t) for t in (*model.parameters(), *model.buffers())}
    smaller = copy_module(model, parameters)
    num_seen: Counter[tuple[str, int]] = Counter()
    for name, kind in kinds.items():
        if not name:
            continue
        owner, _, key = name.rpartition(".")
        num_seen[owner, kind] += 1
        if num_seen[owner, kind] > _MOST_OF_A_KIND:
            nn.Module.__delattr__(smaller.get_submodule(owner), key)
    return smaller


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach().to("meta"), requires_grad=tensor.requires_grad)
    return tensor  # a buffer's values may matter, and it is small
