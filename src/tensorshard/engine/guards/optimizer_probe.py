"""What an optimizer couples, tried on small tensors: nothing, the elements of a tensor, or several tensors.

A plan gives each rank parts of the parameters. An optimizer that updates each element by itself makes the same update
of parts as of the whole. Muon, LAMB, Adafactor and others look at a whole tensor: its norm, its rows, its singular
values, its blocks of 8-bit states. They need the whole (:mod:`tensorshard.engine.owners`). Prodigy, D-Adaptation, or a
norm of all gradients look at several tensors, which no rank has together.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tensorshard.comm.decisions import succeed_together
from tensorshard.comm.sharding import distribute
from tensorshard.comm.world import world as current_world
from tensorshard.data_parallel.sharded_model import ParameterSplit
from tensorshard.engine.combined_optimizer import class_of, members_of
from tensorshard.torch_private.fake_tensors import unset_fake_temporarily

Build = Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer]

# They update each element by itself.
_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        *("SGD", "ASGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop"),
    )
)
_STEPS = 12  # some change what they do after ten
_MANY_STEPS = 40  # for those that begin late
_SIZE = 4  # of each dimension, where a parameter has so many
# A tensor with more elements in each dimension than optimizers ask for before they look at more than one of them (128
# for factors, 4,096 in all for 8-bit states in blocks), whose halves are no whole number of blocks of 256.
_LARGE = (134, 128)
_LARGE_STEPS = 3
_COMPARED = 2  # parameters of each kind
_TOLERANCE = 1e-4  # of the update
_DISTINCT = 0.03  # the same for whole tensors: some compute those of one shape together, in 16 bits
_SCALES = (1.0, 1.0, 8.0, 0.25)  # of the gradients in turn: some clip large ones
_REMEDY = "take an optimizer that updates each element by itself, such as torch.optim.AdamW or SGD"


class UnsuitableOptimizerError(ValueError, RuntimeError):
    """An optimizer that a plan cannot step: a wrong argument, and what would be an error of its first step."""


def members_that_need_wholes(
    optimizer: torch.optim.Optimizer,
    build: Build,
    masters: Mapping[str, nn.Parameter],
    split: ParameterSplit,
    splits: Mapping[str, int],
    world: dist.ProcessGroup,
) -> frozenset[int]:
    """Which of the optimizers that `optimizer` is made of would not update parts as they update the whole.

    A collective of `world`.

    Args:
        optimizer: the one that was built of `masters`.
        build: makes one of the parameters that it is given.
        split: how tensor parallelism splits the masters.
        splits: the axes along which the plan gives ranks different parts of the model, with their degrees.
        world: all ranks.

    Returns:
        The places of those members. They are exact if they get whole tensors, one rank or another each.

    Raises:
        UnsuitableOptimizerError: one of them couples several parameters, or cannot be tried. Says what works instead.
    """
    unknown = {i for i, member in enumerate(members_of(optimizer)) if type(member) not in _ELEMENTWISE}
    if not unknown or not (splits or any(isinstance(master, DTensor) for master in masters.values())):
        return frozenset()

    def find() -> set[int]:
        with unset_fake_temporarily(), torch.random.fork_rng(devices=[]):
            return _Probe(optimizer, build, masters, split, splits, unknown).find()

    members = succeed_together(find, world, "parallelize")
    if world.size() > 1 and not current_world().is_simulated:
        everyone: list[Any] = [None] * world.size()
        dist.all_gather_object(everyone, members, group=world)
        members = set().union(*everyone)
    return frozenset(members)


@dataclass(frozen=True)
class _Kind:
    """Parameters that an optimizer treats in the same way."""

    member: int
    options: str
    ndim: int
    cut_dims: tuple[int, ...]
    placements: tuple[Any, ...] | None


class _Probe:
    """Tries one optimizer."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        build: Build,
        masters: Mapping[str, nn.Parameter],
        split: ParameterSplit,
        splits: Mapping[str, int],
        unknown: set[int],
    ) -> None:
        self._optimizer = optimizer
        self._build = build
        self._masters = masters
        self._unknown = unknown
        self._splits = splits
        plan = ", ".join(f"{axis}={degree}" for axis, degree in (splits or {"zero": 3}).items())
        self._refused = f"{plan} splits the model over ranks, and "
        self._whole_model = f"a plan that splits nothing ({', '.join(_whole_plan(splits or {'zero': 3}))})"
        dims = {n: [*split.cuts(n)] if split.num_shards(n) > 1 else [] for n in masters}
        sharded = {n: m for n, m in masters.items() if isinstance(m, DTensor)}
        self._by_data: dict[str, int | None] = {n: 0 if n in sharded else None for n in masters}
        # The dimensions that are cut, each over other ranks: by experts and by tensor parallelism, and by ZeRO 3.
        self._dims = [{n: dict(enumerate(dims[n])).get(i) for n in masters} for i in range(2)] + [self._by_data]
        self._shards = max((m.device_mesh.size(-1) for m in sharded.values()), default=0)
        self._member_of = _members_of_parameters(optimizer)
        self._group_of = _groups_of_parameters(optimizer)
        self._kinds = {i: class_of(member) for i, member in enumerate(members_of(optimizer))}
        # By the identity of the tensors, which are held so that none other has it, and the step.
        self._made: dict[tuple[int, int], tuple[Mapping[str, torch.Tensor], dict[str, torch.Tensor]]] = {}

    def find(self) -> set[int]:
        names = self._choose()
        if not names:
            return set()
        small = self._values(names, large=False)
        whole = self._whole_run(small, names)
        needs = self._disagreeing(whole, small, names, whole.steps)
        needs |= self._with_shared_states(whole, names)
        left = self._unknown - needs
        if left:
            needs |= self._needing_wholes_if_large(left)
        if self._shards and (left := self._unknown - needs):
            needs |= self._failing_on_shards(whole, small, left)
        if (needs and self._splits) or "pp" in self._splits:  # else this rank updates all parameters together
            self._check_apart(whole, small, names)
        return needs

    def _cut_dims(self, name: str) -> tuple[int, ...]:
        """The dimensions of a parameter that are cut."""
        return tuple(sorted({dim for dims in self._dims if (dim := dims[name]) is not None}))

    def _choose(self) -> list[str]:
        """Some parameters of each kind that an optimizer which is not known may treat in another way."""
        counts: dict[_Kind, int] = {}
        chosen = []
        for name, master in self._masters.items():
            member = self._member_of.get(master)
            if member not in self._unknown:
                continue
            placements = tuple(master.placements) if isinstance(master, DTensor) else None
            options = _options(self._optimizer.param_groups[self._group_of[master]])
            kind = _Kind(member, options, master.ndim, self._cut_dims(name), placements)
            counts[kind] = counts.get(kind, 0) + 1
            if counts[kind] <= _COMPARED:
                chosen.append(name)
        return chosen

    def _values(self, names: Iterable[str], *, large: bool) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        values = {}
        for name in names:
            master = self._masters[name]
            if large:
                ndim = master.ndim
                shape = [*_LARGE, *[1] * (ndim - 2)] if ndim > 1 else [_LARGE[0] * _LARGE[1]] * ndim
                for dim in self._cut_dims(name):
                    shape[dim] = max(2, shape[dim])
            else:
                shape = [min(size, _SIZE) for size in master.shape]
                for dim in self._cut_dims(name):
                    shape[dim] = _SIZE
                if self._by_data[name] is not None:
                    shape[0] = max(_SIZE, 2 * self._shards)
            value = torch.randn(shape, generator=generator) * self._slope(name, shape)
            values[name] = value.to(master.dtype)
        return values

    def _slope(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """Factors that make one half of a tensor unlike the other, along each dimension that is cut."""
        factors = torch.ones(())
        for dim in self._cut_dims(name):
            view = [-1 if d == dim else 1 for d in range(len(shape))]
            factors = factors * torch.linspace(1, 4, shape[dim]).view(view)
        return factors

    def _trial(self, values: Mapping[str, torch.Tensor], only: Sequence[str] | None = None) -> "_Trial":
        """An optimizer like the probed one.

        Args:
            values: of its small parameters.
            only: the names of those that it keeps.
        """
        parameters = {name: nn.Parameter(value.clone()) for name, value in values.items()}
        expected = {name: self._group_of[self._masters[name]] for name in parameters}
        try:
            optimizer = self._build(parameters)
            places = _groups_of_parameters(optimizer)
            fits = {name: places.get(parameter) for name, parameter in parameters.items()} == expected
        except Exception:
            fits = False
        if not fits:  # its factory needs all parameters, or looks at their sizes
            optimizer = self._build(self._masters)
            small = {self._masters[name]: parameter for name, parameter in parameters.items()}
            for group in optimizer.param_groups:
                pairs = [(i, small[p]) for i, p in enumerate(group["params"]) if p in small]
                group["params"] = [parameter for _, parameter in pairs]
                if "param_names" in group:
                    group["param_names"] = [group["param_names"][i] for i, _ in pairs]
            for member in members_of(optimizer):
                member.state.clear()
        kept = {id(parameters[name]) for name in (parameters if only is None else only)}
        for group in optimizer.param_groups:
            pairs = [(i, p) for i, p in enumerate(group["params"]) if id(p) in kept]
            group["params"] = [p for _, p in pairs]
            if "param_names" in group:
                group["param_names"] = [group["param_names"][i] for i, _ in pairs]
            if isinstance(group.get("lr"), float) and group["lr"] == 0:
                group["lr"] = 1e-2  # a schedule may begin there
        return _Trial(optimizer, parameters, values)

    def _gradients(self, values: Mapping[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
        """Of one step: a direction that stays, and noise."""
        key = id(values), step
        if key not in self._made:
            self._made[key] = values, {n: self._gradient(n, v, i, step) for i, (n, v) in enumerate(values.items())}
        return self._made[key][1]

    def _gradient(self, name: str, value: torch.Tensor, place: int, step: int) -> torch.Tensor:
        direction = torch.randn(value.shape, generator=torch.Generator().manual_seed(1000 + place))
        noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(step * 10_007 + place))
        gradient = (direction + noise / 2) * self._slope(name, value.shape) ** 2 * _SCALES[step % len(_SCALES)]
        return gradient.to(value.dtype)

    def _run(
        self,
        trial: "_Trial",
        values: Mapping[str, torch.Tensor],
        names: Iterable[str],
        steps: int,
        change: Callable[[str, torch.Tensor], torch.Tensor] = lambda _, tensor: tensor,
    ) -> "_Trial":
        for step in range(steps):
            gradients = self._gradients(values, step)
            trial.step({n: change(n, gradients[n]).clone() for n in gradients if n in names})
        return trial

    def _whole_run(self, small: dict[str, torch.Tensor], names: list[str]) -> "_Trial":
        state = torch.random.get_rng_state()
        try:
            for steps in (_STEPS, _MANY_STEPS):
                whole = self._run(self._trial(small), small, names, steps)
                if all(whole.moved(name) > 0 for name in names):
                    break
        except Exception as error:
            raise UnsuitableOptimizerError(
                f"{self._refused}{self._described(names)} could not be tried on small tensors: its step failed "
                f"({_first_line(error)}); {_REMEDY}; or {self._whole_model}"
            ) from error
        if not torch.equal(state, torch.random.get_rng_state()):
            raise UnsuitableOptimizerError(
                f"{self._refused}{self._described(names)} draws random numbers (as stochastic rounding does): its "
                f"update would depend on which rank draws them; {_REMEDY}; or {self._whole_model}"
            )
        for name in names:
            if not whole.moved(name) > 0:
                raise UnsuitableOptimizerError(
                    f"{self._refused}{self._described([name])} could not be tried: {_MANY_STEPS} steps did not change "
                    f"a small tensor in place of {name!r}; {_REMEDY}; or {self._whole_model}"
                )
        return whole

    def _disagreeing(
        self, whole: "_Trial", values: Mapping[str, torch.Tensor], names: list[str], steps: int
    ) -> set[int]:
        """The members that update halves of `values`, along any dimension that the plan cuts, in another way."""
        needs: set[int] = set()
        for dims in self._dims:
            if all(dims[name] is None for name in names):
                continue

            def cut(name: str, tensor: torch.Tensor, half: int, dims: Mapping[str, int | None] = dims) -> torch.Tensor:
                dim = dims[name]
                return tensor if dim is None else tensor.chunk(2, dim)[half]

            try:
                halves = []
                for half in range(2):
                    parts = {name: cut(name, value, half) for name, value in values.items()}
                    halves.append(self._run(self._trial(parts), values, names, steps, partial(cut, half=half)))
            except Exception:
                return set(self._unknown)
            for name in names:
                dim = dims[name]
                parts_of = [half.parameters[name].detach() for half in halves]
                joined = parts_of[0] if dim is None else torch.cat(parts_of, dim)
                if not whole.agrees(name, joined):
                    needs.add(self._member_of[self._masters[name]])
        return needs

    def _with_shared_states(self, whole: "_Trial", names: list[str]) -> set[int]:
        """The members whose states are of other shapes than the parameters. Elements share them, sooner or later."""
        needs = set()
        for name in names:
            parameter = whole.parameters[name]
            if not self._cut_dims(name):
                continue
            states = whole.optimizer.state.get(parameter, {}).values()
            if not all(_is_of_elements(value, parameter) for value in states):
                needs.add(self._member_of[self._masters[name]])
        return needs

    def _needing_wholes_if_large(self, members: set[int]) -> set[int]:
        names = [
            name for name in self._choose() if self._member_of[self._masters[name]] in members and self._cut_dims(name)
        ]
        if not names:
            return set()
        values = self._values(names, large=True)
        try:
            whole = self._run(self._trial(values), values, names, _LARGE_STEPS)
        except Exception:
            return set(members)
        return self._disagreeing(whole, values, names, _LARGE_STEPS) | self._with_shared_states(whole, names)

    def _failing_on_shards(self, whole: "_Trial", small: Mapping[str, torch.Tensor], members: set[int]) -> set[int]:
        """The members whose step DTensors cannot do, or do in another way."""
        if current_world().is_simulated:
            return set()
        names = [n for n in small if self._member_of[self._masters[n]] in members]

        def shard(name: str, tensor: torch.Tensor) -> torch.Tensor:
            master = self._masters[name]
            if self._by_data[name] is None:
                return tensor
            assert isinstance(master, DTensor)
            return distribute(tensor, master.device_mesh, master.placements)

        try:
            shards = self._trial({name: shard(name, value) for name, value in small.items()}, names)
            self._run(shards, small, names, whole.steps, shard)
            updated = {name: _full(shards.parameters[name]) for name in names}
        except Exception:
            return members
        return {self._member_of[self._masters[n]] for n in names if not whole.agrees(n, updated[n])}

    def _check_apart(self, whole: "_Trial", small: Mapping[str, torch.Tensor], names: list[str]) -> None:
        """Refuses what couples several parameters: each is updated where it is whole, apart from others.

        Raises:
            UnsuitableOptimizerError: an update depends on other parameters.
        """
        for some in (names[::2], names[1::2]):
            try:
                apart = self._run(self._trial(small, some), small, some, whole.steps)
            except Exception as error:
                raise UnsuitableOptimizerError(
                    f"{self._refused}{self._described(names)} cannot update some parameters without the others: its "
                    f"step then failed ({_first_line(error)}); {_REMEDY}; or {self._whole_model}"
                ) from error
            for name in some:
                if not whole.agrees(name, apart.parameters[name].detach(), _DISTINCT):
                    raise UnsuitableOptimizerError(
                        f"{self._refused}{self._described([name])} couples several parameters: the update of {name!r} "
                        f"depends on the gradients of others, as by a norm of all gradients, or one rate for all. If "
                        f"it is a norm, switch it off and set Plan(clip_grad_norm=...); else {_REMEDY}; or "
                        f"{self._whole_model}"
                    )

    def _described(self, names: Iterable[str]) -> str:
        places = dict.fromkeys(self._member_of[self._masters[name]] for name in names)
        return " with ".join(self._kinds[place] for place in places)


class _Trial:
    """An optimizer of small tensors.

    Attributes:
        steps: how many it has made.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: dict[str, nn.Parameter],
        start: Mapping[str, torch.Tensor],
    ) -> None:
        self.optimizer = optimizer
        self.parameters = parameters
        self.steps = 0
        self._start = start
        for member in members_of(optimizer):
            begin = getattr(member, "train", None)  # schedule-free ones are told when training begins
            if callable(begin):
                with suppress(Exception):  # of one that takes back what its eval() did, which has not been called
                    begin()

    def step(self, gradients: Mapping[str, torch.Tensor]) -> None:
        for name, gradient in gradients.items():
            self.parameters[name].grad = gradient
        self.optimizer.step()
        self.steps += 1

    def moved(self, name: str) -> float:
        """By how much the parameter has changed."""
        change = (self.parameters[name].detach() - self._start[name]).abs()
        return float(change.max()) if change.numel() else 1.0

    def agrees(self, name: str, value: torch.Tensor, tolerance: float = _TOLERANCE) -> bool:
        """Whether `value` is what the parameter has become."""
        expected = self.parameters[name].detach()
        if not expected.numel():
            return True
        return bool((value.cpu() - expected).abs().max() <= tolerance * self.moved(name))


def _members_of_parameters(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, int]:
    members = enumerate(members_of(optimizer))
    return {p: i for i, member in members for group in member.param_groups for p in group["params"]}


def _groups_of_parameters(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, int]:
    return {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}


def _options(group: Mapping[str, Any]) -> str:
    """What may make an optimizer treat the parameters of a group in another way."""
    numbers = ("params", "param_names", "lr", "initial_lr", "weight_decay")
    return repr([(key, value) for key, value in group.items() if key not in numbers])


def _is_of_elements(value: Any, parameter: torch.Tensor) -> bool:
    """Whether a state is a number, or has one for each element of the parameter."""
    if value is None or isinstance(value, bool | int | float | str):
        return True
    if type(value) not in (torch.Tensor, nn.Parameter):
        return False
    return value.numel() == 1 or value.shape == parameter.shape


def _whole_plan(splits: Mapping[str, int]) -> list[str]:
    return [f"{axis}={0 if axis == 'zero' else 1}" for axis in splits]


def _full(parameter: nn.Parameter) -> torch.Tensor:
    value = parameter.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
