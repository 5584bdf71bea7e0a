"""Running a model once, on fake tensors, to learn in which order its units are called and what each needs."""

import copy
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointFunction

from tensorshard.batch import call_model
from tensorshard.pipeline.alias import Alias
from tensorshard.pipeline.graph import CallGraph, Leaf, UnitCall
from tensorshard.pipeline.hollow import keep_padding
from tensorshard.pipeline.labels import Labels, reads_of, storage_key
from tensorshard.pipeline.real_run import run_for_real
from tensorshard.pipeline.units import find_units
from tensorshard.pipeline.values import Layout, map_tensors, take_apart, tensors_in
from tensorshard.tensor_plans.copies import computed_attributes
from tensorshard.transforms.assign import parameter_aliases

# Of autograd's nodes, what does more in backward than computing gradients one by one.
_ONE_PIECE = ("BackwardHookFunctionBackward", "CheckpointFunctionBackward")
_BY_VALUE = (DataDependentOutputException, DynamicOutputShapeException)


class UncuttableError(ValueError):
    """A model cannot be cut into stages, whatever its inputs: the message says what stands in the way."""


class Tracer:
    """Runs fake copies of a model, which may be on the meta device.

    Parameters take no memory; buffers keep their values where they have any, and so do inputs, so that code that looks
    at them (a mask without padding is left out, say) does what it would do.

    Args:
        model: whole; it is not changed.
        units: patterns of module names to be blocks, or None to find them.
        device: of the tensors in the runs; where it is not the device of the training, types under autocast may differ.
        prepare: what is done with the copy, as with the model, after its units were found: called with it, under the
            mode of its fake tensors.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        units: list[str] | None = None,
        device: torch.device | str = "cpu",
        prepare: Callable[[nn.Module], None] | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.unit_names = list(find_units(model, units))
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        with _disable_current_modes():
            self._twin = self._copy(model)
            if prepare is not None:
                with self._fake:
                    prepare(self._twin)
        self._aliases = parameter_aliases(self._twin)
        self._labels: Labels | None = None
        self._calls: list[UnitCall] = []
        self._nested: set[str] = set()
        self._inside: list[str] = []  # the modules outside of units that are running
        self._running: list[str] = []  # the units that are, and the version of the buffers of the outermost
        self._versions: list[int] = []
        self._leaves: dict[int, Leaf] = {}  # which output of a unit a tensor that autograd starts from stands for
        self._saved: _SavedBytes | None = None
        self._one_piece = False
        self._estimated = False  # whether the unit that is running was run for real, out of autograd's sight
        self._impure: set[str] = set()
        self._stateful: set[str] = set()
        self._watched: set[str] = set()
        for name in self.unit_names:
            self._watch(name)
        for name, module in self._twin.named_modules():
            module.register_forward_pre_hook(partial(self._entered, name), prepend=True)
            module.register_forward_hook(self._left, always_call=True)

    def trace(self, inputs: Any) -> CallGraph:
        """Runs on sample `inputs`, with gradients, until every module that must not run twice is a unit.

        Args:
            inputs: as for ``Engine.step``; their values matter only to code that looks at them.

        Raises:
            UncuttableError: outside of units the model decides by the value of what a unit computed, changes a buffer
                of its own by it, or has hooks on backward; or it calls no units.
        """
        self._check_backward_hooks()
        while True:
            with torch.enable_grad():
                graph = self.run(inputs)
            names = [name for name in sorted(self._impure) if name not in self.unit_names]
            if not names:
                return graph
            for name in names:
                self.unit_names.append(name)
                self._watch(name)

    def run(self, inputs: Any) -> CallGraph:
        """One run on `inputs`, with gradients and autocast as they are set.

        Raises:
            UncuttableError: as for :meth:`trace`.
        """
        devices = [self.device] if self.device.type == "cuda" else []
        samples = tree_map_only(torch.Tensor, self._sample, inputs)
        with _disable_current_modes(), torch.random.fork_rng(devices=devices), self._recording(samples) as labels:
            output = tensors_in(self._output(samples))
            atoms = labels.of(output)
            output_gradients = self._sources(output)
        if not self._calls:
            raise UncuttableError(
                f"{type(self._twin).__name__} called none of its {len(self.unit_names)} units as modules; a stage runs "
                f"those that are called as module(...), not by other methods, nor by their weights alone"
            )
        for buffer, from_units in labels.written_buffers.items():
            if from_units:
                raise UncuttableError(
                    f"buffer {buffer!r} is changed by code outside of the model's units, by what units computed; each "
                    f"stage would change it differently. Move that code into the unit, or name the module that holds "
                    f"it as a unit (pp_units)"
                )
        return CallGraph(
            calls=tuple(self._calls),
            output=reads_of(atoms),
            output_gradients=output_gradients,
            overwritten=frozenset(labels.overwritten),
            changed=frozenset(labels.changed),
            overwrites_inputs=labels.overwrites_inputs,
            parameters=self._unit_parameters(),
            bytes_of={name: p.numel() * p.element_size() for name, p in self._twin.named_parameters()},
            stateful=frozenset(self._stateful),
            nested=frozenset(self._nested),
            hooked=frozenset(n for n in self.unit_names if _has_backward_hooks(self._twin.get_submodule(n))),
            one_piece=self._one_piece,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "Tracer":
        return self  # the hooks and forwards of its copy, of which parts are copied again, refer to it

    def follow_modes(self, model: nn.Module) -> None:
        """Sets the copy's modules to training or evaluation as those of `model` are."""
        for name, module in model.named_modules():
            self._twin.get_submodule(name).training = module.training

    # -- the copy --

    def _copy(self, model: nn.Module) -> nn.Module:
        memo: dict[int, Any] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            if not isinstance(tensor, nn.Parameter) and not tensor.is_meta and not isinstance(tensor, FakeTensor):
                memo[id(tensor)] = tensor.detach().to(self.device, copy=True)
                continue
            with self._fake:
                twin = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
            if isinstance(tensor, nn.Parameter):
                twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = twin
        copied = copy.deepcopy(model, {**memo, **computed_attributes(model)})
        keep_padding(copied)
        return copied

    def _sample(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta and not isinstance(tensor, FakeTensor):
            return tensor.detach().to(self.device, copy=True)  # the model may change it in place
        with self._fake:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)

    def _unit_parameters(self) -> dict[str, tuple[str, ...]]:
        return {
            name: tuple(
                dict.fromkeys(
                    self._aliases[f"{name}.{inner}"]
                    for inner, _ in self._twin.get_submodule(name).named_parameters(remove_duplicate=False)
                )
            )
            for name in self.unit_names
        }

    # -- one run --

    @contextmanager
    def _recording(self, samples: Any) -> Iterator[Labels]:
        parameters = {storage_key(p): name for name, p in self._twin.named_parameters()}
        buffers = {storage_key(b): name for name, b in self._twin.named_buffers()}
        self._calls, self._impure, self._inside, self._running, self._leaves = [], set(), [], [], {}
        self._labels = Labels(self._fake, parameters, buffers, set(map(storage_key, tensors_in(samples))))
        try:
            with self._labels, _quiet():
                yield self._labels
        finally:
            self._labels = None

    def _output(self, samples: Any) -> Any:
        try:
            return call_model(self._twin, samples)
        except _BY_VALUE as error:
            where = self._inside[-1] if self._inside else ""
            owner = f"module {where!r}" if where else "the model's own forward"
            last = self._calls[-1].unit if self._calls else None
            remedy = f"Name {where!r} as one unit (pp_units)" if where else "Move that code into a module with them"
            raise UncuttableError(
                f"{owner} ({type(self._twin.get_submodule(where)).__name__}) decides by the value of a tensor that is "
                f"computed by units, after the call of {last!r} ({error.func}); only the stage of that unit would "
                f"have the value. {remedy}, so that it runs on one stage"
            ) from error

    def _watch(self, name: str) -> None:
        # Hooks, as on the stages: what users hooked to a unit is a part of it.
        unit = self._twin.get_submodule(name)
        unit.forward = partial(self._computed, name, unit.forward)  # type: ignore[method-assign]
        unit.register_forward_pre_hook(partial(self._begun, name), prepend=True, with_kwargs=True)
        unit.register_forward_hook(partial(self._ended, name))
        self._watched |= {f"{name}.{inner}".rstrip(".") for inner, _ in unit.named_modules()}

    def _begun(self, name: str, unit: nn.Module, args: Any, kwargs: Any) -> None:
        labels = self._labels
        if labels is None:
            return
        if self._running:
            self._nested.add(name)
        else:
            if not torch.is_grad_enabled() and _is_checkpointed():
                raise UncuttableError(
                    f"the model recomputes {name!r} by torch.utils.checkpoint with use_reentrant=True, which a "
                    f"pipeline's stages cannot run; use use_reentrant=False, or Plan(recompute='full') instead of it"
                )
            labels.call, self._estimated = len(self._calls), False
            # What it is given it may read by ways that are not seen.
            passed = labels.of(tensors_in((args, kwargs)))
            labels.read = {atom for atom in passed if atom[0] != "call"}
            self._versions = [buffer._version for buffer in unit.buffers()]
        self._running.append(name)

    def _computed(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The forward of the unit `name`."""
        labels = self._labels
        if labels is None or len(self._running) > 1:
            return forward(*args, **kwargs)
        if not self._running:
            raise UncuttableError(
                f"the model calls {name}.forward(...) itself, which passes by the hooks that stages run a module with; "
                f"call the module, as in {name}(...), or name an enclosing module as one unit (pp_units)"
            )
        unit = self._twin.get_submodule(name)
        self._saved = _SavedBytes(unit)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._saved.pack, lambda tensor: tensor):
                return self._forward(unit, forward, args, kwargs)
        except BaseException:
            self._running.clear()
            labels.call = None
            raise

    def _ended(self, name: str, unit: nn.Module, args: Any, output: Any) -> Any:
        labels = self._labels
        if labels is None:
            return None
        self._running.pop()
        if self._running:
            return None
        call, labels.call = labels.call, None
        assert call is not None and self._saved is not None
        tensors, structure = take_apart(output)
        reads = reads_of(labels.read)
        gradients = reads.leaves if self._estimated else self._sources(tensors)
        layouts = tuple(Layout.of(tensor) for tensor in tensors)
        self._calls.append(
            UnitCall(name, reads, gradients, structure, layouts, labels.flops, labels.written_bytes, self._saved.nbytes)
        )
        if [buffer._version for buffer in unit.buffers()] != self._versions or _keeps_statistics(unit):
            self._stateful.add(name)
        count = iter(range(len(tensors)))
        fresh = map_tensors(lambda tensor: self._fresh(labels, tensor, call, next(count)), output)
        labels.flops = labels.written_bytes = 0
        return fresh

    def _forward(self, unit: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except Exception as error:
            # Inside of a unit values may decide, and kernels may lack a fake one: shapes must be found otherwise.
            self._estimated = True
            try:
                with _disable_current_modes():
                    return run_for_real(unit, args, kwargs)
            except Exception:
                raise error from None

    def _sources(self, tensors: Iterable[torch.Tensor]) -> frozenset[Leaf]:
        """The outputs of earlier calls that gradients of `tensors` go to."""
        nodes = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        seen = set(nodes)
        found = {self._leaves[id(tensor)] for tensor in tensors if id(tensor) in self._leaves}
        while nodes:
            node = nodes.pop()
            self._one_piece |= node.name() in _ONE_PIECE
            variable = getattr(node, "variable", None)
            if id(variable) in self._leaves:
                found.add(self._leaves[id(variable)])
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    nodes.append(following)
        return frozenset(found)

    def _fresh(self, labels: Labels, tensor: torch.Tensor, call: int, index: int) -> torch.Tensor:
        """A tensor like one that a unit returned, of unknown value and with no other label than this."""
        layout = Layout.of(tensor)
        with _disable_current_modes(), self._fake:
            fresh = layout.empty(self.device)
        fresh.requires_grad_(layout.requires_grad)
        self._leaves[id(fresh)] = (call, index)
        labels.set_output(fresh, (call, index))
        return Alias.apply(fresh) if layout.requires_grad else fresh  # functional code may change it in place

    def _entered(self, name: str, module: nn.Module, args: Any) -> None:
        labels = self._labels
        if labels is None or labels.call is not None:
            return
        self._inside.append(name)
        labels.impure = False

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        labels = self._labels
        if labels is None or labels.call is not None:
            return
        name = self._inside.pop()
        if labels.impure and name not in self._watched and not self._holds_units(name):
            self._impure.add(name)
            labels.impure = False

    def _check_backward_hooks(self) -> None:
        for name, module in self._twin.named_modules():
            if name in self._watched or not self._holds_units(name):
                continue
            if _has_backward_hooks(module):
                raise UncuttableError(
                    f"{f'module {name!r}' if name else 'the model'} has a hook on its backward, and its modules may be "
                    f"on several stages, of which none has the gradients of both ends; hook its modules instead, such "
                    f"as {self._first_unit_in(name)!r}" + (f", or name {name!r} as one unit (pp_units)" if name else "")
                )

    def _first_unit_in(self, name: str) -> str:
        return next(unit for unit in self.unit_names if not name or unit.startswith(f"{name}."))

    def _holds_units(self, name: str) -> bool:
        return any(not name or unit.startswith(f"{name}.") for unit in self.unit_names)


class _SavedBytes:
    """Counts what autograd keeps for backward, parameters and repetitions aside."""

    def __init__(self, unit: nn.Module) -> None:
        self.nbytes = 0
        self._seen = {storage_key(parameter) for parameter in unit.parameters()}
        self._kept: list[torch.Tensor] = []

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        key = storage_key(tensor)
        if key not in self._seen:
            self._seen.add(key)
            self._kept.append(tensor)
            self.nbytes += tensor.numel() * tensor.element_size()
        return tensor


def _is_checkpointed() -> bool:
    """Whether the caller is inside of a region that ``torch.utils.checkpoint`` recomputes as one autograd function."""
    frame = sys._getframe()
    while frame is not None and frame.f_code is not CheckpointFunction.forward.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's report of a kernel that has no fake one, after which the unit is run for real."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _has_backward_hooks(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)


def _keeps_statistics(unit: nn.Module) -> bool:
    return any(isinstance(module, _NormBase) and module.track_running_stats for module in unit.modules())
