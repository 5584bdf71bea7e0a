"""ZeRO 3 where a model's code calls a part of one unit from outside of it (``self.blocks[0].norm.embed(x)``, say).

FSDP2 gathers a unit's parameters only while the unit's own forward runs. A module of the unit that is called at another
time would have shards alone. So it gets full parameters for that call, and their gradients are reduced apart from the
unit's. The model's first forward shows which modules need this; after it, the others cost nothing.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.distributed.tensor import DTensor, Partial
from torch.utils.hooks import RemovableHandle

from tensorshard.comm.sharding import on_mesh_device
from tensorshard.data_parallel.sharded_gradients import ShardedGradients
from tensorshard.modules.forwards import Role, roles_of
from tensorshard.modules.surrounded import as_hook
from tensorshard.torch_private.modules import own_parameters, set_parameter

_COMPILED = {Role.COMPILATION, Role.UNCOMPILED}


class OutsideCalls:
    """Gathers the parameters of modules that are called while their unit is not.

    Args:
        model: after ``fully_shard``.
        units: the modules that FSDP2 gathers, without the model itself. Compiled ones are left alone: hooks on their
            modules would be compiled into them.
        gradients: of the model.
        dtype: of computation; None for that of the parameters.

    Attributes:
        wait: called with parameters before they are gathered; None for nothing.
        is_of_all_blocks: tells code that compares blocks that this one object has hooks on all of them.
    """

    is_of_all_blocks = True

    def __init__(
        self, model: nn.Module, units: Iterable[nn.Module], gradients: ShardedGradients, dtype: torch.dtype | None
    ) -> None:
        self.wait: Callable[[list[nn.Parameter]], None] | None = None
        self._gradients, self._dtype = gradients, dtype
        self._handles: dict[nn.Module, list[RemovableHandle]] = {}
        self._held: dict[nn.Module, dict[str, nn.Parameter]] = {}  # the shards of the modules that are running
        self._outside: set[nn.Module] = set()
        for unit in units:
            if roles_of(unit).isdisjoint(_COMPILED):
                for module in unit.modules():
                    if module is not unit and own_parameters(module):
                        self._watch(module)
        self._first = model.register_forward_hook(as_hook(self._first_forward_over))

    def _watch(self, module: nn.Module) -> None:
        self._handles[module] = [
            module.register_forward_pre_hook(as_hook(self._gather), prepend=True),
            module.register_forward_hook(as_hook(self._restore), always_call=True),
        ]

    def _gather(self, module: nn.Module, args: Any) -> None:
        sharded: dict[str, nn.Parameter] = {
            name: p for name, p in own_parameters(module).items() if isinstance(p, DTensor)
        }
        if not sharded or module in self._held:
            return
        if self.wait is not None:
            self.wait(list(sharded.values()))
        self._outside.add(module)
        self._held[module] = sharded
        for name, parameter in sharded.items():
            set_parameter(module, name, _Gathered.apply(parameter, self._gradients, self._dtype))

    def _restore(self, module: nn.Module, args: Any, output: Any) -> None:
        for name, parameter in self._held.pop(module, {}).items():
            set_parameter(module, name, parameter)

    def _first_forward_over(self, model: nn.Module, args: Any, output: Any) -> None:
        self._first.remove()
        for module in self._handles.keys() - self._outside:
            for handle in self._handles.pop(module):
                handle.remove()


class _Gathered(Function):
    """Gathers the full parameter from the ranks' shards. Backward averages its gradient and cuts it into shards."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, gradients: ShardedGradients, dtype: torch.dtype | None) -> torch.Tensor:
        ctx.parameter, ctx.gradients = parameter, gradients
        full: torch.Tensor = on_mesh_device(parameter.detach()).full_tensor()  # type: ignore[arg-type]
        return full if dtype is None or not full.is_floating_point() else full.to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        parameter, gradients = ctx.parameter, ctx.gradients
        grad = grads[0].to(parameter.dtype)
        summed = DTensor.from_local(
            grad, parameter.device_mesh, [Partial()] * parameter.device_mesh.ndim, run_check=False
        )
        gradients.add(parameter, summed.redistribute(placements=parameter.placements))
        return None, None, None
