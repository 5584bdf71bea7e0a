"""The arguments that a model's blocks are called with, found by running the model on fake tensors.

Modules between the blocks are watched, too: those that are in no block and hold neither blocks nor layers to split.

Dropout is left out of a run in training, so that two runs on different shapes compute the same.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from tensorshard.common.words import join_names
from tensorshard.model.batches import call_arguments, call_model
from tensorshard.model.fake_copies import follow_run
from tensorshard.model.forwards import runs_forward_of
from tensorshard.model.model_errors import raised_by_model
from tensorshard.model.provenance import Operation, Provenance, run_operation
from tensorshard.model.tensors import map_tensors_once, storage_key, tensor_leaves, tensors_within
from tensorshard.tensor_parallel.table.layer_kinds import as_splittable, is_multihead_attention
from tensorshard.torch_private.autograd import is_function_transformed, is_in_backward
from tensorshard.torch_private.fake_tensors import FakeTensorMode
from tensorshard.torch_private.modules import BatchNormBase, DropoutBase, own_parameters
from tensorshard.torch_private.pytree import tree_leaves

Output = tuple[str, int]
"""An output of a block: the block's name, and the index among the tensors that it returned."""


# Functions that return their first argument where they drop nothing.
_DROPOUTS: frozenset[Callable[..., Any]] = frozenset(
    {
        F.dropout,
        F.dropout1d,
        F.dropout2d,
        F.dropout3d,
        F.alpha_dropout,
        F.feature_alpha_dropout,
        torch.dropout,
        torch.dropout_,
        torch.feature_dropout,
        torch.feature_dropout_,
        torch.alpha_dropout,
        torch.alpha_dropout_,
        torch.feature_alpha_dropout,
        torch.feature_alpha_dropout_,
    }
)
# Functions that drop inside of them, and the place of the probability among their arguments.
_WITH_PROBABILITY: dict[Callable[..., Any], int] = {
    F.scaled_dot_product_attention: 4,
    F.multi_head_attention_forward: 10,
}


_SIZES: frozenset[Callable[..., Any]] = frozenset(
    {torch.Tensor.shape.__get__, torch.Tensor.size, torch.Tensor.numel, torch.Tensor.nelement, torch.Tensor.__len__}  # type: ignore[attr-defined]
)
_DRAWN = 0.5
_DRAWS: frozenset[Callable[..., Any]] = frozenset(
    getattr(owner, name)
    for owner, names in (
        (torch, ("rand", "randn", "rand_like", "randn_like", "normal", "bernoulli")),
        (torch.Tensor, ("normal_", "uniform_", "bernoulli", "bernoulli_", "exponential_", "cauchy_", "log_normal_")),
    )
    for name in names
)


@dataclass
class BlockCall:
    """The first call of a block.

    Args:
        args, kwargs: its arguments, with tensors on the meta device. These require gradients where the model's
            did.
        providers: for each tensor leaf of (args, kwargs) that came out of another block: that block's name
            and the index among its output's leaves.
        operations: a digest of the operations that it ran: their names, the shapes and types of their tensors, and
            their numbers. It is equal for blocks that compute the same function of their inputs and parameters.
        names: a digest of the operations' names alone.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    providers: dict[int, Output] = field(default_factory=dict)
    operations: str = ""
    names: str = ""


@dataclass(frozen=True)
class InTraining:
    """What a block or a model does in training.

    Args:
        differs: whether its code runs other operations than in evaluation, or in other modules; dropout and batch norms
            do not count. True where that is not known.
        written: names of the parameters and buffers that its forward writes.
    """

    differs: bool = False
    written: frozenset[str] = frozenset()

    def inside(self, name: str) -> "InTraining":
        """What can be said of the module `name` in it."""
        prefix = f"{name}." if name else ""
        return replace(self, written=frozenset(k.removeprefix(prefix) for k in self.written if k.startswith(prefix)))


@dataclass
class Capture:
    """What one run of a model showed.

    Args:
        calls: first calls of blocks, by name, in the order of the run.
        called: those of blocks and of modules between them. Here a provider may be such a module.
        used_outside: parameters that an operation read outside of the forward of the splittable layer that holds them.
        read: parameters that an operation read.
        forward_readers: as `readers`, without what a derivative that the forward computes reads.
        readers: for each parameter that an operation read outside of the forward of the module that holds it: the
            module around that one whose forward always read it; "" if only the model's own forward does.
        read_outside: outputs of these that something else reads: code between them, or the caller of the model.
        measured: those whose sizes such code asks for.
        repeated: those that were called more than once.
        names: a digest of the names of all operations.
        training: what the model does in training.
        trained_otherwise: blocks of which :attr:`InTraining.differs` holds.
    """

    calls: dict[str, BlockCall]
    used_outside: set[str]
    called: dict[str, BlockCall] = field(default_factory=dict)
    read_outside: set[Output] = field(default_factory=set)
    measured: set[Output] = field(default_factory=set)
    repeated: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)
    readers: dict[str, str] = field(default_factory=dict)
    forward_readers: dict[str, str] = field(default_factory=dict)
    names: str = ""
    training: InTraining = InTraining()
    trained_otherwise: frozenset[str] = frozenset()

    def note_reads(self, other: "Capture") -> None:
        """Adds what `other`, a run in training, has read: some parameters and outputs are read there alone."""
        self.read_outside |= other.read_outside
        self.measured |= other.measured
        self.repeated |= other.repeated
        for name, call in other.called.items():
            if name not in self.called or self.called[name].providers != call.providers:
                self.read_outside.update(call.providers.values())
        self.used_outside |= other.used_outside
        self.read |= other.read
        for mine, others in ((self.readers, other.readers), (self.forward_readers, other.forward_readers)):
            for name, reader in others.items():
                mine[name] = min(mine.get(name, reader), reader, key=len)

    def is_like(self, other: "Capture") -> bool:
        """Whether `other` showed the same, except for the shapes of tensors."""
        return self._flow() == other._flow()

    def _flow(self) -> tuple[Any, ...]:
        calls = [(name, call.providers, call.names) for name, call in self.called.items()]
        return calls, self.used_outside, self.read_outside, self.repeated, self.readers, self.names


def as_call(inputs: Any) -> BlockCall:
    """The call of a whole model on `inputs`, as for ``Engine.step``."""
    args, kwargs = call_arguments(inputs)
    return BlockCall(args, kwargs)


def capture_calls(model: nn.Module, blocks: Iterable[str], inputs: Any) -> Capture:
    """Runs a fake copy of `model` on `inputs` and notes how the modules named in `blocks` are called.

    Args:
        inputs: as for ``Engine.step``; only their shapes and types matter.
    """

    watching: list[BlockOutputs] = []
    trained = [parameter.requires_grad for parameter in model.parameters()]

    def follow(fake: FakeTensorMode, fake_copy: nn.Module, samples: Any) -> BlockOutputs:
        watching.append(BlockOutputs(fake, fake_copy, blocks))
        return watching[-1]

    def run_in_training(copied: nn.Module, samples: Any, outputs: BlockOutputs) -> None:
        train_without_dropout(copied)
        for parameter, requires_grad in zip(copied.parameters(), trained, strict=True):
            parameter.requires_grad_(requires_grad)  # code may write into those that are not trained
        with WithoutRandomness(outputs.sizes_asked):
            run(copied, samples, outputs)

    # With gradients: which inputs of a block have gradients is one of the results.
    def run(copied: nn.Module, samples: Any, outputs: BlockOutputs) -> None:
        outputs.returned(call_model(copied, samples))

    evaluated = follow_run(model, inputs, follow, run)
    capture = evaluated.capture
    watching.clear()
    try:
        training = follow_run(model, inputs, follow, run_in_training)
    except Exception as error:  # a model may need other inputs in training
        if not raised_by_model(error):
            raise
        written = frozenset(watching[-1].written if watching else ())
        capture.training = InTraining(True, written)  # it is to be compared by numbers
        capture.trained_otherwise = frozenset(blocks)
        capture.called = dict(capture.calls)  # what reads the others is not known
        return capture
    capture.note_reads(training.capture)
    differing = {name for name, code in training.code.items() if evaluated.code.get(name) != code}
    capture.trained_otherwise = frozenset(differing)
    capture.training = InTraining("" in differing, frozenset(training.written))
    return capture


class BlockOutputs(Provenance[Output]):
    """Follows which blocks' outputs the values in a model's run come from.

    Args:
        fake: the mode of the fake tensors.
        model: a model on fake tensors. It is given hooks.
        blocks: names of the modules to watch.

    Attributes:
        code: a digest of the operations in each block's first call, and in the model (""): their names, and the modules
            that run them. What torch's own batch norms do is left out, which count their batches in training.
        written: names of the parameters and buffers that an operation has changed in place.
    """

    def __init__(self, fake: FakeTensorMode, model: nn.Module, blocks: Iterable[str]) -> None:
        super().__init__(fake)
        self.capture = Capture({}, set())
        self._model = model
        self._running: list[str] = []  # blocks, and modules between them
        self._given: dict[int, frozenset[Output]] = {}  # what such a module was given of outputs, by storage
        self._digests: dict[str, _Digests] = {}  # of the blocks that run for the first time
        self._digest = _Digests()  # of the model
        self.code: dict[str, int] = {"": 0}
        self._coding: list[str] = [""]  # the blocks whose `code` is being made
        self.written: set[str] = set()
        self._held: dict[int, list[str]] = {}  # names of parameters and buffers, by storage
        for held in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
            for name, tensor in held:
                self._held.setdefault(storage_key(tensor), []).append(name)
        self._batch_norms = 0  # torch's own that are running
        self._returned: dict[int, Output] = {}  # by the tensors' ids; they are kept
        self._names = {storage_key(p): name for name, p in model.named_parameters()}
        self._own: list[tuple[set[int], bool]] = []  # parameters of the modules that are running; whether splittable
        blocks = dict.fromkeys(blocks)
        self._between = set(_between(model, "", blocks))
        for name in (*blocks, *self._between):
            block = model.get_submodule(name)
            block.register_forward_pre_hook(partial(self._begin, name), with_kwargs=True)
            block.register_forward_hook(partial(self._end, name))
        self._modules: list[str] = []  # those that are running
        self._transformed: list[bool] = []  # for each of these, whether torch.func transforms what calls it
        for name, module in model.named_modules():
            module.register_forward_pre_hook(partial(self._module_begun, name))
            module.register_forward_hook(self._module_ended)
            if runs_forward_of(module, BatchNormBase):
                module.register_forward_pre_hook(self._batch_norm_begun)
                module.register_forward_hook(self._batch_norm_ended)
            own = {storage_key(p) for p in own_parameters(module).values()}
            if own:
                splittable = as_splittable(module) is not None
                module.register_forward_pre_hook(lambda *_, own=own, s=splittable: self._own.append((own, s)))
                module.register_forward_hook(self._layer_ended)

    def returned(self, output: Any) -> None:
        """Notes what the model returned, at the end of the run."""
        self.capture.names = self._digest.names.hexdigest()
        self.capture.read_outside |= self.of([*tensor_leaves(output), *tensors_within(output)])
        kept = (id(value) for module in self._model.modules() for value in vars(module).values())
        self.capture.read_outside.update(self._returned[key] for key in kept if key in self._returned)

    def sizes_asked(self, tensor: torch.Tensor) -> None:
        """Code asks for the sizes of `tensor`, of which a part of a sequence has others."""
        if not self._running:
            self.capture.measured |= self.of([tensor])

    def follow(self, operation: Operation) -> None:
        super().follow(operation)
        for tensor in operation.inputs:
            key = storage_key(tensor)
            name = self._names.get(key)
            if name is not None:
                self.capture.read.add(name)
                holders = [splittable for own, splittable in self._own if key in own]
                transformed = bool(self._transformed) and self._transformed[-1]
                if not any(holders) or transformed:  # no messages can be sent inside of such a function
                    self.capture.used_outside.add(name)
                if transformed:
                    self.capture.readers[name] = self.capture.forward_readers[name] = ""
                elif not holders:
                    self._note_reader(name)
        if not self._running or self._running[-1] in self._between:
            # Reading the shape counts too, since a part of a sequence has another shape.
            self.capture.read_outside |= self.of(operation.inputs).difference(*self._given.values())
        if operation.name not in ("detach", "alias"):  # only autograd needs these
            described = _described(operation) if self._digests else b""
            for digest in (self._digest, *self._digests.values()):
                digest.add(operation, described)
            if not self._batch_norms:
                within = self._modules[-1] if self._modules else ""
                for block in self._coding:
                    self.code[block] = hash((self.code[block], operation.func, within))
        for tensor in operation.written:
            self.written.update(self._held.get(storage_key(tensor), ()))

    def _note_reader(self, parameter: str) -> None:
        around = [name for name in self._modules if name and parameter.startswith(f"{name}.")]
        innermost = max(around, key=len, default="")
        tables = (self.capture.readers,) if is_in_backward() else (self.capture.readers, self.capture.forward_readers)
        for readers in tables:
            readers[parameter] = min(readers.get(parameter, innermost), innermost, key=len)  # of two, the outer one

    def _begin(self, name: str, block: nn.Module, args: Any, kwargs: Any) -> None:
        is_inside = bool(self._running)
        self._running.append(name)
        if is_function_transformed():  # it is not a call that could be made again by itself
            return
        leaves = tensor_leaves((args, kwargs))
        if name in self._between:
            if is_inside:
                return
            self._given = {storage_key(leaf): sources for leaf in leaves if (sources := self.of([leaf]))}
        if name in self.capture.called:
            self.capture.repeated.add(name)
            self.capture.read_outside |= self.of(leaves)
            return
        providers = {i: self._returned[id(leaf)] for i, leaf in enumerate(leaves) if id(leaf) in self._returned}
        meta_args, meta_kwargs = map_tensors_once(_on_meta, (args, kwargs))
        self.capture.called[name] = BlockCall(meta_args, meta_kwargs, providers)
        if name in self._between:
            return
        of_blocks = {i: output for i, output in providers.items() if output[0] not in self._between}
        self.capture.calls[name] = BlockCall(meta_args, meta_kwargs, of_blocks)
        self._digests[name] = _Digests()
        if name:
            self.code[name] = 0
            self._coding.append(name)

    def _end(self, name: str, block: nn.Module, args: Any, output: Any) -> Any:
        if self._given:  # a dropout in evaluation returns what it was given: that must not be taken for its output
            output = map_tensors_once(lambda t: t.clone() if storage_key(t) in self._given else t, output)
        self._running.pop()
        if is_function_transformed() or (self._running and name in self._between):
            return output
        self._given = {}
        if name in self._digests:
            digests, call = self._digests.pop(name), self.capture.calls[name]
            call.operations, call.names = digests.operations.hexdigest(), digests.names.hexdigest()
            self.capture.called[name].names = call.names
            if name:
                self._coding.remove(name)
        for index, leaf in enumerate(tensor_leaves(output)):
            self._returned[id(leaf)] = (name, index)
            self.set(leaf, [(name, index)])
        return output

    def _batch_norm_begun(self, *_: Any) -> None:
        self._batch_norms += 1

    def _batch_norm_ended(self, *_: Any) -> None:
        self._batch_norms -= 1

    def _layer_ended(self, *_: Any) -> None:
        self._own.pop()

    def _module_begun(self, name: str, *_: Any) -> None:
        self._modules.append(name)
        self._transformed.append(is_function_transformed())

    def _module_ended(self, *_: Any) -> None:
        self._modules.pop()
        self._transformed.pop()


def _between(module: nn.Module, name: str, blocks: Collection[str]) -> Iterator[str]:
    """Names of what is inside of `module`, but not inside of one of `blocks`, and holds none and no layers to split."""
    if name in blocks:
        return
    is_split = any(as_splittable(part) or is_multihead_attention(part) for part in module.modules())
    if name and not is_split and not any(block.startswith(f"{name}.") for block in blocks):
        yield name
    for key, child in module.named_children():
        yield from _between(child, join_names(name, key), blocks)


class _Digests:
    """Digests of the operations that ran so far.

    Attributes:
        operations: of everything in each operation but its tensors' values.
        names: of the names alone.
    """

    def __init__(self) -> None:
        self.operations = hashlib.blake2b(digest_size=16)
        self.names = hashlib.blake2b(digest_size=16)

    def add(self, operation: Operation, described: bytes) -> None:
        """Adds one operation."""
        self.operations.update(described)
        self.names.update(f"{operation.func} ".encode())


def _described(operation: Operation) -> bytes:
    """Everything in `operation` but its tensors' values."""
    leaves = tree_leaves((operation.args, operation.kwargs))
    shown = [
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves
        if leaf is None or isinstance(leaf, torch.Tensor | bool | int | float | complex | str | torch.dtype)
    ]
    return f"{operation.func}{shown}".encode()


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return meta.requires_grad_(tensor.requires_grad)


class WithoutRandomness(TorchFunctionMode):
    """A context in which torch's functions drop nothing, whatever probability they are given, and each number that they
    draw is the same, so that two runs on different shapes compute the same.

    Args:
        sizes_asked: called with each tensor whose sizes are asked for, but for the last one alone.
    """

    def __init__(self, sizes_asked: Callable[[torch.Tensor], None] | None = None) -> None:
        super().__init__()
        self._sizes_asked = sizes_asked

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _SIZES and self._sizes_asked is not None and args[1:] != (-1,):
            self._sizes_asked(args[0])
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        place = _WITH_PROBABILITY.get(func)
        if place is not None:
            if len(args) > place:
                args = (*args[:place], 0.0, *args[place + 1 :])
            elif "dropout_p" in kwargs:
                kwargs = {**kwargs, "dropout_p": 0.0}
        if func not in _DRAWS:
            return run_operation(func, args, kwargs)
        state = torch.get_rng_state()
        drawn = run_operation(func, args, kwargs)
        torch.set_rng_state(state)
        with torch.no_grad():
            return drawn.detach().fill_(_DRAWN) if drawn.requires_grad else drawn.fill_(_DRAWN)


def train_without_dropout(module: nn.Module) -> None:
    """Puts `module` in training mode, its dropout layers in evaluation. Functions are left: see above."""
    for inner in module.modules():
        inner.training = not isinstance(inner, DropoutBase)
