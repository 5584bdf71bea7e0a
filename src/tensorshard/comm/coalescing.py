"""Collectives on several tensors at once.

On NCCL they are one call: one kernel, one wait in its queue. On Gloo, which moves no byte sooner for that, they are one
call a tensor, so that no tensor has to be copied into a message.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tensorshard.comm.collectives import advance, all_gather_into, all_reduce_, finish_unasked, reduce_scatter_into
from tensorshard.torch_private.coalescing import coalesced
from tensorshard.torch_private.process_groups import backend_name


class Started:
    """Collectives under way. Whoever reads their outputs waits for them first.

    Args:
        tensors: what they read and write, which is kept until then.
    """

    def __init__(self, works: Sequence[Any], tensors: Sequence[tuple[torch.Tensor, ...]]) -> None:
        self._works, self._tensors = works, tensors

    def wait(self) -> None:
        """Waits for all of them."""
        for work in self._works:
            work.wait()
        self._tensors = ()

    def advance(self) -> None:
        """See :func:`~tensorshard.comm.collectives.advance`."""
        for work in self._works:
            advance(work)

    def abandon(self) -> None:
        """See :func:`~tensorshard.comm.collectives.finish_unasked`."""
        for work in self._works:
            finish_unasked(work)


def all_reduce_several(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, *, what: str) -> Started:
    """Starts to sum each of `tensors` over the ranks, in place.

    Args:
        tensors: flat.
        what: as for :func:`~tensorshard.comm.collectives.all_gather_into`.
    """
    return _started([(tensor,) for tensor in tensors], group, lambda tensor: _reduced(tensor, group, what))


def reduce_scatter_several(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: dist.ProcessGroup, *, what: str
) -> Started:
    """Starts to sum each of `inputs` over the ranks, of which this rank's shard comes into its output.

    Args:
        outputs, inputs: flat.
        what: as for :func:`~tensorshard.comm.collectives.all_gather_into`.
    """
    pairs = list(zip(outputs, inputs, strict=True))
    return _started(
        pairs, group, lambda output, input: reduce_scatter_into(output, input, group, async_op=True, what=what)
    )


def all_gather_several(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: dist.ProcessGroup, *, what: str = ""
) -> Started:
    """Starts to gather each of `inputs` from all ranks into its output.

    Args:
        outputs, inputs: flat. An input may be this rank's shard of its output.
        what: as for :func:`~tensorshard.comm.collectives.all_gather_into`.
    """
    pairs = list(zip(outputs, inputs, strict=True))
    return _started(pairs, group, lambda output, input: all_gather_into(output, input, group, async_op=True, what=what))


def _reduced(tensor: torch.Tensor, group: dist.ProcessGroup, what: str) -> Any:
    return all_reduce_(tensor, group, async_op=True, what=what)


def _started(calls: Sequence[tuple[torch.Tensor, ...]], group: dist.ProcessGroup, start: Any) -> Started:
    """Calls `start` with each of `calls`; those of one type are one call where the backend has that."""
    if len(calls) < 2 or not _coalesces(group, calls[0][0].device):
        return Started([start(*call) for call in calls], calls)
    works = []
    for dtype in dict.fromkeys(call[0].dtype for call in calls):
        members = [call for call in calls if call[0].dtype == dtype]
        works.append(coalesced(lambda members=members: [start(*call) for call in members], group))  # type: ignore[misc]
    return Started(works, calls)


def _coalesces(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether several collectives of `group` are one. Under ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` torch compares them one
    by one."""
    return backend_name(group, device) == "nccl" and dist.get_debug_level() != dist.DebugLevel.DETAIL
