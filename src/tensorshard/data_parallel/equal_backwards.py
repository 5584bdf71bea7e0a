"""Whether the backwards of all data ranks run the same operations in the same order.

A batch normalization's backward is a collective of the data ranks, and so is the reduction of gradients. All ranks must
make both in one order. They do if their graphs are equal, since autograd then computes the same gradients between the
same two collectives. A rank that uses other parameters has another graph.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from tensorshard.comm.collectives import all_gather_into, finish_unasked
from tensorshard.comm.world import world
from tensorshard.torch_private.autograd import order_of_backward
from tensorshard.torch_private.process_groups import group_device

_UNKNOWN = -1


class EqualBackwards:
    """Asks all ranks of `group` for the order of the backward that is about to begin: a message of 8 bytes over the
    group's half for the CPU, so that nothing waits for a GPU. A collective.

    Args:
        loss: whose backward it is.
        numbers: of the parameters, the same on all ranks.
    """

    def __init__(self, loss: torch.Tensor, numbers: Mapping[torch.Tensor, int], group: dist.ProcessGroup) -> None:
        self._everyone: torch.Tensor | None = None
        self._work: dist.Work | None = None
        self._known: bool | None = None
        if dist.get_backend(group) == "fake" or world().is_simulated:
            self._known = True  # there are no others
            return
        if group_device(group, torch.device("cpu")).type != "cpu":
            self._known = False
            return
        order = order_of_backward(loss, numbers)
        self._own = torch.tensor([_UNKNOWN if order is None else order])
        self._everyone = self._own.new_empty(group.size())
        what = "the order of backward"
        self._work = all_gather_into(self._everyone, self._own, group, async_op=True, what=what)

    def hold(self) -> bool:
        """Whether they are known to be equal: the same answer on all ranks. Waits for their messages."""
        if self._known is None:
            assert self._work is not None and self._everyone is not None
            self._work.wait()
            orders = set(self._everyone.tolist())
            self._known = len(orders) == 1 and _UNKNOWN not in orders
        return self._known

    def abandon(self) -> None:
        """Ends it without an answer."""
        if self._known is None and self._work is not None:
            finish_unasked(self._work)
            self._known = False
