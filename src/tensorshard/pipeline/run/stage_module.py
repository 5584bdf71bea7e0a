"""One stage of a pipeline: the model's own forward, in which only the stage's own units compute."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from tensorshard.model.batches import call_model
from tensorshard.model.blocks import find_blocks
from tensorshard.model.forwards import Forward, Role, wrap_forward
from tensorshard.model.tensors import TensorSpec, take_apart
from tensorshard.model.transformers_settings import captures_output
from tensorshard.model.whole_sequences import Crossing, WholeSequences
from tensorshard.pipeline.cut import Cut
from tensorshard.pipeline.run.cut_cache import CutCache
from tensorshard.pipeline.run.stage_skeleton import Removed, put_placeholders, skeleton
from tensorshard.pipeline.trace.call_graph import Leaf
from tensorshard.pipeline.trace.unit_sources import DetachedAlias
from tensorshard.random.call_sites import ModelRandomness
from tensorshard.torch_private.autograd import is_in_backward
from tensorshard.torch_private.modules import clear_forward_hooks, clear_hooks, own_parameters
from tensorshard.torch_private.pytree import tree_map_only


class StageModule:
    """A stage, which runs the model's own forward on the original inputs.

    A call of another stage's unit returns the received tensors, or a placeholder of the right shape. Code between units
    runs on every stage. The forward ends at the first call of a later stage's unit.

    Args:
        model: whole, on the meta device or built. It is not changed; the stage shares its tensors.
        cuts: of all stages, for each shape of the inputs.
        index: of the stage.

    Attributes:
        module: the model's modules under their own names, with the stage's parameters alone, so that a state dict has
            the model's names. Transforms are applied to it. Do not call it; call the stage.
        units: the units that it can compute, by name: those that it calls, and those that no run has called and whose
            parameters it holds.
        elsewhere: names of the modules that only other stages compute, and of the modules inside them.
        sequences: how sequences are split over the ranks of context parallelism.
        latest: the cut of the last micro-batch that it computed.
        is_stale: whether it sent what needs gradients since parameters were unfrozen. Other stages do not know it.
        blocks: those of the model's blocks that are the stage's own (for recomputation, compilation and sharding).
    """

    def __init__(self, model: nn.Module, cuts: CutCache, index: int) -> None:
        self.cut, self.index, self._cuts = cuts.cut, index, cuts
        graph = self.cut.graph
        own = {unit for unit, stages in cuts.stages_of.items() if index in stages}
        self._stubs = cuts.stages_of.keys() - own
        # Units that no run has called stay whole: a stage that holds their parameters may use them in ways not seen
        # yet.
        called_elsewhere = {call.unit for call in graph.calls} - own
        self.module, self._removed = skeleton(
            model, self.cut.parameters(index) | self.cut.buffers(index), called_elsewhere - graph.nested
        )
        self.elsewhere = frozenset(
            f"{stub}.{inner}" if inner else stub
            for stub in called_elsewhere
            for inner in _computed_elsewhere(
                model.get_submodule(stub), self.module.get_submodule(stub), nested=stub in graph.nested
            )
        )
        self.units = {name: self.module.get_submodule(name) for name in graph.parameters if name in own}
        self.blocks = {name: self.module.get_submodule(name) for name in find_blocks(model) if name in own}
        self.sequences = WholeSequences()
        self.latest = self.cut
        self.is_stale = False
        self._device: torch.device | None = None
        self._some_parameter: tuple[nn.Module, str] | tuple[()] | None = None  # None before it was looked up
        self._attached = False
        self.in_penalty = False  # whether the function of a penalty runs
        # For errors; a rank that has several stages says other things.
        self.pipeline, self.mine = f"a pipeline of {self.cut.stages} stages", f"stage {index}"
        self.called = f"the module of stage {index} was called by itself; call the stage, with what it receives"
        if not self.is_last:
            clear_forward_hooks(self.module)  # they take the model's output, which a stage does not have
        self._run: StageRun | None = None
        wrap_forward(self.module, Role.PIPELINE_STAGE, self._enter)
        for name in self._stubs:
            stub = self.module.get_submodule(name)
            clear_hooks(stub, captures_output)
            wrap_forward(stub, Role.PIPELINE_STAGE, partial(self._stub, name))
        for name, unit in self.units.items():
            if len(cuts.stages_of[name]) > 1:
                wrap_forward(unit, Role.PIPELINE_STAGE, self._sometimes)

    @property
    def is_first(self) -> bool:
        """Whether it receives nothing."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it returns the model's output."""
        return self.index == self.cut.stages - 1

    def owned_buffers(self) -> list[str]:
        """Names of the buffers that this stage saves: those of its units; on the last stage also those in no unit.

        Only the last stage runs the model's forward to its end, so it makes all changes to the latter.
        """
        units = list(self.cut.graph.parameters)
        inside = {name: any(name.startswith(f"{unit}.") for unit in units) for name, _ in self.module.named_buffers()}
        mine = tuple(f"{unit}." for unit in self.units)
        return [name for name, within in inside.items() if name.startswith(mine) or (not within and self.is_last)]

    def cut_for(self, inputs: Any) -> Cut:
        """Where the model is cut for the `inputs` of a micro-batch.

        Raises:
            ValueError: the stage cannot compute its part of such inputs.
        """
        cut = self._cuts.of(inputs, self.module)
        if cut is not self.latest:
            lacking = cut.buffers(self.index).intersection(removed.path for removed in self._removed)
            if lacking:
                raise ValueError(
                    f"with inputs like these stage {self.index} reads the buffer {min(lacking)!r}, which it did not "
                    f"read with the sample inputs and therefore does not hold; cut the model by inputs like these"
                )
        return cut

    def take_numbers(self, numbers: ModelRandomness) -> None:
        """See :meth:`~tensorshard.pipeline.run.cut_cache.CutCache.take_numbers`. Called on one of a rank's stages."""
        self._cuts.take_numbers(numbers)

    def expect_gradients(self) -> None:
        """Takes all parameters for trained ones from now on. Called on all stages at the same time."""
        self.is_stale = False
        self._cuts.expect_gradients()

    def crossing_specs(self, inputs: Any, cut: Cut) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
        """What the stage receives, and what it sends on, for the `inputs` of a micro-batch, in order.

        Args:
            cut: what :meth:`cut_for` says of the inputs.
        """
        crossing, graph = self.sequences.crossing(inputs), cut.graph
        received, sent = (
            tuple(crossing.spec(graph.sent_spec(leaf), graph.output_of(leaf)) for leaf in leaves)
            for leaves in (cut.received(self.index), cut.sent(self.index))
        )
        return received, sent

    def __call__(self, inputs: Any, received: Sequence[torch.Tensor] = (), cut: Cut | None = None) -> Any:
        """Computes the stage's part of a micro-batch.

        Args:
            inputs: the model's own, as for ``Engine.step``, on the stage's device.
            received: the tensors that :meth:`crossing_specs` describes: leaves, which require gradients if it says so.
            cut: what :meth:`cut_for` says of the inputs; None to ask it.

        Returns:
            The tensors to send on that :meth:`crossing_specs` describes; on the last stage the model's output.

        Raises:
            ValueError: `received` does not have the shapes and types of :meth:`crossing_specs`.
            RuntimeError: the model called other units than expected, or a unit returned another shape.
        """
        cut = self.cut_for(inputs) if cut is None else cut
        if cut.graph.overwrites_inputs:  # the stages of a rank have the same inputs
            inputs = tree_map_only(torch.Tensor, torch.clone, inputs)
        self.latest = cut
        self._prepare(inputs, received)
        self._run = StageRun(cut, self.index, received, self.sequences.crossing(inputs))
        written = [removed for removed in self._removed if removed.path in cut.graph.written_parameters]
        for removed in written:  # each stage changes its own; other stages' code changes a tensor that nothing reads
            removed.put_own_placeholder(self._device or torch.device("cpu"))
        try:
            return call_model(self.module, inputs)
        except StageLeft:  # of a model whose class has a __call__ of its own around what the hooks see
            return self._run.sent()
        except (AttributeError, TypeError) as error:
            self._explain(error, cut)
            raise
        finally:
            self.is_stale |= self._run.is_stale
            self._run = None
            self._put(written)

    def _explain(self, error: Exception, cut: Cut) -> None:
        """Raises a sentence, if the error may be of an object that a unit of an earlier stage returned.

        Raises:
            RuntimeError: there is such a unit.
        """
        for call in cut.graph.calls[: cut.spans[self.index][0]]:
            kinds = call.structure.opaque()
            if kinds:
                raise RuntimeError(
                    f"code of the model's forward on stage {self.index} fails, perhaps on what {call.unit!r} returns: "
                    f"an object of class {kinds[0]}, which is no container of tensors, so that the stage of "
                    f"{call.unit!r} cannot send it. Return tensors, name a module around both as one unit (pp_units), "
                    f"or set pp=1"
                ) from error

    def put_placeholders(self, device: torch.device) -> None:
        """Puts stand-ins on `device` in the places of what other stages hold. Reading them raises outside of calls."""
        self._device = device
        self._put(self._removed)

    def _put(self, removed: Sequence[Removed]) -> None:
        device = self._device or torch.device("cpu")
        put_placeholders(removed, device, computes=self.computes, sentence=self.not_held)

    def computes(self) -> bool:
        """Whether its forward runs now."""
        return self._run is not None

    def not_here(self, path: str) -> str:
        """What an error says where the module at `path` is called, which other stages have."""
        return (
            f"engine.model.{path} cannot be called on this rank: under {self.pipeline} it is on {self._where(path)}, "
            f"and this rank has {self.mine}. The whole model runs in engine.step, engine.evaluate and engine.predict, "
            f"which every rank calls"
        )

    def not_held(self, path: str) -> str:
        """What an error says where the tensor or the module at `path` is read, which other stages have."""
        if self._run is not None:
            return (
                f"{path} is not on this rank: under {self.pipeline} it is on {self._where(path)}, and this rank has "
                f"{self.mine}. Code of the model's forward between its units runs on every stage: move it into a "
                f"module that holds what it reads, and name that as one unit (pp_units), or set pp=1"
            )
        remedy = (
            "A penalty of engine.add_penalty runs on every stage: let its function go over model.named_parameters(), "
            "which has this rank's"
            if self.in_penalty
            else "For a penalty on the weights call engine.add_penalty(function), which runs on every stage and sums; "
            "for values engine.full_state_dict(), on every rank"
        )
        return (
            f"engine.model.{path} is not on this rank: under {self.pipeline} it is on {self._where(path)}, and this "
            f"rank has {self.mine}. {remedy}"
        )

    def _where(self, path: str) -> str:
        owners = [stage for stage in range(self.cut.stages) if path in self.cut.parameters(stage)]
        if not owners:
            inside = (s for unit, s in self._cuts.stages_of.items() if f"{path}.".startswith(f"{unit}."))
            owners = sorted(next(inside, ()))
        return " and ".join(f"stage {stage}" for stage in owners) or "another stage"

    # -- inside of the model's forward --

    def _enter(self, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        run = self._run
        if run is None:
            raise RuntimeError(self.called)
        try:
            output = forward(*args, **kwargs)
        except StageLeft:
            return run.sent()
        run.check_ended()
        return output

    def _prepare(self, inputs: Any, received: Sequence[torch.Tensor]) -> None:
        device = self._device_of_parameters()
        device = device or next((t.device for t in (*received, *take_apart(inputs)[0])), torch.device("cpu"))
        if device != self._device:
            self.put_placeholders(device)
        if not self._attached:
            # Attached last, so that these hooks run after those of transforms, and send what these return.
            self._attached = True
            for name, unit in self.units.items():
                unit.register_forward_pre_hook(partial(self._before, name), prepend=True)
                unit.register_forward_hook(self._after)

    def _device_of_parameters(self) -> torch.device | None:
        """The device of some parameter of the stage; None if it has none.

        Which module has one is looked up once: going through all modules takes a tenth of a small stage's time.
        """
        if self._some_parameter is None:
            places = ((module, name) for module in self.module.modules() for name in own_parameters(module))
            self._some_parameter = next(places, ())
        if not self._some_parameter:
            return None
        module, name = self._some_parameter
        parameter = own_parameters(module).get(name)
        if parameter is None:  # it was taken out of the module since
            self._some_parameter = None
            return self._device_of_parameters()
        return parameter.device

    def _before(self, name: str, module: nn.Module, args: Any) -> None:
        if self._run is not None:  # else backward is recomputing
            self._run.begin(name)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._run is not None:
            self._run.end(output)

    def _sometimes(self, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        """The forward of a unit that other stages call, too."""
        run = self._run
        if run is None or not run.depth or not run.is_foreign():
            return forward(*args, **kwargs)
        return run.placeholder(self._device)

    def _stub(self, name: str, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        run = self._run
        if run is None and not is_in_backward():
            raise RuntimeError(self.not_here(name))
        if run is None:
            raise RuntimeError(
                f"{name!r}, which belongs to another stage than {self.index}, was called in backward: the model "
                f"recomputes a region that holds units of two stages. Checkpoint each block by itself, or name the "
                f"region's module as one unit (pp_units)"
            )
        if run.depth:  # called by one of this stage's units, as a part of it
            return forward(*args, **kwargs)
        run.begin(name)
        run.depth = 0
        return run.placeholder(self._device)


def _computed_elsewhere(unit: nn.Module, remains: nn.Module, *, nested: bool) -> Iterator[str]:
    """Names of the modules in another stage's `unit` that this stage does not compute; "" is the unit itself.

    This stage may call modules inside the unit by themselves, between units: the end of a diffusion transformer uses
    its first block to embed the time step. Or the unit shares modules with a unit of this stage. In both cases the
    stage has the parameters of these modules.

    Args:
        remains: the part of the unit that the stage has.
        nested: whether other units call it as a part of themselves.
    """
    names = {name for name, _ in remains.named_parameters(remove_duplicate=False)}
    computed: dict[str, bool] = {}
    for name, module in unit.named_modules(remove_duplicate=False):  # modules come before what is inside of them
        prefix = f"{name}." if name else ""
        if any(True for _ in module.parameters()):
            has_own = all(prefix + key in names for key in own_parameters(module))
            computed[name] = has_own and any(key.startswith(prefix) for key in names) and bool(name or nested)
        else:  # an attention's core without parameters, say
            computed[name] = computed.get(name.rpartition(".")[0], False)
        if not computed[name]:
            yield name
    for name, _ in unit.named_parameters(remove_duplicate=False):
        if not computed[name.rpartition(".")[0]]:
            yield name


class StageLeft(BaseException):
    """Leaves the model's forward once the stage has computed its part. No ``except Exception`` stops it."""


class StageRun:
    """One micro-batch on its way through the model's forward."""

    def __init__(self, cut: Cut, stage: int, received: Sequence[torch.Tensor], crossing: Crossing) -> None:
        self._graph = graph = cut.graph
        self._crossing = crossing
        self._start, self._stop = cut.spans[stage]
        self._last = stage == cut.stages - 1
        expected = graph.crossing(self._start) if stage else ()
        if len(received) != len(expected):
            raise ValueError(f"stage {stage} received {len(received)} tensors; it needs {len(expected)}")
        for leaf, tensor in zip(expected, received, strict=True):
            if not crossing.spec(graph.spec(leaf), graph.output_of(leaf)).fits(tensor):
                raise ValueError(
                    f"stage {stage} received {tensor.dtype} {list(tensor.shape)} for the output of "
                    f"{graph.calls[leaf[0]].unit!r}, which should be {graph.spec(leaf)}"
                )
        self._sends: tuple[Leaf, ...] = () if self._last else graph.crossing(self._stop)
        self._values: dict[Leaf, torch.Tensor] = {
            leaf: crossing.joined(
                DetachedAlias.apply(tensor) if tensor.requires_grad else tensor,
                graph.spec(leaf),
                graph.output_of(leaf),
            )
            for leaf, tensor in zip(expected, received, strict=True)
        }
        self._zeros: dict[torch.dtype, torch.Tensor] = {}
        self.position = 0  # of the next call
        self.depth = 0  # 1 while a unit runs
        self.is_stale = False  # whether what is sent needs gradients that the next stage does not know of
        self._left = False

    def begin(self, unit: str) -> None:
        """Called when a call of `unit` begins."""
        if self.depth:
            self.depth += 1
            return
        if self.position >= self._stop and not self._last:
            self._left = True
            raise StageLeft
        calls = self._graph.calls
        expected = calls[self.position].unit if self.position < len(calls) else "the end of the model"
        if expected != unit:
            raise RuntimeError(
                f"the model called {unit!r} where {expected!r} was expected: the order of its calls depends on values "
                f"or random numbers, and so differs from that of the sample inputs; name a module around those that "
                f"vary as one unit (pp_units)"
            )
        self.position += 1
        self.depth = 1

    def end(self, output: Any) -> None:
        """Called when the call that began last is over."""
        self.depth -= 1
        if self.depth:
            return
        if self.is_foreign():
            return
        call = self.position - 1
        wanted = [leaf for leaf in self._sends if leaf[0] == call]
        if not wanted:
            return
        tensors = take_apart(output)[0]
        for leaf in wanted:
            unit = self._graph.calls[call].unit
            spec = self._crossing.held(self._graph.spec(leaf), (unit, leaf[1]))
            if leaf[1] >= len(tensors) or not spec.fits(tensors[leaf[1]]):
                got = [str(TensorSpec.of(tensor)) for tensor in tensors]
                raise RuntimeError(
                    f"{unit!r} returned {', '.join(got) or 'no tensor'}, but tensor {leaf[1]} of its output should be "
                    f"{spec}, as in the run on fake tensors: its shapes depend on values"
                )
            tensor = tensors[leaf[1]]
            self.is_stale |= tensor.requires_grad and not spec.requires_grad
            self._values[leaf] = tensor.clone() if leaf in self._graph.overwritten else tensor

    def is_foreign(self) -> bool:
        """Whether the call that began last belongs to another stage."""
        return not self._start <= self.position - 1 < self._stop

    def placeholder(self, device: torch.device | None) -> Any:
        """The tensors that the call that began last, of another stage's unit, returns on this stage."""
        call = self.position - 1
        made = self._graph.calls[call]
        return made.structure.build(
            [self._tensor((call, index), spec, device) for index, spec in enumerate(made.specs)]
        )

    def _tensor(self, leaf: Leaf, spec: TensorSpec, device: torch.device | None) -> torch.Tensor:
        overwritten = leaf in self._graph.overwritten
        if leaf in self._values and leaf[0] < self._start:
            return self._values[leaf].clone() if overwritten else self._values[leaf]
        if overwritten:  # code outside of units writes into it, so one shared element in memory is not enough
            return torch.zeros(spec.shape, dtype=spec.dtype, device=device)
        if spec.dtype not in self._zeros:
            self._zeros[spec.dtype] = torch.zeros((), dtype=spec.dtype, device=device)
        return self._zeros[spec.dtype].expand(spec.shape)

    def sent(self) -> tuple[torch.Tensor, ...]:
        """What goes to the next stage."""
        return tuple(self._sent(leaf) for leaf in self._sends)

    def _sent(self, leaf: Leaf) -> torch.Tensor:
        tensor = self._crossing.part(self._values[leaf], self._graph.spec(leaf), self._graph.output_of(leaf))
        return DetachedAlias.apply(tensor) if self._graph.sent_spec(leaf).requires_grad else tensor.detach()

    def check_ended(self) -> None:
        """Called when the model's forward has returned."""
        if self._left:
            raise RuntimeError(
                "the model returned although its forward was left: it catches every exception, by a bare `except:` or "
                "by `except BaseException:`, that of leaving a stage as well; catch Exception"
            )
        if self.position < len(self._graph.calls):
            expected = self._graph.calls[self.position].unit
            raise RuntimeError(
                f"the model returned before it called {expected!r}, which it called with the sample inputs: the order "
                f"of its calls depends on values or random numbers; name a module around those that vary as one unit "
                f"(pp_units)"
            )
