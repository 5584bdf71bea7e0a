"""What a run leaves behind: losses, gradients, norms, weights, states, and what passed through its modules."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from tensorshard.common.words import kind_of
from tensorshard.torch_private.optimizers import watched_clipping
from tensorshard.torch_private.pipelining import while_stages_prepare
from tensorshard.torch_private.pytree import tree_leaves

Tensors = dict[str, torch.Tensor]

_WRAPPERS = re.compile(r"(^|\.)(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)")
_MOST_RECORDED = 1 << 28  # bytes of modules' outputs in one step; what comes later is left out


@dataclass
class Call:
    """One call of a module.

    Attributes:
        module: its name in the model; "" for the model itself.
        kind: its class's name.
        inputs: the tensors that it was given.
        output: its largest floating-point tensor, None if it has none.
        gradient: of the loss by `output`, None if there was none.
    """

    module: str
    kind: str
    inputs: list[torch.Tensor]
    output: torch.Tensor | None
    gradient: torch.Tensor | None = None


@dataclass
class Step:
    """One step.

    Attributes:
        loss: as the step returned it; None if it returned none.
        gradients: of each parameter, whole, before clipping. A parameter without one is missing.
        clipped: how much clipping left of the gradients' length; None if they were not clipped.
        norm: as ``clip_grad_norm_`` or the Engine returned it.
        weights: each parameter after the step, whole.
        buffers: each buffer after the step.
        states: the optimizer's tensors after the step, by ``parameter/state``, those with one number for each of a
            parameter's elements.
        calls: of modules, in the order in which they ended.
    """

    loss: float | None = None
    gradients: Tensors = field(default_factory=dict)
    clipped: float | None = None
    norm: float | None = None
    weights: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    states: Tensors = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)


@dataclass
class Record:
    """A run, as one rank saw it.

    Attributes:
        initial: the weights before the first step.
        others: what was asked of the model in the end, by name, such as what it generated.
    """

    initial: Tensors
    steps: list[Step]
    others: Tensors = field(default_factory=dict)


class Source(Protocol):
    """Where a run's tensors are read, whole. The ranks of a run call each method together."""

    def weights(self) -> Tensors: ...

    def buffers(self) -> Tensors: ...

    def gradients(self) -> Tensors: ...

    def states(self) -> Tensors: ...

    def watched(self, step: Step) -> AbstractContextManager[None]:
        """Inside, what can be read only in the middle of a step is written to `step`."""
        ...


def record(
    source: Source, model: nn.Module | None, take_step: Callable[[int], Any], steps: int, rename: Callable[[str], str]
) -> Record:
    """Takes `steps` steps and records them.

    Args:
        model: whose modules' calls are recorded; None for none.
        take_step: called with 0, 1, ...; returns a loss or None.
        rename: from the names of `model` to those of the record.
    """
    made = Record(source.weights(), [])
    for number in range(steps):
        step = Step()
        made.steps.append(step)
        with source.watched(step), _recorded_calls(model, step, rename) if model is not None else ExitStack():
            step.loss = _as_number(take_step(number))
        step.weights, step.buffers, step.states = source.weights(), source.buffers(), source.states()
    return made


class TorchSource:
    """The tensors of a model in a training loop of whatever kind.

    Args:
        shapes: of the whole parameters; None where `model` holds them whole.
        gather: ``gather(name, tensor)`` makes a tensor of another shape whole; every rank calls it.
        rename: from the names of `model` to those of the record.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        shapes: Mapping[str, torch.Size] | None = None,
        gather: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
        rename: Callable[[str], str],
    ) -> None:
        self._model = model
        self._shapes = shapes
        self._gather = gather
        self._rename = rename
        self._optimizers: list[Optimizer] = []

    def weights(self) -> Tensors:
        return {name: self._whole(name, _weight(p)) for name, p in self._parameters()}

    def buffers(self) -> Tensors:
        buffers = {}
        for raw, buffer in self._model.named_buffers():
            name = self._rename(raw)
            if self._shapes is None or buffer.shape == self._shapes.get(name, buffer.shape):
                buffers[name] = _copy(buffer.full_tensor() if isinstance(buffer, DTensor) else buffer)
        return buffers

    def gradients(self) -> Tensors:
        gradients = {}
        for name, parameter in self._parameters():
            gradient = _gradient(parameter)
            if self._shapes is not None and not isinstance(gradient, DTensor) and self._is_part(name, parameter):
                gradient = torch.zeros_like(parameter) if gradient is None else gradient  # gather is a collective
            if gradient is not None:
                gradients[name] = self._whole(name, gradient)
        return gradients

    def states(self) -> Tensors:
        names = {id(parameter): name for name, parameter in self._parameters()}
        states = {}
        for optimizer in self._optimizers:
            for parameter, values in optimizer.state.items():
                name = names.get(id(parameter))
                if name is None or not isinstance(values, dict):
                    continue
                for key in sorted(values, key=str):
                    value = values[key]
                    if isinstance(value, torch.Tensor) and value.ndim and value.shape == parameter.shape:
                        states[f"{name}/{key}"] = self._whole(name, value)
        return states

    @contextmanager
    def watched(self, step: Step) -> Iterator[None]:
        taken: list[float] = []
        is_idle = [False]  # whether they were taken before an update that updates nothing

        def note(idle: bool = False) -> None:
            if not taken or is_idle[0]:
                step.gradients = self.gradients()
                taken[:] = [_length(step.gradients)]
                is_idle[0] = idle

        def note_clipping(norm: Any) -> None:
            note()
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            step.norm = _as_number(norm)

        def before_update(optimizer: Optimizer, *_: Any) -> None:
            if not any(optimizer is one for one in self._optimizers):
                self._optimizers.append(optimizer)
            was_noted = bool(taken) and not is_idle[0]
            note(idle=_updates_nothing(optimizer))
            if was_noted and step.clipped is None and not _is_deepspeed(self._model):  # whose gradients are gone by now
                step.clipped = _length(self.gradients()) / taken[0] if taken[0] else 1.0

        with watched_clipping(note_clipping), _watched_deepspeed(self._model, note):
            handle = register_optimizer_step_pre_hook(before_update)
            try:
                yield
            finally:
                handle.remove()
        if not taken:
            note()

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for raw, parameter in self._model.named_parameters():
            yield self._rename(raw), parameter

    def _is_part(self, name: str, tensor: torch.Tensor) -> bool:
        assert self._shapes is not None
        return name in self._shapes and tensor.shape != self._shapes[name]

    def _whole(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            with torch.no_grad():
                return _copy(tensor.full_tensor())
        if self._shapes is not None and self._is_part(name, tensor):
            if self._gather is None:
                raise ValueError(
                    f"{name!r} has the shape {list(tensor.shape)} on rank {dist.get_rank()} and "
                    f"{list(self._shapes[name])} in the reference, and is no DTensor: pass gather=, a function "
                    f"gather(name, tensor) that returns the whole tensor on every rank"
                )
            with torch.no_grad():
                whole = self._gather(name, tensor.detach())
            if whole.shape != self._shapes[name]:
                raise ValueError(
                    f"gather({name!r}, ...) returned the shape {list(whole.shape)}; in the reference it is "
                    f"{list(self._shapes[name])}"
                )
            return _copy(whole)
        return _copy(tensor)


def plain_name(name: str) -> str:
    """`name` without what wrappers put before it."""
    return _WRAPPERS.sub(r"\1", name).replace("..", ".").strip(".")


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _weight(parameter: nn.Parameter) -> torch.Tensor:
    if hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping"):
        from deepspeed.utils import safe_get_full_fp32_param

        value = safe_get_full_fp32_param(parameter)
        if value is not None:
            return value.to(parameter.dtype)
    return parameter


def _gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    if hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping"):
        from deepspeed.utils import safe_get_full_grad

        return safe_get_full_grad(parameter)
    return parameter.grad


def _updates_nothing(optimizer: Optimizer) -> bool:
    """Whether the next update only makes the optimizer's states, as code that reads checkpoints has it do."""
    return all(float(group.get("lr", 1.0)) == 0.0 for group in optimizer.param_groups)


def _is_deepspeed(model: nn.Module) -> bool:
    return hasattr(model, "allreduce_gradients") and hasattr(model, "step")


@contextmanager
def _watched_deepspeed(model: nn.Module, note: Callable[[], None]) -> Iterator[None]:
    """Inside, `note` is called before the update of a DeepSpeed engine, which may keep no gradients after it."""
    if not _is_deepspeed(model):
        yield
        return
    engine: Any = model
    step = engine.step

    def noting(*args: Any, **kwargs: Any) -> Any:
        if engine.is_gradient_accumulation_boundary():
            note()
        return step(*args, **kwargs)

    engine.step = noting
    try:
        yield
    finally:
        del engine.step


@contextmanager
def _recorded_calls(model: nn.Module, step: Step, rename: Callable[[str], str]) -> Iterator[None]:
    """Inside, the calls of the modules of `model` are written to `step`."""
    handles = []
    room = [_MOST_RECORDED]
    pauses: list[None] = []

    def watch(name: str, module: nn.Module) -> None:
        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if room[0] <= 0 or pauses:
                return
            given = [_local(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            inputs = [_copy(one) for one in given if one is not None]
            main = max(
                (
                    leaf
                    for leaf in tree_leaves(output)
                    if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and _local(leaf) is not None
                ),
                key=lambda leaf: leaf.numel(),
                default=None,
            )
            local = None if main is None else _local(main)
            call = Call(name, type(module).__name__, inputs, None if local is None else _copy(local))
            room[0] -= sum(one.nbytes for one in (*inputs, *([] if local is None else [local])))
            step.calls.append(call)
            if main is not None and main.requires_grad and torch.is_grad_enabled():

                def arrived(gradient: torch.Tensor) -> None:
                    local_gradient = _local(gradient)
                    if local_gradient is not None:
                        call.gradient = _copy(local_gradient)

                main.register_hook(arrived)

        handles.append(module.register_forward_hook(after, with_kwargs=True))

    for raw, module in model.named_modules():
        with suppress(RuntimeError):  # a stage of a pipeline does not see what others, or the whole model, return
            watch(rename(raw), module)
    try:
        with while_stages_prepare(pauses):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _local(tensor: torch.Tensor) -> torch.Tensor | None:
    """What this rank has of it; None for a part of a sum."""
    if not isinstance(tensor, DTensor):
        return tensor
    return None if any(placement.is_partial() for placement in tensor.placements) else tensor.to_local()


def _length(tensors: Tensors) -> float:
    return float(sum(float(one.double().square().sum()) for one in tensors.values()) ** 0.5)


def _as_number(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"step(i) returned a tensor of shape {list(value.shape)}; it must return a scalar, or None"
            )
        return float(value.detach())
    if isinstance(value, int | float):
        return float(value)
    raise TypeError(f"step(i) returned {kind_of(value)}; it must return the loss, a scalar, or None")
