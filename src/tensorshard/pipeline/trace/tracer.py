"""Runs a model on fake tensors, to learn in which order its units are called and what each needs."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from tensorshard.common.sampled_loops import sample_loops
from tensorshard.common.words import is_inside
from tensorshard.model.batches import call_model
from tensorshard.model.blocks import find_blocks, named_parts, select_modules
from tensorshard.model.fake_copies import make_fake_copy, make_sample
from tensorshard.model.forwards import Forward, Role, wrap_forward
from tensorshard.model.global_state import restored_globals
from tensorshard.model.model_errors import describe_batch, failed_module
from tensorshard.model.parameters import parameter_aliases
from tensorshard.model.state_places import host_random_restored
from tensorshard.model.tensors import take_apart, tensors_within
from tensorshard.pipeline.trace.call_graph import CallGraph
from tensorshard.pipeline.trace.traced_run import TracedRun, UncuttableError
from tensorshard.pipeline.trace.unit_sources import UnitSources, WithoutDerivatives, reads_of
from tensorshard.random.call_sites import ModelRandomness
from tensorshard.torch_private.dispatch import without_dispatch_modes
from tensorshard.torch_private.fake_results import QuickFakeTensorMode
from tensorshard.torch_private.fake_tensors import NEEDS_VALUES, grouped_products_of_any_dtype
from tensorshard.torch_private.modules import DropoutBase, NormBase, every_module, has_backward_hooks, own_parameters
from tensorshard.torch_private.process_groups import alone_in_the_world

# Where torch defines activations, pooling and upsampling.
_ON_ACTIVATIONS = {f"torch.nn.modules.{name}" for name in ("activation", "pixelshuffle", "pooling", "upsampling")}


class Tracer:
    """Runs fake copies of a model, which may be on the meta device.

    Parameters take no memory. Buffers and inputs keep their values, if they have any. So code that depends on these
    values, such as code that skips a mask without padding, does what it does in training.

    Args:
        model: whole; it is not changed.
        units: patterns of the names of modules that are blocks; None to find blocks.
        device: of the tensors in the runs. If training uses another device, types under autocast may differ.
        prepare: called with the copy, under the mode of its fake tensors, after its units were found. It does what is
            done to the model itself.

        same_numbers: whether all stages draw the same random numbers in code between units.

    Attributes:
        numbers: what draws them, once there is an Engine.
        draws: whether code between units was seen to draw numbers whose values it may look at, as to leave out layers.
        unit_names: the modules that are computed by one stage each.
        joined: modules that became one unit in a run, since their code needs all that they hold; and why.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        units: list[str] | None = None,
        device: torch.device | str = "cpu",
        prepare: Callable[[nn.Module], None] | None = None,
        same_numbers: bool = False,
    ) -> None:
        self.numbers: ModelRandomness | None = None
        self.draws = False
        self._same_numbers = same_numbers
        self.device = torch.device(device)
        self.unit_names = list(find_units(model, units))
        self.joined: dict[str, str] = {}
        self._may_join = units is None
        self._fake = QuickFakeTensorMode()
        with without_dispatch_modes():
            self._copy = make_fake_copy(model, self._fake, self.device)
            if prepare is not None:
                with self._fake:
                    prepare(self._copy)
        self._aliases = parameter_aliases(self._copy)
        self._recording: TracedRun | None = None
        self._watched: set[str] = set()
        for name in self.unit_names:
            self._watch(name)
        for name, module in self._copy.named_modules():
            module.register_forward_pre_hook(partial(self._entered, name), prepend=True)
            module.register_forward_hook(self._left, always_call=True)

    def trace(self, inputs: Any) -> CallGraph:
        """Runs on sample `inputs`, with gradients, again and again until every module that must not run twice is a
        unit, and so is every one whose code needs all that it holds: it computes gradients through it, say.

        Args:
            inputs: as for ``Engine.step``; their values matter only to code that looks at them.

        Raises:
            UncuttableError: outside of units the model's code depends on a value that a unit computed, changes a buffer
                by it, or has hooks on backward; or the model calls no units.
        """
        while True:
            self._check_backward_hooks()
            try:
                with torch.enable_grad():
                    graph, impure = self._run(inputs)
            except UncuttableError as error:
                if not error.whole or not self._may_join:
                    raise
                self._join(error.whole, error.cause)
                continue
            names = [name for name in sorted(impure) if name not in self.unit_names]
            if not names:
                return self._with_all_units(graph, inputs) if self.draws and self._same_numbers else graph
            for name in names:
                self.unit_names.append(name)
                self._watch(name)

    def _with_all_units(self, graph: CallGraph, inputs: Any) -> CallGraph:
        """The graph of an evaluation instead, in which no layers are left out at random, if it has more units."""
        modes = {module: module.training for module in self._copy.modules()}
        self._copy.eval()
        try:
            with torch.enable_grad():
                whole = self._run(inputs)[0]
        finally:
            for module, training in modes.items():
                module.training = training
        called, all_units = ({call.unit for call in of.calls} for of in (graph, whole))
        return whole if called < all_units else graph

    def take_numbers(self, numbers: ModelRandomness) -> None:
        """From now on, code between units draws in a run what it will draw in the step that follows."""
        self.numbers = numbers
        numbers.add_modules(self._copy.named_modules())

    def numbers_of_step(self, training: bytes) -> int | None:
        """The step, if a run in it may call other units than one in another step, by what it draws.

        Args:
            training: which modules are in training.
        """
        return self.numbers.step if self.draws and self.numbers is not None and any(training) else None

    def run(self, inputs: Any) -> CallGraph:
        """One run on `inputs`, with gradients and autocast as they are set.

        Raises:
            UncuttableError: as for :meth:`trace`.
        """
        return self._run(inputs)[0]

    def _check_draws(self, apart: Iterable[str]) -> None:
        """Refuses random numbers of modules that run both inside of a unit and by themselves. These calls may be on
        several stages, and the numbers depend on how many came before.

        Raises:
            UncuttableError: there is such a unit.
        """
        drawing = () if self.numbers is None else self.numbers.drawing
        for name in sorted(apart):
            if any(is_inside(module, [name]) for module in drawing):
                raise UncuttableError(
                    f"{name!r} draws random numbers, and runs both inside of a unit and by itself, perhaps on "
                    f"different stages, where its calls cannot be counted: set random='by_rank', or name a module "
                    f"around all of its calls as a unit (pp_units)"
                )

    def _run(self, inputs: Any) -> tuple[CallGraph, set[str]]:
        """One run: its graph, and the modules that must not run twice but are not units."""
        devices = [self.device] if self.device.type == "cuda" else []
        samples = make_sample(inputs, self._fake, self.device)
        with (
            alone_in_the_world(),
            without_dispatch_modes(),
            torch.random.fork_rng(devices=devices),
            host_random_restored(),
            restored_globals(self._copy),
            grouped_products_of_any_dtype(),
            nullcontext() if self.numbers is None else self.numbers.rehearsal(inputs),
            self._recorded(samples) as recording,
            sample_loops(recording.sources.loop),
        ):
            with WithoutDerivatives(lambda: recording.module if recording.sources.call is None else None):
                result = self._output(recording, samples)
            output, structure = take_apart(result)
            output += _further(tensors_within(result), output, recording.sources)
            del result
            output_gradients = recording.gradient_leaves(output)
        sources = recording.sources
        self.draws = self.draws or recording.draws
        if not recording.calls:
            raise UncuttableError(
                f"{type(self._copy).__name__} called none of its {len(self.unit_names)} units as modules; a stage runs "
                f"those that are called as module(...), not by other methods, nor by their weights alone"
            )
        by_themselves = recording.outside.difference(self.unit_names)
        self._check_draws({*recording.nested, *(name for name in by_themselves if is_inside(name, self.unit_names))})
        for buffer, from_units in sources.written_buffers.items():
            if from_units:
                raise UncuttableError(
                    f"buffer {buffer!r} is changed by code outside of the model's units, by what units computed; each "
                    f"stage would change it differently. Move that code into the unit, or name the module that holds "
                    f"it as a unit (pp_units)"
                )
        graph = CallGraph(
            calls=tuple(recording.calls),
            output=reads_of(sources.of(output)),
            output_gradients=output_gradients,
            output_kinds=tuple(structure.opaque()),
            overwritten=frozenset(sources.overwritten),
            changed=frozenset(sources.changed),
            overwrites_inputs=sources.overwrites_inputs,
            written_parameters=frozenset(sources.written_parameters),
            trained_writes=sources.trained_writes,
            buffer_writers={name: frozenset(calls) for name, calls in sources.buffer_writers.items()},
            parameters=self._unit_parameters(),
            bytes_of={name: p.numel() * p.element_size() for name, p in self._copy.named_parameters()},
            stateful=frozenset(recording.stateful),
            nested=frozenset(recording.nested),
            hooked=frozenset(n for n in self.unit_names if has_backward_hooks(self._copy.get_submodule(n))),
            unsplittable_backward=recording.unsplittable_backward,
        )
        return graph, recording.impure

    def __deepcopy__(self, memo: dict[int, Any]) -> "Tracer":
        return self  # the hooks and forwards of its copy, of which parts are copied again, refer to it

    def follow_modes(self, model: nn.Module) -> None:
        """Sets the copy's modules to training or evaluation as those of `model` are."""
        for name, module in every_module(model).items():
            self._copy.get_submodule(name).training = module.training

    def train_all(self) -> None:
        """Makes all parameters of the copy require gradients."""
        for parameter in self._copy.parameters():
            parameter.requires_grad_(parameter.is_floating_point() or parameter.is_complex())

    # -- internals --

    def _join(self, name: str, reason: str) -> None:
        """Makes the module `name` one unit, in place of those inside of it."""
        inside = [unit for unit in self.unit_names if unit.startswith(f"{name}.")]
        self.unit_names[:] = [unit for unit in self.unit_names if unit not in inside]
        self.unit_names.append(name)
        for joined in [joined for joined in self.joined if joined.startswith(f"{name}.")]:
            del self.joined[joined]
        self.joined[name] = reason
        self._watch(name)

    def _unit_parameters(self) -> dict[str, tuple[str, ...]]:
        return {
            name: tuple(
                dict.fromkeys(
                    self._aliases[f"{name}.{inner}"]
                    for inner, _ in self._copy.get_submodule(name).named_parameters(remove_duplicate=False)
                )
            )
            for name in self.unit_names
        }

    @contextmanager
    def _recorded(self, samples: Any) -> Iterator[TracedRun]:
        sources = UnitSources(self._fake, self._copy, samples)
        self._recording = TracedRun(self._copy, sources, self._fake, self.device, same_numbers=self._same_numbers)
        try:
            with self._recording.active():
                yield self._recording
        finally:
            self._recording = None

    def _output(self, recording: TracedRun, samples: Any) -> Any:
        try:
            return call_model(self._copy, samples)
        except NEEDS_VALUES as error:
            where = recording.module
            owner = f"module {where!r}" if where else "the model's own forward"
            last = recording.calls[-1].unit if recording.calls else None
            remedy = f"Name {where!r} as one unit (pp_units)" if where else "Move that code into a module with them"
            raise UncuttableError(
                f"{owner} ({type(self._copy.get_submodule(where)).__name__}) decides by the value of a tensor that is "
                f"computed by units, after the call of {last!r} ({error.func}); only the stage of that unit would "
                f"have the value. {remedy}, so that it runs on one stage"
            ) from error
        except Exception as error:
            error.add_note(
                f"in a run on fake tensors that finds what a stage computes; the inputs were {describe_batch(samples)}"
                f"{failed_module(error, self._copy)}"
            )
            raise

    def _watch(self, name: str) -> None:
        # Hooks, as on the stages: hooks that users put on a unit are a part of it.
        unit = self._copy.get_submodule(name)
        wrap_forward(unit, Role.TRACE, partial(self._computed, name))
        unit.register_forward_pre_hook(partial(self._begun, name), prepend=True, with_kwargs=True)
        unit.register_forward_hook(partial(self._ended, name))
        self._watched |= {f"{name}.{inner}".rstrip(".") for inner, _ in unit.named_modules()}

    def _begun(self, name: str, unit: nn.Module, args: Any, kwargs: Any) -> None:
        if self._recording is not None and name in self.unit_names:
            self._recording.begin(name, unit, args, kwargs)

    def _computed(self, name: str, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        if self._recording is None or name not in self.unit_names:
            return forward(*args, **kwargs)
        return self._recording.compute(name, forward, args, kwargs)

    def _ended(self, name: str, unit: nn.Module, args: Any, output: Any) -> Any:
        if self._recording is None or name not in self.unit_names:
            return None
        return self._recording.end(name, unit, output)

    def _entered(self, name: str, module: nn.Module, args: Any) -> None:
        if self._recording is not None:
            self._recording.enter(name)

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._recording is not None:
            self._recording.leave(lambda name: name in self._watched or self._holds_units(name))

    def _check_backward_hooks(self) -> None:
        for name, module in self._copy.named_modules():
            if name in self._watched or not self._holds_units(name):
                continue
            if has_backward_hooks(module):
                raise UncuttableError(
                    f"{f'module {name!r}' if name else 'the model'} has a hook on its backward, and its modules may be "
                    f"on several stages, of which none has the gradients of both ends; hook its modules instead, such "
                    f"as {self._first_unit_in(name)!r}" + (f", or name {name!r} as one unit (pp_units)" if name else "")
                )

    def _first_unit_in(self, name: str) -> str:
        return next(unit for unit in self.unit_names if not name or unit.startswith(f"{name}."))

    def _holds_units(self, name: str) -> bool:
        return any(not name or unit.startswith(f"{name}.") for unit in self.unit_names)


def _further(within: list[torch.Tensor], output: list[torch.Tensor], sources: UnitSources) -> list[torch.Tensor]:
    """Those of the tensors that were `within` inside of objects of an output which count beside its own tensors.

    A cache holds tensors that units did not return. They are no part of the output, unless nothing else has a gradient.
    """
    known = {id(tensor) for tensor in output}
    further = [tensor for tensor in within if id(tensor) not in known]
    if not any(tensor.requires_grad for tensor in output):
        return further
    return [tensor for tensor in further if all(kind != "side_output" for kind, _ in sources.of([tensor]))]


def find_units(model: nn.Module, named: list[str] | None = None) -> dict[str, nn.Module]:
    """The modules that are computed by one stage each, by name, in registration order; none is inside of another.

    They are the blocks (see :func:`tensorshard.model.blocks.find_blocks`, or as `named`). Outside of blocks they are
    every module that holds parameters and has no submodule that does, every normalization, dropout, activation,
    pooling and upsampling of torch.nn. The rest is functional code and other modules without parameters, which every
    stage runs.

    Args:
        named: patterns of module names that are blocks instead, as in ``layers.*``.

    Raises:
        ValueError: a pattern that matches no module.
    """
    chosen = find_blocks(model) if named is None else select_modules(model, named)
    blocks = set(map(id, chosen.values())) - {id(model)}
    units: dict[str, nn.Module] = {}
    _collect(model, "", blocks, units, set())
    return units


def _collect(module: nn.Module, prefix: str, blocks: set[int], units: dict[str, nn.Module], seen: set[int]) -> None:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if id(child) in seen:
            continue
        seen.add(id(child))
        if id(child) in blocks or _is_unit(child):
            units[path] = child
        else:
            _collect(child, f"{path}.", blocks, units, seen)


def _is_unit(module: nn.Module) -> bool:
    # Two stages must not compute different statistics, nor draw different masks, for the same value.
    if isinstance(module, NormBase) or (isinstance(module, DropoutBase) and module.p > 0):
        return True
    # All stages could run these, but each would read and write whole activations for results that it does not need.
    if any(base.__module__ in _ON_ACTIVATIONS for base in type(module).__mro__) and not _has_parameters([module]):
        return True
    if not own_parameters(module) and not is_parametrized(module):
        return False
    return not _has_parameters(named_parts(module).values())


def _has_parameters(modules: Iterable[nn.Module]) -> bool:
    return any(True for module in modules for _ in module.parameters())
