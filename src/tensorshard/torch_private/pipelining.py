"""What torch's pipeline schedules need of a stage.

Schedules call a stage's public methods, and four private ones to prepare for a step.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.distributed.pipelining.stage import _PipelineStageBase

from tensorshard.torch_private.patches import replaced


class ScheduleStage(_PipelineStageBase):
    """The base class of custom stages, since schedules take no other. Nothing is exchanged before a step.

    Why: ``PipelineStage`` runs a module on tensors of one shape, and asks its neighbours for theirs. tensorshard's
    stages take any inputs, and know the shapes.

    Checked: torch 2.13 and 2.15.

    Public way: none; ``PipelineStage`` is the only public stage.
    """

    def _prepare_forward_infra(self, num_microbatches: int, *_: Any, **__: Any) -> Any:
        self.chunks = num_microbatches
        self.args_recv_info = dict.fromkeys(range(num_microbatches), ())  # a check in torch 2.13 reads this
        return ()

    def _prepare_backward_infra(self, num_microbatches: int, *_: Any, **__: Any) -> Any:
        self.chunks = num_microbatches
        return ()

    def _create_grad_recv_info(self, act_send_info: Any) -> Any:
        return ()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []  # the code that runs the schedule opens the group's connections


@contextmanager
def without_messages() -> Iterator[None]:
    """Inside, torch's schedules for several stages a rank are made without the messages between actions.

    Why: to find the messages, a schedule goes through the actions of all ranks again and again, which takes minutes for
    many micro-batches on many ranks. The order of the actions is known before.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """

    def prepare_nothing(*_: Any, **__: Any) -> None:
        return None

    with replaced(_PipelineScheduleRuntime, "_prepare_schedule_with_comms", lambda _: prepare_nothing):
        yield


@contextmanager
def while_stages_prepare(pauses: list[None]) -> Iterator[None]:
    """Inside, `pauses` has an item while a ``PipelineStage`` prepares for a step.

    Why: to learn the shapes, it runs its module, forward and backward, on tensors that are not initialised. Who watches
    the module's calls must not take these for training.

    Checked: torch 2.13 and 2.15.

    Public way: none; hooks of the module see these calls, too.
    """

    def pausing(prepare: Any) -> Any:
        @wraps(prepare)
        def paused(*args: Any, **kwargs: Any) -> Any:
            pauses.append(None)
            try:
                return prepare(*args, **kwargs)
            finally:
                pauses.pop()

        return paused

    names = ("_prepare_forward_infra", "_prepare_backward_infra")
    with replaced(PipelineStage, names[0], pausing), replaced(PipelineStage, names[1], pausing):
        yield
