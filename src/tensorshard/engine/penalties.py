"""Penalties on the weights, which every step adds to its loss under any plan."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils.parametrize import ParametrizationList

from tensorshard.comm.collectives import all_reduce_
from tensorshard.comm.decisions import succeed_together
from tensorshard.common.words import kind_of
from tensorshard.data_parallel.sharded_model import ShardedModel
from tensorshard.passes.precision import master_dtype
from tensorshard.pipeline.run.stage_skeleton import AbsentTensor
from tensorshard.plan.mesh import Mesh
from tensorshard.torch_private.modules import every_module, own_parameters, set_parameter

Penalty = Callable[[Any], Any]


class PenaltyHandle:
    """Removes a penalty."""

    def __init__(self, penalties: dict[int, Penalty], key: int) -> None:
        self._penalties, self._key = penalties, key

    def remove(self) -> None:
        """The penalty is no longer added. A second call does nothing."""
        self._penalties.pop(self._key, None)


class Penalties:
    """Functions of the weights that are added to the loss of every step.

    Each function sees whole weights. So its gradient is the whole one on every rank, which takes its part of it.

    Args:
        device: where the sum over a pipeline's stages travels.
    """

    def __init__(self, sharded: ShardedModel, mesh: Mesh, device: torch.device) -> None:
        self._sharded = sharded
        self._mesh = mesh
        self._device = device
        self._functions: dict[int, Penalty] = {}
        self._added = 0

    def __bool__(self) -> bool:
        return bool(self._functions)

    def register(self, function: Penalty) -> PenaltyHandle:
        """See :meth:`tensorshard.Engine.add_penalty`."""
        if not callable(function):
            raise TypeError(
                f"function is {kind_of(function)}; it must be a function, which is called as function(model) "
                f"and returns a scalar tensor"
            )
        self._added += 1
        self._functions[self._added] = function
        return PenaltyHandle(self._functions, self._added)

    def add(self, loss: torch.Tensor, factor: torch.Tensor | float | None) -> torch.Tensor:
        """Adds the gradients of all penalties to those of a step, and returns `loss` with the penalties.

        A collective of the mesh.

        Args:
            factor: the gradients of the step still have to be multiplied by it; None for no factor.
        """
        if not self._functions:
            return loss
        self._sharded.finish_gather()
        places = _Places(self._sharded)
        value, failure = torch.zeros((), dtype=torch.float64, device=self._device), None
        gradients: dict[str, torch.Tensor] = {}
        try:
            total = self._total(places)
            if isinstance(total, torch.Tensor):
                value = total.detach().to(self._device, torch.float64)
                gradients = places.gradients(total)
        except Exception as error:
            if self._mesh.degrees["pp"] == 1:
                raise
            failure = error
        value, depends = self._over_stages(value, bool(gradients), failure)
        if not depends and places.trains:
            raise ValueError(
                "no penalty of engine.add_penalty depends on any trained parameter: compute it from the parameters of "
                "the model that the function is given, without .detach(), .data, .item() or torch.no_grad()"
            )
        with torch.no_grad():
            parts = {name: self._sharded.local_value(name, gradient) for name, gradient in gradients.items()}
            if factor is not None:
                parts = {name: part / _on(factor, part) for name, part in parts.items()}
            self._sharded.add_gradients(parts)
        return loss + value.to(loss.dtype)

    def _total(self, places: "_Places") -> Any:
        total: Any = 0
        with torch.enable_grad(), self._sharded.computing_penalty(), places.whole(), _weights_alone(places.modules):
            for function in list(self._functions.values()):
                total = total + _checked(function(self._sharded.model))
        return total

    def _over_stages(self, value: torch.Tensor, depends: bool, failure: Exception | None) -> tuple[torch.Tensor, bool]:
        """The sum of the stages' penalties, and whether any has a gradient. Raises what failed on any of them."""
        if self._mesh.degrees["pp"] == 1:
            return value, depends
        group = self._mesh.group("pp")
        flags = value.new_tensor([failure is not None, depends])
        numbers = torch.cat([flags, value.reshape(1)])
        all_reduce_(numbers, group, what="the penalties of engine.add_penalty")
        failed, with_gradient, total = numbers.unbind()
        if failed.item():

            def fail() -> None:
                if failure is not None:
                    raise failure

            succeed_together(fail, group, "a penalty of engine.add_penalty")
        return total, bool(with_gradient.item())


class _Places:
    """Where the weights are registered that this rank counts.

    Attributes:
        modules: all modules that a penalty may see.
        trains: whether any of the model's weights is trained.
    """

    def __init__(self, sharded: ShardedModel) -> None:
        self._sharded = sharded
        named = every_module(sharded.model)
        self.modules = list(named.values())
        self.trains = any(sharded.is_trained(name) for name in sharded.full_shapes())
        self._leaves: dict[str, nn.Parameter] = {}
        self._before: list[tuple[nn.Module, str, nn.Parameter, str]] = []
        aliases, masters = sharded.aliases(), sharded.masters()
        for path, module in named.items():
            for key, parameter in own_parameters(module).items():
                name = f"{path}.{key}" if path else key
                name = aliases.get(name, name)
                if name in masters:
                    self._before.append((module, key, parameter, name))

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Within this, modules have whole weights in the masters' precision; not those that another rank counts."""
        for _, _, parameter, name in self._before:
            if name not in self._leaves:
                self._leaves[name] = nn.Parameter(self._value(name, parameter), parameter.requires_grad)
        counted = {name for name in self._leaves if self._sharded.counts(name)}
        try:
            for module, key, _, name in self._before:
                if name in counted:
                    set_parameter(module, key, self._leaves[name])
                else:
                    set_parameter(module, key, None)  # no list has it, and its place in the order stays
                    vars(module)[key] = _counted_elsewhere(name, self._leaves[name])
            yield
        finally:
            for module, key, parameter, _ in self._before:
                vars(module).pop(key, None)
                set_parameter(module, key, parameter)

    def _value(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        shape = self._sharded.full_shape(name)
        if parameter.shape == shape and parameter.dtype == master_dtype(parameter.dtype):
            return parameter.detach()
        return self._sharded.full_value(name).detach()

    def gradients(self, total: torch.Tensor) -> dict[str, torch.Tensor]:
        """The whole gradients of `total`, by first names of the weights that it depends on."""
        trained = {name: leaf for name, leaf in self._leaves.items() if leaf.requires_grad}
        if not total.requires_grad or not trained:
            return {}
        gradients = torch.autograd.grad(total, list(trained.values()), allow_unused=True)
        return {name: g for name, g in zip(trained, gradients, strict=True) if g is not None}


def _counted_elsewhere(name: str, leaf: torch.Tensor) -> AbsentTensor:
    sentence = (
        f"engine.model.{name} is on several stages of the pipeline and counts on the first of them, which this rank "
        f"does not have: let the function of engine.add_penalty go over model.named_parameters(), which has what counts"
    )
    return AbsentTensor.make(leaf.detach(), lambda: False, lambda: sentence)


@contextmanager
def _weights_alone(modules: list[nn.Module]) -> Iterator[None]:
    """Within this, no module can be called, except for those that compute a parametrized weight."""
    parametrizations = {
        inner for module in modules if isinstance(module, ParametrizationList) for inner in module.modules()
    }

    def check(module: nn.Module, _: Any) -> None:
        if module not in parametrizations:
            raise RuntimeError(
                f"a penalty of engine.add_penalty called {kind_of(module)}; it is a function of the weights "
                f"alone, so it cannot run modules: terms of activations belong into loss_fn"
            )

    handle = register_module_forward_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()


def _checked(term: Any) -> Any:
    if isinstance(term, torch.Tensor) and term.dim() == 0 and term.is_floating_point():
        return term
    if isinstance(term, Real) and term == 0:  # the sum of nothing, on a stage without such weights
        return 0
    described = f"a tensor of shape {list(term.shape)}" if isinstance(term, torch.Tensor) else repr(term)
    raise TypeError(
        f"a penalty of engine.add_penalty returned {described}; it must return a scalar tensor, computed from the "
        f"parameters of the model that it is given (0 where it has no term for them)"
    )


def _on(factor: torch.Tensor | float, part: torch.Tensor) -> torch.Tensor | float:
    return factor.to(part.device, part.dtype) if isinstance(factor, torch.Tensor) else factor
