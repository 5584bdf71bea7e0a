"""Running a model once, on fake tensors, to learn in which order its units are called and what each needs."""

import copy
from collections.abc import Callable, Iterator
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

from tensorshard.batch import call_model
from tensorshard.pipeline.alias import Alias
from tensorshard.pipeline.graph import CallGraph, UnitCall
from tensorshard.pipeline.labels import Labels, reads_of, storage_key
from tensorshard.pipeline.real_run import run_for_real
from tensorshard.pipeline.units import find_units
from tensorshard.pipeline.values import Layout, map_tensors, take_apart, tensors_in
from tensorshard.transforms.assign import parameter_aliases

_BY_VALUE = (DataDependentOutputException, DynamicOutputShapeException)


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
            ValueError: the model cannot be cut into stages: it decides by the value of what a unit computed, or changes
                a buffer of its own by it, outside of the unit.
        """
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
            ValueError: as for :meth:`trace`.
        """
        devices = [self.device] if self.device.type == "cuda" else []
        with _disable_current_modes(), torch.random.fork_rng(devices=devices), self._recording() as labels:
            output = self._output(inputs)
            atoms = labels.of(tensors_in(output))
        for buffer, from_units in labels.written_buffers.items():
            if from_units:
                raise ValueError(
                    f"buffer {buffer!r} is changed by code outside of the model's units, by what units computed; each "
                    f"stage would change it differently. Move that code into the unit, or name the module that holds "
                    f"it as a unit (pp_units)"
                )
        return CallGraph(
            calls=tuple(self._calls),
            output=reads_of(atoms),
            overwritten=frozenset(leaf for _, leaf in labels.overwritten),
            parameters=self._unit_parameters(),
            bytes_of={name: p.numel() * p.element_size() for name, p in self._twin.named_parameters()},
            stateful=frozenset(self._stateful),
            nested=frozenset(self._nested),
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
        return copy.deepcopy(model, memo)

    def _sample(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta and not isinstance(tensor, FakeTensor):
            return tensor.detach().to(self.device)
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
    def _recording(self) -> Iterator[Labels]:
        parameters = {storage_key(p): name for name, p in self._twin.named_parameters()}
        buffers = {storage_key(b): name for name, b in self._twin.named_buffers()}
        self._calls, self._impure, self._inside = [], set(), []
        self._labels = Labels(self._fake, parameters, buffers)
        try:
            with self._labels:
                yield self._labels
        finally:
            self._labels = None

    def _output(self, inputs: Any) -> Any:
        samples = tree_map_only(torch.Tensor, self._sample, inputs)
        try:
            return call_model(self._twin, samples)
        except _BY_VALUE as error:
            where = self._inside[-1] if self._inside else ""
            owner = f"module {where!r}" if where else "the model's own forward"
            last = self._calls[-1].unit if self._calls else None
            raise ValueError(
                f"{owner} ({type(self._twin.get_submodule(where)).__name__}) decides by the value of a tensor that is "
                f"computed by units, after the call of {last!r} ({error.func}); only the stage of that unit would "
                f"have the value. Name {where or 'an enclosing module'!r} as one unit (pp_units), so that it runs on "
                f"one stage"
            ) from error

    def _watch(self, name: str) -> None:
        unit = self._twin.get_submodule(name)
        unit.forward = partial(self._called, name, unit.forward)  # type: ignore[method-assign]
        self._watched |= {f"{name}.{inner}".rstrip(".") for inner, _ in unit.named_modules()}

    def _called(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        labels = self._labels
        if labels is None or labels.call is not None:
            if labels is not None:
                self._nested.add(name)
            return forward(*args, **kwargs)
        unit = self._twin.get_submodule(name)
        labels.call, labels.read = len(self._calls), set()
        versions = [buffer._version for buffer in unit.buffers()]
        saved = _SavedBytes(unit)
        passed = labels.of(tensors_in((args, kwargs)))  # what it is given it may read by ways that are not seen
        try:
            with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
                output = self._forward(unit, forward, args, kwargs)
        finally:
            call, labels.call = labels.call, None
        tensors, structure = take_apart(output)
        reads = reads_of(labels.read | {atom for atom in passed if atom[0] != "call"})
        layouts = tuple(Layout.of(tensor) for tensor in tensors)
        flops = labels.flops
        self._calls.append(UnitCall(name, reads, structure, layouts, flops, labels.written_bytes, saved.nbytes))
        labels.flops = labels.written_bytes = 0
        if [buffer._version for buffer in unit.buffers()] != versions or _keeps_statistics(unit):
            self._stateful.add(name)
        count = iter(range(len(tensors)))
        return map_tensors(lambda tensor: self._fresh(labels, tensor, call, next(count)), output)

    def _forward(self, unit: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except _BY_VALUE:  # inside of a unit that is allowed, but its shapes must be found otherwise
            with _disable_current_modes():
                return run_for_real(unit, args, kwargs)

    def _fresh(self, labels: Labels, tensor: torch.Tensor, call: int, index: int) -> torch.Tensor:
        """A tensor like one that a unit returned, of unknown value and with no other label than this."""
        layout = Layout.of(tensor)
        with _disable_current_modes(), self._fake:
            fresh = layout.empty(self.device)
        fresh.requires_grad_(layout.requires_grad)
        fresh = Alias.apply(fresh) if layout.requires_grad else fresh  # functional code may change it in place
        labels.set(fresh, frozenset([("leaf", (call, index))]))
        return fresh

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

    def _holds_units(self, name: str) -> bool:
        return any(unit.startswith(f"{name}.") or not name for unit in self.unit_names)


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


def _keeps_statistics(unit: nn.Module) -> bool:
    return any(isinstance(module, _NormBase) and module.track_running_stats for module in unit.modules())
