"""The calls by which FSDP2 gathers and reduces a unit: before and after its forwards and backwards.

Why: the ranks of a model may call different units, and have to gather and reduce the same ones in the same order.

Checked: torch 2.13 and 2.15.

Public way: none; FSDP2 expects all ranks to call the same units.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._common_utils import collect_grad_tensors
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

__all__ = [
    "UnitWatcher",
    "call_at_end_of_backward",
    "forget_backward",
    "gather_only",
    "gather_unit",
    "gathered_parameters",
    "groups_of_unit",
    "initialize_root",
    "is_gathered",
    "is_in_forward",
    "is_unsharded",
    "prefetch_unit",
    "reduce_unit",
    "release_unit",
    "shown_parameters",
    "watch_unit",
]


_BEGUN = "_tensorshard_begun"  # on FSDP2's state: the number of autograd's next node when a forward began
_COMPANIONS = "_tensorshard_companions"  # on a unit's first group: its other groups


class UnitWatcher(Protocol):
    """What is called in place of FSDP2's own steps. Each method gets the original step, which it has to call.

    Why: the data ranks may call different units, and all have to gather and reduce the same ones in one order.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """

    def before_forward(self, unit: Any, original: Callable[..., Any], *args: Any) -> Any: ...

    def after_forward(self, unit: Any, original: Callable[..., Any], *args: Any) -> Any: ...

    def inputs(self, unit: Any) -> Any: ...

    def outputs(self, unit: Any, backward_follows: bool) -> Any: ...

    def before_backward(self, unit: Any, call: Any, original: Callable[[], None]) -> None: ...

    def after_backward(self, unit: Any, call: Any) -> None: ...

    def backward_is_over(self, original: Callable[[], None]) -> None: ...

    def may_release(self, unit: Any) -> bool: ...

    def gathered(self, unit: Any, group: Any) -> None: ...

    def releasing(self, group: Any) -> None: ...


class _Call:
    """Stands for a group in the node of autograd's graph that ends its backward, and knows which call it is."""

    def __init__(self, watcher: UnitWatcher, group: Any, call: Any) -> None:
        self._watcher, self._group, self._call = watcher, group, call

    def post_backward(self, *_: Any) -> None:
        self._watcher.after_backward(self._group, self._call)


def watch_unit(module: Any, watcher: UnitWatcher) -> Any:
    """Makes `watcher` stand between FSDP2 and the parameters of a `module`.

    A module whose parameters are sharded over several meshes has several groups of them. Its first group, which is
    returned, stands for the unit; None if there is none. All groups are gathered and reduced together, in one order.

    Why: FSDP2 gathers and reduces what this rank calls; other ranks may call other units.

    Checked: torch 2.13 and 2.15.

    Public way: none; forward and backward hooks run before or after FSDP2's, and cannot replace its steps.
    """
    assert isinstance(module, FSDPModule)
    state: Any = module._get_fsdp_state()
    groups = list(getattr(state, "_fsdp_param_groups", None) or [g for g in [state._fsdp_param_group] if g is not None])
    first = groups[0] if groups else None
    if hasattr(first, _COMPANIONS):  # another module of the same unit was watched before
        return first
    if first is not None:
        setattr(first, _COMPANIONS, groups[1:])
    register, finish, before = (
        state._register_pre_backward_hook,
        state._root_post_backward_final_callback,
        state._pre_backward,
    )

    def register_outputs(output: Any) -> Any:
        recorded = list(collect_grad_tensors(output)) if torch.is_grad_enabled() else []
        call = watcher.outputs(first, bool(recorded))

        def pre_backward(state: Any, grad: torch.Tensor) -> torch.Tensor:
            watcher.before_backward(first, call, lambda: before(grad))
            return grad

        state._pre_backward = MethodType(pre_backward, state)
        if all(leaf._base is None for leaf in recorded) or torch._C._are_functorch_transforms_active():
            return register(output)
        _hook_views(recorded, state._pre_backward, getattr(state, _BEGUN, 0))
        return output

    state._register_pre_backward_hook = register_outputs
    state._root_post_backward_final_callback = lambda: watcher.backward_is_over(finish)
    for group in groups:
        _watch_group(group, first, watcher)
    if first is not None:
        _watch_calls(first, watcher)
    return first


def groups_of_unit(unit: Any) -> list[Any]:
    """All groups of parameters of a unit, the one that stands for it first.

    Why: parameters of experts are sharded over another mesh than the others of their module.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    return [unit, *getattr(unit, _COMPANIONS, ())]


def _watch_calls(unit: Any, watcher: UnitWatcher) -> None:
    groups = groups_of_unit(unit)
    before = [group.pre_forward for group in groups]
    after = [group.post_forward for group in groups]

    def register_inputs(args: Any, kwargs: Any) -> Any:
        call = watcher.inputs(unit)
        vars(unit.modules[0]._get_fsdp_state())[_BEGUN] = torch._C._autograd._get_sequence_nr()
        return FSDPParamGroup._register_post_backward_hook(_Call(watcher, unit, call), args, kwargs)  # type: ignore[arg-type]

    def pre_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
        for each in before:
            args, kwargs = each(module, args, kwargs)
        return args, kwargs

    def post_forward(module: nn.Module, inputs: Any, output: Any) -> Any:
        for each in after:
            output = each(module, inputs, output)
        return output

    for group in groups:  # all of them act when the first is called
        group._register_post_backward_hook = lambda args, kwargs: (args, kwargs)
        group.pre_forward = lambda module, args, kwargs: (args, kwargs)
        group.post_forward = lambda module, inputs, output: output
    unit._register_post_backward_hook = register_inputs
    unit.pre_forward = lambda *args: watcher.before_forward(unit, pre_forward, *args)
    unit.post_forward = lambda *args: watcher.after_forward(unit, post_forward, *args)


def _watch_group(group: Any, unit: Any, watcher: UnitWatcher) -> None:
    reshard, to_sharded, to_unsharded = group.reshard, group._to_sharded, group._to_unsharded
    group._backward_prefetch = lambda: None  # the watcher prefetches, in an order that all ranks know

    def shard() -> None:
        if not group.is_sharded:
            watcher.releasing(group)
        to_sharded()

    def unshard() -> None:
        was = group.is_unsharded
        to_unsharded()
        if not was:
            watcher.gathered(unit, group)

    group.reshard = lambda: reshard() if watcher.may_release(unit) else None
    group._to_sharded, group._to_unsharded = shard, unshard


def _hook_views(outputs: list[torch.Tensor], hook: Callable[[torch.Tensor], torch.Tensor], begun: int) -> None:
    """Calls `hook` before the backward of `outputs`, also of views that are written to later.

    A write makes a view's gradient come from what it is a view of, and the view's own hook is called no more. FSDP2
    warns of that. What the module made in this call (its nodes are newer than `begun`) has a hook of its own; a view of
    what the module was given needs none, as its gradient then goes past the module.
    """
    bases = {id(leaf._base): leaf._base for leaf in outputs if leaf._base is not None}
    made = [base for base in bases.values() if base.grad_fn is not None and base.grad_fn._sequence_nr() >= begun]  # type: ignore[attr-defined]
    for tensor in {id(tensor): tensor for tensor in (*outputs, *made)}.values():
        tensor.register_hook(hook)


def is_in_forward(group: Any) -> bool:
    """Whether another module of a group has begun this forward.

    Why: modules that travel together are gathered once, and each of them begins a forward.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    return bool(group._training_state == TrainingState.FORWARD)


def gathered_parameters(group: Any) -> list[torch.Tensor]:
    """The full parameters of a group that is gathered.

    Why: their versions tell whether user code wrote to them.

    Checked: torch 2.13 and 2.15.

    Public way: the modules' own parameters, inside of their forwards alone.
    """
    return [fsdp_param._unsharded_param for fsdp_param in group.fsdp_params]


def is_gathered(unit: Any) -> bool:
    """Whether a unit is gathered, or its gather has begun.

    Why: a unit that is gathered needs no collective for another call.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    return bool(unit.is_unsharded or unit._all_gather_result is not None)


def is_unsharded(group: Any) -> bool:
    """Whether a group is gathered.

    Why: only then are there copies that user code may have written.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    return bool(group.is_unsharded)


def gather_unit(unit: Any) -> None:
    """Gathers a unit for backward, or waits for what :func:`prefetch_unit` began.

    Why: a rank takes part in the gathers of units that it did not call.

    Checked: torch 2.13 and 2.15.

    Public way: ``FSDPModule.unshard``, which gathers for forwards, and knows no offloaded shards.
    """
    for group in groups_of_unit(unit):
        with group.use_training_state(TrainingState.PRE_BACKWARD):
            group.unshard(group.unshard_async_op)
            group.wait_for_unshard()


def gather_only(unit: Any) -> None:
    """Takes part in the gather of a unit for a forward that this rank does not run.

    Why: as for :func:`gather_unit`.

    Checked: torch 2.13 and 2.15.

    Public way: ``FSDPModule.unshard``, for all groups of a module together.
    """
    for group in groups_of_unit(unit):
        with group.use_training_state(TrainingState.FORWARD):
            group.unshard(group.unshard_async_op)
            group.wait_for_unshard()


def prefetch_unit(unit: Any) -> None:
    """Begins to gather a unit for its backward.

    Why: the next unit of the common order may be one that this rank did not call.

    Checked: torch 2.13 and 2.15.

    Public way: ``FSDPModule.set_modules_to_backward_prefetch``, which fixes the order once.
    """
    for group in groups_of_unit(unit):
        FSDPParamGroup._prefetch_unshard(group, "backward")


def reduce_unit(unit: Any) -> None:
    """Reduces the gradients that a unit has so far, and releases its parameters.

    Its module may be called again in this backward, as reentrant checkpointing does, and FSDP2 would take that for a
    part of the backward that is over.

    Why: a rank takes part in the reductions of units that it did not call.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    for group in reversed(groups_of_unit(unit)):  # in the order of autograd, for which FSDP2 keeps fewest buffers
        group.post_backward()
    unit.modules[0]._get_fsdp_state()._training_state = TrainingState.IDLE


def release_unit(unit: Any) -> None:
    """Shards a unit again, whatever its watcher says.

    Why: gathered parameters whose shards were written since are gathered anew.

    Checked: torch 2.13 and 2.15.

    Public way: ``FSDPModule.reshard``, for all groups of a module together.
    """
    for group in groups_of_unit(unit):
        group._to_sharded()


def initialize_root(model: nn.Module) -> None:
    """Makes `model` the root of its units before any of them is called.

    Why: FSDP2 takes the module that is called first for the root. User code may call a unit first.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    assert isinstance(model, FSDPModule)
    model._get_fsdp_state()._lazy_init()


def forget_backward(model: nn.Module) -> None:
    """Ends a backward in which nothing is reduced: FSDP2 is then as before it.

    Why: a backward of which the gradient is differentiated again leaves parameters gathered and nothing to reduce.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    assert isinstance(model, FSDPModule)
    state: Any = model._get_fsdp_state()
    context = state._state_ctx
    for each in context.all_states:
        each._training_state = TrainingState.IDLE
        for group in each._fsdp_param_groups:
            group._training_state = TrainingState.IDLE
    context.post_backward_final_callback_queued = False


def call_at_end_of_backward(model: nn.Module) -> None:
    """Makes the running backward end as FSDP2's do, though none of its own hooks has been called.

    Why: a rank may reach parameters through no unit's output, or none at all, while others end a backward.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    assert isinstance(model, FSDPModule)
    model._get_fsdp_state()._register_root_post_backward_final_callback()


def shown_parameters(group: Any) -> list[tuple[nn.Module, str, Any]]:
    """The places where a group's parameters are shown: module, name, and FSDP2's object for the parameter.

    Why: between calls the modules show the sharded parameters, which the optimizer has, even if copies are kept.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    places = []
    for fsdp_param in group.fsdp_params:
        info = fsdp_param._module_info
        places.append((info.module, info.param_name, fsdp_param))
        places += [
            (module, name, fsdp_param)
            for module, name in zip(info.shared_modules, info.shared_param_names, strict=True)
        ]
    return places
