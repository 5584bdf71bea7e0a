"""Parameters that are read in full outside of their unit's forward, and gradients by them that a loop asks for.

FSDP2 gathers a unit's parameters only while the unit's own forward runs. Another read (``model.head(x)`` from the loop,
a part of a block that the model calls, a penalty on the weights) gathers the parameter by itself. Its gradient stays
full until the backward is over, as not all ranks need to read the same ones; then it is averaged over the data ranks.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tensorshard.comm.sharding import on_mesh_device
from tensorshard.data_parallel.sharded_gradients import ShardedGradients
from tensorshard.data_parallel.sharded_parameter import read_as_full
from tensorshard.data_parallel.unit_values import WrittenShards
from tensorshard.torch_private.autograd import is_in_backward
from tensorshard.torch_private.dispatch import without_torch_functions_of_tensors
from tensorshard.torch_private.tensors import tensor_version


class GatheredReads:
    """Reads of the parameters of one model.

    Args:
        gradients: of the model.
        dtype: of computation; None for that of the parameters.

    Attributes:
        wait: called with parameters before they are gathered; None for nothing.
        copies: gives the gathered copy of a parameter that its unit has now; None for none.
        written: notes writes; None for nothing.
        in_forward: whether the model's forward is running, which computes in `dtype`.
    """

    def __init__(self, gradients: ShardedGradients, dtype: torch.dtype | None) -> None:
        self.wait: Callable[[list[nn.Parameter]], None] | None = None
        self.copies: Callable[[DTensor], torch.Tensor | None] | None = None
        self.in_forward = False
        self.written: WrittenShards | None = None
        self._gradients, self._dtype = gradients, dtype
        self._leaves: dict[DTensor, tuple[int, torch.Tensor]] = {}  # version of the shard; the full parameter
        gradients.after_backward = self.forget

    def watch(self, parameter: nn.Parameter) -> None:
        """Makes a sharded `parameter` one that is read in full."""
        assert isinstance(parameter, DTensor)
        read_as_full(parameter, self)
        if parameter.requires_grad:
            parameter.register_hook(partial(_take_direct, weakref.ref(self._gradients), weakref.ref(parameter)))

    def forget(self) -> None:
        """Drops the full parameters, where no more reads of the same graph follow. They may be read again."""
        self._leaves.clear()

    def read(self, parameter: DTensor) -> torch.Tensor:
        """The full parameter, with gradients where the parameter and the caller have them. A collective."""
        if torch.is_grad_enabled() and parameter.requires_grad:
            full = self._leaf(parameter)
        else:
            full = self._gather(parameter)
        # In a backward, reversible networks run modules again.
        of_forward = self.in_forward or is_in_backward()
        narrow = of_forward and self._dtype is not None and full.is_floating_point()
        return full.to(self._dtype) if narrow else full

    def set_gradient(self, parameter: DTensor, gradient: torch.Tensor) -> None:
        """See :class:`~tensorshard.data_parallel.sharded_parameter.Reader`."""
        self._gradients.set_by_hand(parameter, gradient)

    def note_write(self, parameter: DTensor, values: list[torch.Tensor]) -> None:
        """See :class:`~tensorshard.data_parallel.sharded_parameter.Reader`."""
        if self.written is not None:
            # An optimizer that is written as a loop has a rate in a tensor, the same on every rank.
            self.written.note(parameter, *(value for value in values if value.dim() or self.in_forward))

    def differentiate(self, arguments: dict[str, Any]) -> tuple[torch.Tensor | None, ...]:
        """See :class:`~tensorshard.data_parallel.sharded_parameter.Reader`."""
        return self._gradients.differentiate(arguments)

    def _leaf(self, parameter: DTensor) -> torch.Tensor:
        copy = None if self.copies is None else self.copies(parameter)
        if copy is not None:  # the gathered one of its unit, whose gradient is reduced with the unit's
            return copy
        with without_torch_functions_of_tensors():
            version = tensor_version(parameter.to_local().detach())
        known = self._leaves.get(parameter)
        if known is not None and known[0] == version:
            return known[1]
        leaf = self._gather(parameter).requires_grad_()
        gradients, of = weakref.ref(self._gradients), weakref.ref(parameter)

        def take(leaf: torch.Tensor) -> None:
            kept, sharded = gradients(), of()
            if kept is not None and sharded is not None and leaf.grad is not None:
                kept.add(sharded, leaf.grad.detach())
            leaf.grad = None

        leaf.register_post_accumulate_grad_hook(take)
        self._gradients.note_leaf(parameter, leaf)
        self._leaves[parameter] = version, leaf
        return leaf

    @torch.no_grad()
    def _gather(self, parameter: DTensor) -> torch.Tensor:
        if self.wait is not None:
            self.wait([parameter])  # type: ignore[list-item]
        with without_torch_functions_of_tensors():
            full: torch.Tensor = on_mesh_device(parameter.detach()).full_tensor()  # type: ignore[arg-type]
            # With one rank, it may be the shard itself, which the optimizer would change under the graph.
            return full.clone() if parameter.device_mesh.size() == 1 else full


@torch.no_grad()
def _take_direct(
    gradients: "weakref.ref[ShardedGradients]", parameter: "weakref.ref[DTensor]", gradient: torch.Tensor | None
) -> torch.Tensor | None:
    """Takes a gradient that arrives at a shard itself.

    torch's functions read the full parameter, which has gradients of its own. An autograd function of the model that
    was given the parameter outside of its unit is in the graph of the shard: its backward returns this rank's full
    gradient, or one from ``torch.autograd.grad``, which is sharded and averaged already.

    Raises:
        RuntimeError: it returned none. In a block that is recomputed, ``ctx.saved_tensors`` are other tensors than the
            parameter, by which there is no gradient.
    """
    kept, sharded = gradients(), parameter()
    if kept is None or sharded is None:
        return None
    if gradient is None:
        raise RuntimeError(
            f"an autograd function of the model was given a parameter of shape {list(sharded.shape)} outside of the "
            f"forward of its unit, where zero=3 shards it, and returned no gradient for it; in a block that is "
            f'recomputed it can find none: use recompute="none" or zero=2, or give the function no such parameter'
        )
    with without_torch_functions_of_tensors():
        full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        kept.add(sharded, full.to(sharded.device_mesh.device_type, sharded.dtype))
        return torch.zeros_like(sharded.detach())
