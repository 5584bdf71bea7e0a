"""Whether an optimizer makes the same update of a parameter's parts as of the whole, tried on small tensors.

Muon, LAMB, Adafactor and others look at a whole tensor: its norm, its rows, its singular values. Of this rank's part
they would compute something else. Under ZeRO a part is a DTensor, whose operations compute with the whole tensor, if
they exist. Under tensor parallelism it is a plain tensor.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tensorshard.comm.decisions import succeed_together
from tensorshard.comm.sharding import distribute
from tensorshard.comm.world import world as current_world
from tensorshard.data_parallel.sharded_model import ParameterSplit
from tensorshard.torch_private.fake_tensors import unset_fake_temporarily

Build = Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer]

# They update each element by itself.
_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        *("SGD", "ASGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop"),
    )
)
_STEPS = 3
_SIZE = 4  # of each dimension, where a parameter has so many
_COMPARED = 2  # parameters of each kind
_TOLERANCE = 0.05  # of the update; some compute in 16 bits, and what couples elements is off by far more
_REMEDY = "take an optimizer that updates each element by itself, such as torch.optim.AdamW or SGD"


class UnsuitableOptimizerError(ValueError, RuntimeError):
    """An optimizer that a plan cannot step: a wrong argument, and what would be an error of its first step."""


@dataclass(frozen=True)
class _Kind:
    """Parameters that an optimizer treats in the same way."""

    group: int
    ndim: int
    dim: int | None
    placements: tuple[Any, ...] | None


def check_optimizer(
    optimizer: torch.optim.Optimizer,
    build: Build,
    masters: Mapping[str, nn.Parameter],
    split: ParameterSplit,
    zero: int,
    world: dist.ProcessGroup,
) -> None:
    """Refuses an optimizer that would not update parts as it updates the whole. A collective of `world`.

    Args:
        optimizer: the one that was built of `masters`.
        build: makes one of the parameters that it is given.
        split: how tensor parallelism splits the masters.
        zero: the level, for messages.

    Raises:
        UnsuitableOptimizerError: it is no such optimizer; says what works instead.
    """
    if type(optimizer) in _ELEMENTWISE:
        return
    is_fake = current_world().is_simulated
    trained = {name: master for name, master in masters.items() if master.requires_grad}
    sharded = [name for name, master in trained.items() if isinstance(master, DTensor)]

    def check() -> None:
        with unset_fake_temporarily():
            if any(split.num_shards(name) > 1 for name in trained):
                _check_parts(build, trained, split)
            if sharded and not is_fake:
                _check_shards(build, trained, sharded, zero)

    succeed_together(check, world, "parallelize")


def _check_parts(build: Build, trained: Mapping[str, nn.Parameter], split: ParameterSplit) -> None:
    whole = _Trial(build, trained, {name: split.layout(name).dim for name in trained})
    kind = type(whole.optimizer).__name__
    if type(whole.optimizer) in _ELEMENTWISE:
        return
    refused = f"tp={split.size} gives each rank a part of a parameter, and {kind}"
    advice = f"{_REMEDY}; or tp=1, since zero=1 to 3 shard as DTensors, whose operations see the whole"
    names = whole.choose([name for name in trained if split.num_shards(name) > 1])
    try:
        whole.run(names)
        halves = [whole.part(build, half) for half in range(2)]
        for half in halves:
            half.run(names)
    except Exception as error:
        raise UnsuitableOptimizerError(
            f"{refused} could not be tried on small parts of tensors: its step failed ({_first_line(error)}); {advice}"
        ) from error
    for name in names:
        dim = split.layout(name).dim
        joined = torch.cat([half.parameters[name].detach() for half in halves], dim)
        if not whole.agrees(name, joined):
            raise UnsuitableOptimizerError(
                f"{refused} couples a tensor's elements (or draws random numbers): the update of {name!r}, "
                f"{list(trained[name].shape)} on this rank, would depend on how it is split; {advice}"
            )


def _check_shards(build: Build, trained: Mapping[str, nn.Parameter], sharded: list[str], zero: int) -> None:
    whole = _Trial(build, trained, {name: 0 if name in sharded else None for name in trained})
    kind = type(whole.optimizer).__name__
    if type(whole.optimizer) in _ELEMENTWISE:
        return
    names = whole.choose(sharded)
    try:
        whole.run(names)
    except Exception:  # it needs something that is not there yet, such as a closure of a certain kind
        return
    refused = f"zero={zero} gives {kind} shards of the parameters, DTensors, and "
    advice = f"{_REMEDY}; or zero=0, where it gets whole tensors"
    shards = whole.like(build, trained)
    try:
        shards.run(names)
        updated = {name: _full(shards.parameters[name]) for name in names}
    except Exception as error:
        raise UnsuitableOptimizerError(f"{refused}its step fails with them ({_first_line(error)}); {advice}") from error
    for name in names:
        if not whole.agrees(name, updated[name]):
            raise UnsuitableOptimizerError(
                f"{refused}its update of {name!r} would depend on how it is sharded, as it couples a tensor's elements "
                f"in a way that DTensors do not show, or draws random numbers; {advice}"
            )


class _Trial:
    """An optimizer of small tensors, and its first steps.

    Args:
        dims: the dimension along which each parameter is cut; None for one that is not.
    """

    def __init__(self, build: Build, trained: Mapping[str, nn.Parameter], dims: Mapping[str, int | None]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.dims = dims
        self._trained = trained
        self.start: dict[str, torch.Tensor] = {}
        self._shapes: dict[str, list[int]] = {}
        self._change: Callable[[str, torch.Tensor], torch.Tensor] = lambda _, tensor: tensor
        for name, master in trained.items():
            shape = [_SIZE if d == dims[name] else min(size, _SIZE) for d, size in enumerate(master.shape)]
            if dims[name] is not None and isinstance(master, DTensor):
                shape[0] = 2 * master.device_mesh.size(-1)
            self._shapes[name] = shape
            self.start[name] = (torch.randn(shape, generator=generator) * _slope(shape, dims[name])).to(master.dtype)
        self._build(build)

    def _build(self, build: Build) -> None:
        self.parameters = {name: nn.Parameter(value.clone()) for name, value in self.start.items()}
        self.optimizer = build(dict(self.parameters))

    def choose(self, names: Iterable[str]) -> list[str]:
        """Some of `names`, of each kind that the optimizer may treat in another way."""
        group_of = {id(p): i for i, group in enumerate(self.optimizer.param_groups) for p in group["params"]}
        counts: dict[_Kind, int] = {}
        chosen = []
        for name in names:
            master, parameter = self._trained[name], self.parameters[name]
            placements = tuple(master.placements) if isinstance(master, DTensor) else None
            kind = _Kind(group_of.get(id(parameter), -1), parameter.ndim, self.dims[name], placements)
            counts[kind] = counts.get(kind, 0) + 1
            if counts[kind] <= _COMPARED and parameter.ndim:
                chosen.append(name)
        return chosen

    def run(self, names: list[str]) -> None:
        """Takes some steps with gradients of `names`; of all parameters, if its step does not know how to skip some."""
        try:
            self._run(names)
        except (AttributeError, TypeError):
            self._run(list(self.parameters))

    def _run(self, names: list[str]) -> None:
        generator = torch.Generator().manual_seed(1)
        for _ in range(_STEPS):
            for name in names:
                shape = self._shapes[name]
                gradient = torch.randn(shape, generator=generator) * _slope(shape, self.dims[name]) ** 2
                self.parameters[name].grad = self._change(name, gradient.to(self._trained[name].dtype))
            self.optimizer.step()

    def part(self, build: Build, half: int) -> "_Trial":
        """The same with one half of each parameter that is cut."""
        return self._derived(build, lambda name, tensor: _half(tensor, self.dims[name], half))

    def like(self, build: Build, masters: Mapping[str, nn.Parameter]) -> "_Trial":
        """The same with tensors that are sharded as `masters` are."""

        def shard(name: str, tensor: torch.Tensor) -> torch.Tensor:
            master = masters[name]
            if not isinstance(master, DTensor):
                return tensor
            return distribute(tensor, master.device_mesh, master.placements)

        return self._derived(build, shard)

    def _derived(self, build: Build, change: Callable[[str, torch.Tensor], torch.Tensor]) -> "_Trial":
        derived = object.__new__(_Trial)
        derived.dims, derived._trained, derived._shapes = self.dims, self._trained, self._shapes
        derived.start = {name: change(name, tensor) for name, tensor in self.start.items()}
        derived._change = change
        derived._build(build)
        return derived

    def agrees(self, name: str, value: torch.Tensor) -> bool:
        """Whether `value` is what the parameter has become."""
        expected = self.parameters[name].detach()
        moved = (expected - self.start[name]).abs().max()
        return bool((value.cpu() - expected).abs().max() <= _TOLERANCE * moved)


def _slope(shape: list[int], dim: int | None) -> torch.Tensor:
    """Factors that make one half of a tensor unlike the other."""
    if dim is None:
        return torch.ones(())
    view = [-1 if d == dim else 1 for d in range(len(shape))]
    return torch.linspace(1, 4, shape[dim]).view(view)


def _half(tensor: torch.Tensor, dim: int | None, half: int) -> torch.Tensor:
    return tensor.clone() if dim is None else tensor.chunk(2, dim)[half].clone()


def _full(parameter: nn.Parameter) -> torch.Tensor:
    value = parameter.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
