"""An Engine's optimizer: how it is made, which parameters it trains, and what each of its updates does under a plan."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tensorshard.data_parallel.sharded_model import ShardedModel
from tensorshard.engine.guards.foreign_optimizers import warn_of_schedulers
from tensorshard.host.process_settings import HostHeap
from tensorshard.model.trains_itself import OwnRule
from tensorshard.passes.precision import master_dtype
from tensorshard.torch_private.dispatch import TorchDispatchMode, innermost_dispatch_mode
from tensorshard.torch_private.dtensor import shard_of
from tensorshard.torch_private.operators import FUSED_UPDATES
from tensorshard.torch_private.pytree import tree_map

OptimizerFactory = Callable[..., torch.optim.Optimizer]


# Optimizers that no plan can step.
_CANNOT = {
    torch.optim.LBFGS: "calls a closure again and again in one step, while a step here has one forward and backward",
    torch.optim.SparseAdam: "takes sparse gradients alone, while gradients here are dense",
}


def build_optimizer(
    factory: OptimizerFactory, masters: Mapping[str, nn.Parameter], rules: Sequence[OwnRule] = ()
) -> torch.optim.Optimizer:
    """The optimizer that `factory` makes of `masters`, with its fastest kernels if the user did not choose.

    Args:
        rules: of parameters that are trained in groups of their own; `factory` gets the others.

    Raises:
        TypeError: `factory` made something else.
        ValueError: the optimizer holds parameters that it was not given, or cannot train by the `rules`.
    """
    by_rule = {name for rule in rules for name in rule.parameters}
    built = _build(factory, {name: master for name, master in masters.items() if name not in by_rule})
    for rule in rules:
        rule.add_group(built, masters)
    return built


def check_trains(factory: OptimizerFactory, model: nn.Module, rules: Sequence[OwnRule]) -> None:
    """Refuses an optimizer that cannot train parameters of `model` by `rules`. Nothing is allocated.

    Raises:
        ValueError: `factory` makes another optimizer than a rule needs.
    """
    if not rules:
        return
    # The optimizer's class shows only when one is made. So one is made of placeholders of one number each.
    by_rule = {name for rule in rules for name in rule.parameters}
    trained = {
        name: nn.Parameter(torch.zeros((), dtype=master_dtype(p.dtype)).expand(p.shape))
        for name, p in model.named_parameters()
        if p.requires_grad or name in by_rule
    }
    build_optimizer(factory, trained, rules)


class StepCounter:
    """Counts the optimizer steps of an Engine, and does what follows each of them.

    Args:
        heap: looks at this process's memory; None where it is not looked at.
        warns: whether this rank warns of schedulers.
    """

    def __init__(self, heap: HostHeap | None, *, warns: bool) -> None:
        self.taken = 0
        self._heap = heap
        self._warns = warns

    def count(self) -> None:
        """Called after each step, skipped ones of fp16 included."""
        self.taken += 1
        if self._heap is not None:
            self._heap.after_call()
        if self._warns:
            self._warns = False
            warn_of_schedulers()

    def state_dict(self) -> int:
        return self.taken

    def load_state_dict(self, taken: int) -> None:
        self.taken = taken


def _build(factory: OptimizerFactory, masters: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    if not masters:  # a pipeline's stage may train nothing; it has an optimizer all the same, for schedulers
        masters = {"none": nn.Parameter(torch.empty(0))}
    given: Any = list(masters.items()) if _wants_names(factory) else list(masters.values())
    try:
        built = factory(given)
    except (TypeError, ValueError) as error:
        raise type(error)(f"optimizer(parameters) failed: {error}") from error
    if not isinstance(built, torch.optim.Optimizer):
        raise TypeError(f"optimizer(parameters) returned a {type(built).__name__}; it must return a torch Optimizer")
    if isinstance(built, tuple(_CANNOT)):
        what = next(reason for kind, reason in _CANNOT.items() if isinstance(built, kind))
        raise ValueError(f"the optimizer is a {type(built).__name__}, which {what}; take one such as torch.optim.AdamW")
    known = set(masters.values())
    for group in built.param_groups:
        for parameter in group["params"]:
            if parameter not in known:
                raise ValueError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that it was not given; build "
                    f"it from the parameters that the callable receives"
                )
        # The for-loop that torch chooses on CPUs is 7 times slower; the fused kernel computes the same. Other
        # optimizers run as they were built: their fused kernels are the user's choice.
        is_open = group.get("fused") is None and group.get("foreach") is None and not group.get("differentiable")
        if is_open and isinstance(built, torch.optim.Adam | torch.optim.AdamW):
            group["fused"] = True
    return built


def _wants_names(factory: Any) -> bool:
    try:
        return "named_parameters" in inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return False


class TrainedParameters:
    """Keeps an optimizer's parameter groups in step with what user code does to ``requires_grad``.

    A parameter that is frozen later stays in its group: it has no gradient, and optimizers skip it. One that is trained
    only later joins the group that the optimizer's factory puts it in.

    Args:
        factory: made `optimizer`.
        rules: of parameters that are trained in groups of their own.
        reserved: whether the optimizer's states are offloaded, for which there is room since the start alone.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        factory: OptimizerFactory,
        rules: Sequence[OwnRule],
        sharded: ShardedModel,
        *,
        reserved: bool,
    ) -> None:
        self._optimizer = optimizer
        self._factory = factory
        self._rules = rules
        self._sharded = sharded
        self._reserved = reserved
        self._known = set(sharded.trained_masters())
        self._groups = len(optimizer.param_groups)
        optimizer.add_param_group = MethodType(  # type: ignore[method-assign]
            self._adding(optimizer.add_param_group), optimizer
        )

    def check(self) -> None:
        """Called before gradients are made.

        Raises:
            RuntimeError: a parameter that was frozen is trained now, and the optimizer's states are offloaded.
        """
        if self._reserved:
            self._refuse_offloaded(self._sharded.trained_masters().keys() - self._known)

    def _refuse_offloaded(self, names: Iterable[str]) -> None:
        for name in sorted(names):
            raise RuntimeError(
                f"parameter {name!r} was frozen when parallelize laid out the optimizer's states, which are offloaded, "
                f"and is trained now: leave requires_grad=True at parallelize for all that will be trained, and freeze "
                f"after it, or take a plan without offload of the optimizer"
            )

    def follow(self, trained: Mapping[str, nn.Parameter]) -> None:
        """Adds those of `trained`, the masters that are trained now, that the optimizer does not hold yet."""
        if trained.keys() <= self._known:
            return
        new = {name: master for name, master in trained.items() if name not in self._known}
        self._known.update(new)
        held = {p for group in self._optimizer.param_groups for p in group["params"]}
        new = {name: master for name, master in new.items() if master not in held}
        if not new:
            return
        everything = {name: m for name, m in self._sharded.masters().items() if name in self._known}
        model = build_optimizer(self._factory, everything, self._rules)
        for index, group in enumerate(model.param_groups):
            names = group.get("param_names")
            for place, parameter in enumerate(group["params"]):
                if not any(parameter is master for master in new.values()):
                    continue
                if index >= self._groups:  # the factory makes more groups than before
                    self._optimizer.param_groups.append(
                        {**group, "params": [], **({"param_names": []} if names else {})}
                    )
                    self._groups += 1
                target = self._optimizer.param_groups[index]
                target["params"].append(parameter)
                if names:
                    target["param_names"].append(names[place])
                if parameter in model.state:  # some optimizers make states when they are built
                    self._optimizer.state[parameter] = model.state[parameter]

    def _adding(self, add: Callable[[dict[str, Any]], None]) -> Callable[..., None]:
        """``add_param_group``, which takes parameters of the model and adds their masters."""

        def add_param_group(_: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
            shown = self._sharded.shown_parameters()
            names = {id(p): name for name, p in shown.items()}
            masters = self._sharded.masters()
            given = param_group["params"]
            members = [given] if isinstance(given, torch.Tensor) else list(given)
            replaced = []
            for member in members:
                name, parameter = member if isinstance(member, tuple) else (None, member)
                full_name = names.get(id(parameter))
                if full_name is not None:
                    if self._reserved:
                        self._refuse_offloaded([full_name])
                    self._known.add(full_name)
                    parameter = masters[full_name]
                replaced.append(parameter if name is None else (name, parameter))
            add({**param_group, "params": replaced})

        return add_param_group


def methods_beside_step(optimizer: torch.optim.Optimizer) -> list[str]:
    """The public methods that the class of `optimizer` adds to those of torch's optimizers, such as ``eval``."""
    return [
        name
        for name in dir(type(optimizer))
        if not name.startswith("_")
        and not hasattr(torch.optim.Optimizer, name)
        and callable(getattr(type(optimizer), name))
    ]


def complete_update(
    optimizer: torch.optim.Optimizer,
    sharded: ShardedModel,
    *,
    follow: Callable[[], None],
    before: Sequence[Callable[[], object]],
    after: Callable[[], object],
) -> None:
    """Makes each update by `optimizer` do what the plan needs, whoever asks for it.

    Args:
        follow: adds the parameters that are trained by now.
        before: called before the update, in this order.
        after: called after it.
    """
    for work in before:
        optimizer.register_step_pre_hook(_outside_fused_updates(work))
    optimizer.register_step_post_hook(_outside_fused_updates(after))
    torch_step: Callable[[], Any] = optimizer.step  # type: ignore[assignment]

    def step(_: torch.optim.Optimizer) -> Any:
        follow()
        with _fused_updates_of_shards(optimizer):
            result = torch_step()
        sharded.adopt_writes()  # of hooks of the optimizer that are the user's
        return result

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]


def _fused_updates_of_shards(optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
    """Inside, `optimizer` updates the shards of its DTensors where its update is fused."""
    groups = optimizer.param_groups
    is_wanted = any(group.get("fused") and any(isinstance(p, DTensor) for p in group["params"]) for group in groups)
    return _FusedUpdates() if is_wanted else nullcontext()


def _outside_fused_updates(work: Callable[[], object]) -> Callable[..., None]:
    """`work` as a hook of an optimizer's step. It is not part of the update: its own operations, which are collectives
    of many small messages, do not go through :class:`_FusedUpdates`."""

    def hook(*_: Any) -> None:
        mode = innermost_dispatch_mode()
        if not isinstance(mode, _FusedUpdates):
            work()
            return
        mode.__exit__(None, None, None)
        try:
            work()
        finally:
            mode.__enter__()

    return hook


class _FusedUpdates(TorchDispatchMode):
    """Fused updates of DTensors: the kernel is given the shards themselves.

    DTensor compares the placements of all tensors of such a call first. That takes milliseconds in every step, and
    seconds in the first one of a model with hundreds of parameters. An update works on each element by itself, so that
    shards of equal placement need none of it.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FUSED_UPDATES and _have_equal_placements(args):
            args, kwargs = tree_map(shard_of, (args, kwargs))
        return func(*args, **(kwargs or {}))


def _have_equal_placements(lists: Iterable[Any]) -> bool:
    """Whether there are DTensors, each weight is cut as its gradient and its states are, and none is a partial sum."""
    every = [[leaf for leaf in one if isinstance(leaf, DTensor)] for one in lists if isinstance(one, list | tuple)]
    cuts = [[(one.device_mesh, one.placements) for one in tensors] for tensors in every if tensors]
    if not cuts or any(placement.is_partial() for _, placements in cuts[0] for placement in placements):
        return False
    return all(cut == cuts[0] for cut in cuts)
