"""An Engine's optimizer: how it is made, which parameters it trains, and what each of its updates does under a plan."""

import inspect
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from operator import is_
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tensorshard.comm.sharding import to_local
from tensorshard.common.words import kind_of
from tensorshard.data_parallel.sharded_model import ShardedModel
from tensorshard.engine.combined_optimizer import (
    ByParameter,
    Choice,
    CombinedOptimizer,
    call_members,
    members_of,
    methods_beside_step,
)
from tensorshard.engine.guards.foreign_optimizers import warn_of_schedulers
from tensorshard.engine.guards.optimizer_probe import UnsuitableOptimizerError, members_that_need_wholes
from tensorshard.engine.owners import Owners
from tensorshard.host.process_settings import HostHeap
from tensorshard.model.trains_itself import OwnRule
from tensorshard.passes.precision import master_dtype
from tensorshard.plan.mesh import Mesh
from tensorshard.plan.plan import Plan
from tensorshard.torch_private.dispatch import TorchDispatchMode, innermost_dispatch_mode
from tensorshard.torch_private.dtensor import layouts_of, shard_of, shards_of
from tensorshard.torch_private.operators import FUSED_UPDATES

OptimizerFactory = (
    Callable[..., torch.optim.Optimizer | Sequence[torch.optim.Optimizer]]
    | Mapping[Choice, Callable[..., torch.optim.Optimizer]]
)
"""What makes the optimizer: parameters -> an optimizer, or a list of several; or a dict of such callables by names."""


# Optimizers that no plan can step.
_CANNOT = {
    torch.optim.LBFGS: "calls a closure again and again in one step, while a step here has one forward and backward",
    torch.optim.SparseAdam: "takes sparse gradients alone, while gradients here are dense",
}


def build_optimizer(
    factory: OptimizerFactory,
    masters: Mapping[str, nn.Parameter],
    rules: Sequence[OwnRule] = (),
    elsewhere: Mapping[str, nn.Parameter] | None = None,
    shown: Mapping[torch.Tensor, str] | None = None,
) -> torch.optim.Optimizer:
    """The optimizer that `factory` makes of `masters`, with its fastest kernels if the user did not choose.

    Args:
        rules: of parameters that are trained in groups of their own; `factory` gets the others.
        elsewhere: stands for all that the stages of a pipeline train, in the model's order. Several optimizers then
            have the same parameter groups on all stages.
        shown: the names of the parameters that the model shows, which groups of the user's script may hold in place of
            `masters`.

    Raises:
        TypeError: `factory` made something else.
        ValueError: the optimizer holds parameters that it was not given, or cannot train by the `rules`.
    """
    by_rule = {name for rule in rules for name in rule.parameters}
    everywhere = {name: p for name, p in (elsewhere or {}).items() if name not in by_rule}
    own = {name: master for name, master in masters.items() if name not in by_rule}
    built = _build(factory, own, everywhere, shown or {})
    for rule in rules:
        rule.add_group(built, masters)
    return built


Build = Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer]


def make_optimizer(
    factory: OptimizerFactory, rules: Sequence[OwnRule], sharded: ShardedModel, plan: Plan, mesh: Mesh
) -> tuple[torch.optim.Optimizer, Owners | None, Build]:
    """The optimizer of a laid-out model, and the owners of whole parameters where it needs them. A collective.

    Returns:
        The optimizer; the owners, or None; and what makes an optimizer like it of other masters.

    Raises:
        TypeError, ValueError: as for :func:`build_optimizer`.
        UnsuitableOptimizerError: it cannot be exact under this plan; says what works instead.
    """
    trained = sharded.trained_masters()
    elsewhere = _of_all_stages(sharded, trained) if plan.pp > 1 else None
    shown: dict[torch.Tensor, str] = {p: name for name, p in sharded.shown_parameters().items()}
    build = partial(build_optimizer, factory, rules=rules, elsewhere=elsewhere, shown=shown)
    optimizer = build(trained)
    splits = {"zero": int(plan.zero)} if plan.zero and mesh.shard_size > 1 else {}
    degrees = {"tp": mesh.degrees["tp"], "pp": mesh.degrees["pp"], "ep": plan.ep}
    splits.update({axis: degree for axis, degree in degrees.items() if degree > 1})
    places = members_that_need_wholes(optimizer, build, trained, sharded.split, splits, mesh.world_group)
    if not places:
        return optimizer, None, build
    if plan.ep > 1:
        raise ValueError(
            f"ep={plan.ep} was given with {type(optimizer).__name__}, which looks at whole tensors, and no "
            f"rank has all experts; use one that works element by element, such as AdamW, or set ep=1"
        )
    moved = plan.offloaded
    if moved is not None and (moved.optimizer or moved.gradients or moved.parameters):
        kinds = " with ".join(type(members_of(optimizer)[place]).__name__ for place in sorted(places))
        raise UnsuitableOptimizerError(
            f"offload was given with {kinds}, which needs whole tensors: each is then updated by one of the ranks that "
            f"have parts of it, in its own memory; set offload=None (or Offload(activations=...) alone), or take "
            f"an optimizer that updates each element by itself, such as torch.optim.AdamW"
        )
    owners = Owners(sharded, mesh, data_sharded=bool(plan.zero))

    def build_with_owners(masters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        names = {master: name for name, master in masters.items()}
        members = members_of(build(masters))
        groups = [group for place in places for group in members[place].param_groups]
        owners.add(sorted(names[p] for group in groups for p in group["params"] if p in names))
        del members, groups
        owners.gather_weights()  # some optimizers copy them when they are built
        built = build(owners.given(masters))
        owners.release()
        kept = {*masters.values(), *owners.parameters.values()}
        keep_parameters([members_of(built)[place] for place in places], kept)
        return built

    del optimizer
    optimizer = build_with_owners(trained)
    owners.attach(optimizer, methods_beside_step(optimizer))
    return optimizer, owners, build_with_owners


def _of_all_stages(sharded: ShardedModel, trained: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Parameters without memory, in place of all that the stages of a pipeline train, in the model's order."""
    some = next(iter(trained.values()), torch.empty(0))
    number = torch.zeros((), dtype=some.dtype, device=to_local(some).device)
    shapes = {name: shape for name, shape in sharded.full_shapes().items() if sharded.is_trained(name)}
    return {name: nn.Parameter(number.expand(shape)) for name, shape in shapes.items()}


def check_trains(factory: OptimizerFactory, model: nn.Module, rules: Sequence[OwnRule]) -> None:
    """Refuses an optimizer that cannot train parameters of `model`. Nothing is allocated.

    Raises:
        TypeError, ValueError: `factory` makes another optimizer than a rule needs, or is a dict that does not fit.
    """
    if not rules and not isinstance(factory, Mapping):
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
        mesh: told of each step.
        warns: whether this rank warns of schedulers.
    """

    def __init__(self, heap: HostHeap | None, mesh: Mesh, *, warns: bool) -> None:
        self.taken = 0
        self._mesh = mesh
        self._heap = heap
        self._warns = warns

    def count(self) -> None:
        """Called after each step, skipped ones of fp16 included."""
        self.taken += 1
        self._mesh.end_start()
        if self._heap is not None:
            self._heap.after_call()
        if self._warns:
            self._warns = False
            warn_of_schedulers()

    def state_dict(self) -> int:
        return self.taken

    def load_state_dict(self, taken: int) -> None:
        self.taken = taken


def _build(
    factory: OptimizerFactory,
    masters: Mapping[str, nn.Parameter],
    everywhere: Mapping[str, nn.Parameter],
    shown: Mapping[torch.Tensor, str],
) -> torch.optim.Optimizer:
    # A pipeline's stage may train nothing; it has an optimizer all the same, for schedulers.
    own = masters or {"none": nn.Parameter(torch.empty(0))}
    members = _made_of_stage(factory, own, {**everywhere, **masters}) if everywhere else _made(factory, own)
    for member in members:
        for group in member.param_groups:
            group["params"] = [own.get(shown.get(p, ""), p) for p in group["params"]]
        _check_member(member, own)
        _choose_kernels(member)
    combined = members[0] if len(members) == 1 else CombinedOptimizer(members)
    call_members(combined)
    return combined


def _made_of_stage(
    factory: OptimizerFactory, own: Mapping[str, nn.Parameter], everything: Mapping[str, nn.Parameter]
) -> list[torch.optim.Optimizer]:
    """What `factory` makes of a stage's `own` parameters. If it is several optimizers, of which some may have none of
    them, it is made of `everything`, and the others are taken out."""
    try:
        members = _made(factory, own)
    except ValueError:
        members = []
    if len(members) != 1 or isinstance(factory, Mapping):
        members = _made(factory, everything)
        keep_parameters(members, set(own.values()))
    return members


def keep_parameters(members: Iterable[torch.optim.Optimizer], kept: Container[torch.Tensor]) -> None:
    """Takes all other parameters than `kept` out of the groups and states of `members`."""
    for member in members:
        for group in member.param_groups:
            places = [place for place, parameter in enumerate(group["params"]) if parameter in kept]
            for key in ("params", "param_names"):
                if key in group:
                    group[key] = [group[key][place] for place in places]
        for parameter in [p for p in member.state if isinstance(p, torch.Tensor) and p not in kept]:
            del member.state[parameter]


def _made(factory: OptimizerFactory, masters: Mapping[str, nn.Parameter]) -> list[torch.optim.Optimizer]:
    """The optimizers that `factory` makes of `masters`."""
    if isinstance(factory, Mapping):
        by_parameter = ByParameter(factory)
        chosen = by_parameter.choose(list(masters.items()))
        return [
            member
            for one, members in zip(by_parameter.factories, chosen, strict=True)
            for member in _made(one, dict(members))
        ]
    given: Any = list(masters.items()) if wants_names(factory) else list(masters.values())
    try:
        built: Any = factory(given)
    except (TypeError, ValueError) as error:
        raise type(error)(f"optimizer(parameters) failed: {error}{_names_hint(factory, error)}") from error
    members = list(built) if isinstance(built, list | tuple) else [built]
    for member in members:
        if not isinstance(member, torch.optim.Optimizer):
            place = f" in {kind_of(built)}" if isinstance(built, list | tuple) else ""
            raise TypeError(
                f"optimizer(parameters) returned {kind_of(member)}{place}; it must return a torch Optimizer, "
                f"or a list of them"
            )
    if not members:
        raise TypeError(
            f"optimizer(parameters) returned an empty {type(built).__name__}; it must return a torch Optimizer, or a "
            f"list of them"
        )
    return members


def _names_hint(factory: Any, error: Exception) -> str:
    """A remedy where `factory` has taken parameters for pairs of name and parameter."""
    if wants_names(factory) or not re.search("to unpack|cannot unpack|iteration over a 0-d", str(error)):
        return ""
    return "; it was given parameters. If it takes pairs (name, parameter), call its argument named_parameters"


def _check_member(built: torch.optim.Optimizer, masters: Mapping[str, nn.Parameter]) -> None:
    if isinstance(built, tuple(_CANNOT)):
        what = next(reason for kind, reason in _CANNOT.items() if isinstance(built, kind))
        raise ValueError(f"the optimizer is {kind_of(built)}, which {what}; take one such as torch.optim.AdamW")
    known = set(masters.values())
    for group in built.param_groups:
        for parameter in group["params"]:
            if parameter not in known:
                raise ValueError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that it was not given; build "
                    f"it from the parameters that the callable receives"
                )


def _choose_kernels(built: torch.optim.Optimizer) -> None:
    for group in built.param_groups:
        # The for-loop that torch chooses on CPUs is 7 times slower; the fused kernel computes the same. Other
        # optimizers run as they were built: their fused kernels are the user's choice.
        is_open = group.get("fused") is None and group.get("foreach") is None and not group.get("differentiable")
        if is_open and isinstance(built, torch.optim.Adam | torch.optim.AdamW):
            group["fused"] = True


def wants_names(factory: Any) -> bool:
    try:
        return "named_parameters" in inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return False


class TrainedParameters:
    """Keeps an optimizer's parameter groups in step with what user code does to ``requires_grad``.

    A parameter that is frozen later stays in its group: it has no gradient, and optimizers skip it. One that is trained
    only later joins the group that the optimizer's factory puts it in.

    Args:
        build: makes an optimizer like this one of other masters.
        owners: of the parameters that are updated whole; None if none are.
        reserved: whether the optimizer's states are offloaded, for which there is room since the start alone.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        build: Build,
        sharded: ShardedModel,
        owners: Owners | None,
        *,
        reserved: bool,
    ) -> None:
        self._optimizer = optimizer
        self._build = build
        self._sharded = sharded
        self._owners = owners
        self._reserved = reserved
        self._known = set(sharded.trained_masters())
        self._without_masters = {
            name: layout.dtype
            for name, layout in sharded.full_layouts().items()
            if name not in self._known and layout.dtype != master_dtype(layout.dtype)
        }
        self._groups = len(optimizer.param_groups)
        optimizer.add_param_group = MethodType(  # type: ignore[method-assign]
            self._adding(optimizer.add_param_group), optimizer
        )

    def check(self) -> None:
        """Called before gradients are made.

        Raises:
            RuntimeError: a parameter that was frozen is trained now, and has no fp32 master weight; or the optimizer's
                states are offloaded.
        """
        if self._without_masters:
            for name in sorted(self._without_masters.keys() & self._sharded.trained_masters().keys()):
                self._refuse_without_master(name)
        if self._reserved:
            self._refuse_offloaded(self._sharded.trained_masters().keys() - self._known)

    def _refuse_without_master(self, name: str) -> None:
        raise RuntimeError(
            f"parameter {name!r} was frozen when parallelize laid it out, so it is held in "
            f"{str(self._without_masters[name]).removeprefix('torch.')} without an fp32 master weight, and is trained "
            f"now: leave requires_grad=True at parallelize for all that will be trained, and freeze after it"
        )

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
        whole = frozenset() if self._owners is None else self._owners.names
        new = {name: master for name, master in new.items() if master not in held and name not in whole}
        if not new:
            return
        everything = {name: m for name, m in self._sharded.masters().items() if name in self._known}
        model = self._build(everything)
        added = {*new.values(), *(self._owners.parameters.values() if self._owners is not None else ())} - held
        for index, group in enumerate(model.param_groups):
            names = group.get("param_names")
            for place, parameter in enumerate(group["params"]):
                if parameter not in added:
                    continue
                if index >= self._groups:  # the factory makes more groups than before
                    if isinstance(self._optimizer, CombinedOptimizer):
                        raise RuntimeError(
                            "a parameter that was frozen is trained now, and optimizer(parameters) puts it into a "
                            "parameter group that was not there, of one of several optimizers: leave "
                            "requires_grad=True at parallelize for all that will be trained, and freeze after it"
                        )
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
                    if full_name in self._without_masters:
                        self._refuse_without_master(full_name)
                    if self._reserved:
                        self._refuse_offloaded([full_name])
                    self._known.add(full_name)
                    parameter = masters[full_name]
                    if self._owners is not None and not isinstance(self._optimizer, CombinedOptimizer):
                        self._owners.add([full_name])
                        if full_name not in self._owners.parameters:
                            continue
                        parameter = self._owners.parameters[full_name]
                replaced.append(parameter if name is None else (name, parameter))
            add({**param_group, "params": replaced})

        return add_param_group


def complete_update(
    optimizer: torch.optim.Optimizer,
    sharded: ShardedModel,
    *,
    follow: Sequence[Callable[[], None]],
    before: Sequence[Callable[[], object]],
    after: Sequence[Callable[[], object]],
) -> None:
    """Makes each update by `optimizer` do what the plan needs, whoever asks for it.

    Args:
        follow: what follows the user's code, such as adding the parameters that are trained by now.
        before: called before the update, in this order.
        after: called after it, in this order.
    """
    for work in before:
        optimizer.register_step_pre_hook(_outside_fused_updates(work))
    for work in after:
        optimizer.register_step_post_hook(_outside_fused_updates(work))
    for name in ("register_step_pre_hook", "register_step_post_hook"):  # from now on, hooks are the user's
        setattr(optimizer, name, partial(_register_users_hook, getattr(optimizer, name), sharded))
    torch_step: Callable[[], Any] = optimizer.step  # type: ignore[assignment]
    fused = _FusedUpdates()

    def step(_: torch.optim.Optimizer) -> Any:
        for work in follow:
            work()
        with sharded.computing_on_parts(), fused if _updates_shards_fused(optimizer) else nullcontext():
            result = torch_step()
        sharded.adopt_writes()  # of hooks of the optimizer that are the user's
        return result

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]


def _register_users_hook(register: Callable[..., Any], sharded: ShardedModel, hook: Callable[..., Any]) -> Any:
    def called(*args: Any, **kwargs: Any) -> Any:
        with sharded.calling_user(in_hook=True):
            return hook(*args, **kwargs)

    return register(called)


def _updates_shards_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` has DTensors whose update is fused."""
    groups = optimizer.param_groups
    return any(group.get("fused") and any(isinstance(p, DTensor) for p in group["params"]) for group in groups)


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

    def __init__(self) -> None:
        super().__init__()
        self._checked: list[object] = []  # the layouts of an update whose placements are equal

    def _are_placed_equally(self, lists: Iterable[Any]) -> bool:
        lists = [one for one in lists if isinstance(one, list | tuple)]
        layouts = layouts_of(chain.from_iterable(lists))
        if len(layouts) != len(self._checked) or not all(map(is_, layouts, self._checked)):
            self._checked = layouts if _have_equal_placements(lists) else []
        return bool(self._checked)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FUSED_UPDATES and self._are_placed_equally(args):
            args = [_shards(one) for one in args]
            kwargs = {name: _shards(one) for name, one in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))


def _shards(argument: Any) -> Any:
    """An argument of a fused update with shards in place of DTensors."""
    return shards_of(argument) if isinstance(argument, list | tuple) else shard_of(argument)


def _have_equal_placements(lists: Iterable[Sequence[Any]]) -> bool:
    """Whether there are DTensors, each weight is cut as its gradient and its states are, and none is a partial sum."""
    every = [[leaf for leaf in one if isinstance(leaf, DTensor)] for one in lists]
    cuts = [[(one.device_mesh, one.placements) for one in tensors] for tensors in every if tensors]
    if not cuts or any(placement.is_partial() for _, placements in cuts[0] for placement in placements):
        return False
    return all(cut == cuts[0] for cut in cuts)
