"""One run of a model on fake tensors: which units are called, and which earlier outputs each of them needs."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import nn

from tensorshard.model.fake_copies import copy_with
from tensorshard.model.forwards import Role, forward_within
from tensorshard.model.reachable_state import draws_on_host
from tensorshard.model.state_places import host_random_states
from tensorshard.model.tensors import TensorSpec, map_tensors, storage_key, take_apart, tensor_leaves
from tensorshard.pipeline.trace.call_graph import Leaf, UnitCall
from tensorshard.pipeline.trace.unit_sources import (
    DetachedAlias,
    UncuttableError,
    UnitSources,
    check_differentiable,
    reads_of,
)
from tensorshard.torch_private.dispatch import without_dispatch_modes
from tensorshard.torch_private.fake_tensors import (
    FakeTensorMode,
    without_fake_kernel_reports,
)
from tensorshard.torch_private.modules import NormBase
from tensorshard.torch_private.recomputation import CHECKPOINT_NODE, HOOKED_NODE, is_checkpointing
from tensorshard.torch_private.tensors import tensor_version

# Autograd's nodes that cannot compute the gradients of inputs and of parameters separately.
_ONE_PIECE = (HOOKED_NODE, CHECKPOINT_NODE)


__all__ = ["TracedRun", "UncuttableError"]


class TracedRun:
    """Notes what happens during one run.

    Args:
        fake_copy: the model's copy on fake tensors.
        sources: follows where its values come from.
        fake: the mode of its tensors.
        device: of them.
        same_numbers: as for :class:`~tensorshard.pipeline.trace.tracer.Tracer`.

    Attributes:
        calls: calls of units that have ended.
        nested: units that others called as a part of themselves.
        outside: modules that ran outside of units.
        stateful: units that changed their buffers.
        impure: modules outside of units whose own code made random numbers or changed a buffer.
        unsplittable_backward: as in :class:`tensorshard.pipeline.trace.call_graph.CallGraph`.
    """

    def __init__(
        self,
        fake_copy: nn.Module,
        sources: UnitSources,
        fake: FakeTensorMode,
        device: torch.device,
        *,
        same_numbers: bool = False,
    ) -> None:
        self._same_numbers = same_numbers
        self._units_draw = False  # from Python or numpy
        self._draws = False  # from these, outside of units
        self._copy, self.sources, self._fake, self._device = fake_copy, sources, fake, device
        self.calls: list[UnitCall] = []
        self.nested: set[str] = set()
        self.outside: set[str] = set()
        self.stateful: set[str] = set()
        self.impure: set[str] = set()
        self.unsplittable_backward = False
        self._inside: list[str] = []  # the modules outside of units that are running
        self._running: list[str] = []  # the units that are running
        self._versions: list[int] = []
        self._leaves: dict[int, Leaf] = {}  # the unit's output that a leaf tensor of autograd stands for
        self._saved: _SavedBytes | None = None
        self._estimated = False  # whether the unit that is running was run on real tensors, which autograd does not see

    @contextmanager
    def active(self) -> Iterator[None]:
        """A context in which everything that runs is noted."""
        self._host_states = host_random_states()
        with self.sources, without_fake_kernel_reports():
            yield
        self._check_host_draws()

    @cached_property
    def _code_draws(self) -> bool:
        """Whether the model's code draws from Python or numpy."""
        return draws_on_host(self._copy)

    def _check_host_draws(self, unit: str | None = None) -> None:
        """Refuses code between units that draws from Python or numpy: stages leave the forward at different places."""
        if host_random_states() != self._host_states and self._code_draws:
            self._draws = True
            if self._same_numbers and not self._units_draw:
                self._host_states = host_random_states()
                return  # each forward of a stage begins with the same state
            module = next((name for name in reversed(self._inside) if name not in (unit, "")), None)
            where = f"module {module!r}" if module else "the model's own forward"
            raise UncuttableError(
                f"{where} draws from Python's or numpy's global random numbers outside of the model's units (to leave "
                f"out a layer or to mask a span, say), which each stage would do for itself"
                f"{', after units that draw from there' if self._units_draw else ''}. Draw inside of a unit, "
                f"draw before the call and pass what was drawn as an input, or set pp=1"
            )

    @property
    def draws(self) -> bool:
        """Whether code outside of units made random numbers that it may decide by."""
        return self._draws or self.sources.draws

    @property
    def module(self) -> str:
        """The module outside of units that is running."""
        return self._inside[-1] if self._inside else ""

    def _around(self, unit: str) -> str:
        """The module whose code calls `unit`."""
        return next((name for name in reversed(self._inside) if name != unit), "")

    # -- units --

    def begin(self, name: str, unit: nn.Module, args: Any, kwargs: Any) -> None:
        """A call of the unit `name` begins."""
        if self._running:
            self.nested.add(name)
        else:
            if not torch.is_grad_enabled() and is_checkpointing():
                raise UncuttableError(
                    f"the model recomputes {name!r} by torch.utils.checkpoint with use_reentrant=True, which a "
                    f"pipeline's stages cannot run; use use_reentrant=False, or Plan(recompute='full') instead of it"
                )
            check_differentiable(name, self._around(name))
            self._check_host_draws(name)
            self.sources.begin_call(len(self.calls), tensor_leaves((args, kwargs)))
            self._estimated = False
            self._versions = [tensor_version(buffer) for buffer in unit.buffers()]
        self._running.append(name)

    def compute(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The forward of the unit `name`."""
        if len(self._running) > 1:
            return forward(*args, **kwargs)
        if not self._running:
            raise UncuttableError(
                f"the model calls {name}.forward(...) itself, which passes by the hooks that stages run a module with",
                f"; call the module, as in {name}(...), or name an enclosing module as one unit (pp_units)",
                self._around(name),
            )
        unit = self._copy.get_submodule(name)
        self._saved = _SavedBytes(unit)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._saved.pack, lambda tensor: tensor):
                return self._forward(unit, forward, args, kwargs)
        except BaseException:
            self._running.clear()
            self.sources.call = None
            self._saved.forget()
            raise

    def end(self, name: str, unit: nn.Module, output: Any) -> Any:
        """The call that began last is over.

        Returns:
            What is known of `output` outside of the unit; None inside of another.
        """
        self._running.pop()
        if self._running:
            return None
        sources = self.sources
        call, sources.call = sources.call, None
        assert call is not None and self._saved is not None
        tensors, structure = take_apart(output)
        reads = reads_of(sources.read)
        gradients = reads.leaves if self._estimated else self.gradient_leaves(tensors)
        specs = tuple(TensorSpec.of(tensor) for tensor in tensors)
        self.calls.append(
            UnitCall(name, reads, gradients, structure, specs, sources.flops, sources.written_bytes, self._saved.nbytes)
        )
        self._saved.forget()
        if [tensor_version(buffer) for buffer in unit.buffers()] != self._versions or _keeps_statistics(unit):
            self.stateful.add(name)
        count = iter(range(len(tensors)))
        fresh = map_tensors(lambda tensor: self._fresh(tensor, call, next(count)), output)
        sources.flops = sources.written_bytes = 0
        self._units_draw = self._units_draw or host_random_states() != self._host_states
        self._host_states = host_random_states()
        return fresh

    def _forward(self, unit: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except UncuttableError:
            raise
        except Exception as error:
            # A unit may depend on values, or use a kernel without a fake version. Its shapes must be found in another
            # way.
            self._estimated = True
            try:
                with without_dispatch_modes():
                    return run_for_real(unit, args, kwargs)
            except Exception:
                raise error from None

    def _fresh(self, tensor: torch.Tensor, call: int, index: int) -> torch.Tensor:
        """A tensor like one that a unit returned, with an unknown value and no history in autograd."""
        spec = TensorSpec.of(tensor)
        with without_dispatch_modes(), self._fake:
            fresh = spec.empty(self._device)
        fresh.requires_grad_(spec.requires_grad)
        self._leaves[id(fresh)] = (call, index)
        self.sources.set_output(fresh, (call, index))
        return DetachedAlias.apply(fresh) if spec.requires_grad else fresh  # functional code may change it in place

    # -- code outside of units --

    def enter(self, name: str) -> None:
        """The forward of the module `name` begins."""
        if self.sources.call is None:
            self._inside.append(name)
            self.outside.add(name)
            self.sources.impure = False

    def leave(self, may_repeat: Callable[[str], bool]) -> None:
        """The forward that was entered last is over. ``may_repeat(module)`` says whether all stages may run the
        module."""
        if self.sources.call is not None:
            return
        name = self._inside.pop()
        if self.sources.impure and not may_repeat(name):
            self.impure.add(name)
            self.sources.impure = False

    def gradient_leaves(self, tensors: Iterable[torch.Tensor]) -> frozenset[Leaf]:
        """The outputs of earlier calls that get a gradient from `tensors`."""
        nodes = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        seen = set(nodes)
        leaves = {self._leaves[id(tensor)] for tensor in tensors if id(tensor) in self._leaves}
        while nodes:
            node = nodes.pop()
            self.unsplittable_backward |= node.name() in _ONE_PIECE
            variable = getattr(node, "variable", None)
            if id(variable) in self._leaves:
                leaves.add(self._leaves[id(variable)])
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    nodes.append(following)
        return frozenset(leaves)


class _SavedBytes:
    """Counts the bytes that autograd keeps for backward, without parameters; each tensor counts once."""

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
        if tensor.grad_fn is None:
            return tensor
        # A node that keeps its own output is in a reference cycle that garbage collection does not see.
        with without_dispatch_modes():
            return tensor.detach()

    def forget(self) -> None:
        """Lets go of the tensors. Their graph holds on to this object."""
        self._kept.clear()


def _keeps_statistics(unit: nn.Module) -> bool:
    return any(isinstance(module, NormBase) and module.track_running_stats for module in unit.modules())


def run_for_real(unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a copy of `unit` with arbitrary weights returns for arbitrary values, on the CPU.

    It takes the memory of that one unit until it returns.

    Args:
        unit: on fake tensors; it is not changed.
        args, kwargs: only the tensors' shapes, types and ``requires_grad`` count.
    """
    generator = torch.Generator().manual_seed(0)

    def values(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            return torch.randn(tensor.shape, generator=generator).mul_(0.02).to(tensor.dtype)
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    copied = copy_with(unit, values)
    forward = forward_within(copied, Role.TRACE)  # the tracer's notes calls on fake tensors; hooks are around it
    given = map_tensors(
        lambda tensor: values("", tensor).requires_grad_(tensor.requires_grad and tensor.is_floating_point()),
        (args, kwargs),
    )
    return forward(*given[0], **given[1])
