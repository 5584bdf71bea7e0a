"""What a model's blocks are called with, found by running it on fake tensors."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tensorshard.modules.fake_copies import blank, copy_with
from tensorshard.modules.stacked_experts import stand_in
from tensorshard.modules.tensors import storage_key, tensor_leaves
from tensorshard.tensor_parallel.table.layer_kinds import as_splittable
from tensorshard.torch_private.dispatch import TorchDispatchMode
from tensorshard.torch_private.fake_tensors import FakeTensorMode
from tensorshard.torch_private.modules import own_parameters
from tensorshard.torch_private.pytree import tree_leaves, tree_map_only


@dataclass
class BlockCall:
    """The first call of a block.

    Args:
        args, kwargs: as it was called, tensors on the meta device; they require gradients where the model's
            did.
        providers: for each tensor leaf of (args, kwargs) that came out of another block: that block's name
            and the index among its output's leaves.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    providers: dict[int, tuple[str, int]] = field(default_factory=dict)


@dataclass
class Capture:
    """What one run of a model showed.

    Args:
        calls: first calls of blocks, by name, in the order of the run.
        used_outside: parameters that an operation read outside of the forward of a splittable layer that
            holds them.
        escaped: outputs of blocks, as (block, index among its output's leaves), that something else than the call of a
            block reads: code between the blocks, or the caller of the model.
        repeated: blocks that were called more than once.
    """

    calls: dict[str, BlockCall]
    used_outside: set[str]
    escaped: set[tuple[str, int]] = field(default_factory=set)
    repeated: set[str] = field(default_factory=set)


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Calls `model` as the Engine does: a tuple's members as arguments, a dict's as keyword arguments."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def capture_calls(model: nn.Module, blocks: Iterable[str], inputs: Any) -> Capture:
    """Runs a fake copy of `model` on `inputs` and notes how the modules named in `blocks` are called.

    Args:
        inputs: as for ``Engine.step``; only their shapes and types matter.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake_copy = copy_with(model, blank).eval()
        stand_in(fake_copy)
        recorder = _Recorder(fake_copy)
        for name in blocks:
            recorder.watch(name, fake_copy.get_submodule(name))
        fakes = tree_map_only(torch.Tensor, lambda tensor: blank("", tensor), inputs)
        for parameter in fake_copy.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        with recorder:  # with gradients: which inputs of a block have any is part of what is to be found
            recorder.returned(call_model(fake_copy, fakes))
    return Capture(recorder.calls, recorder.used_outside, recorder.escaped, recorder.repeated)


class _Recorder(TorchDispatchMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.calls: dict[str, BlockCall] = {}
        self.used_outside: set[str] = set()
        self.escaped: set[tuple[str, int]] = set()
        self.repeated: set[str] = set()
        self._outputs: dict[int, tuple[str, int]] = {}  # of blocks, by storage
        self._in_block = 0
        self._kept: list[torch.Tensor] = []  # so that ids are not used again
        self._made_by: dict[int, tuple[str, int]] = {}
        self._names = {storage_key(p): name for name, p in model.named_parameters()}
        self._running: list[set[int]] = []
        for module in model.modules():
            if as_splittable(module) is not None:
                own = {storage_key(p) for p in own_parameters(module).values()}
                module.register_forward_pre_hook(lambda *_, own=own: self._running.append(own))
                module.register_forward_hook(self._finished)

    def _finished(self, *_: Any) -> None:
        self._running.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                key = storage_key(leaf)
                if key in self._names and not any(key in own for own in self._running):
                    self.used_outside.add(self._names[key])
                if not self._in_block and key in self._outputs:
                    self.escaped.add(self._outputs[key])
        return func(*args, **(kwargs or {}))

    def returned(self, output: Any) -> None:
        """Notes what the model returned."""
        keys = [storage_key(leaf) for leaf in tensor_leaves(output)]
        self.escaped |= {self._outputs[key] for key in keys if key in self._outputs}

    def watch(self, name: str, block: nn.Module) -> None:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._in_block += 1
            if name in self.calls:
                self.repeated.add(name)
                return
            leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            providers = {i: self._made_by[id(leaf)] for i, leaf in enumerate(leaves) if id(leaf) in self._made_by}
            call_args, call_kwargs = tree_map_only(torch.Tensor, _Metas(), (args, kwargs))
            self.calls[name] = BlockCall(call_args, call_kwargs, providers)

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
            self._kept += leaves
            self._made_by.update({id(leaf): (name, index) for index, leaf in enumerate(leaves)})
            self._in_block -= 1
            if not self._in_block:
                self._outputs.update({storage_key(leaf): (name, index) for index, leaf in enumerate(leaves)})

        block.register_forward_pre_hook(before, with_kwargs=True)
        block.register_forward_hook(after, with_kwargs=True)


class _Metas:
    """Turns tensors into meta tensors, a repeated one into one."""

    def __init__(self) -> None:
        self._made: dict[int, torch.Tensor] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._made:
            fake_copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            self._made[id(tensor)] = fake_copy.requires_grad_(tensor.requires_grad)
        return self._made[id(tensor)]
