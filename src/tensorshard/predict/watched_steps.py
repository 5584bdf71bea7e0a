"""Runs steps of an Engine under a ledger, and notes what each storage is for."""

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from tensorshard.common.sampled_loops import sample_loops
from tensorshard.engine.engine import Engine
from tensorshard.model.tensors import tensor_leaves
from tensorshard.predict.operation_ledger import OperationLedger
from tensorshard.predict.rank_estimate import GRADIENTS, INPUTS, OPTIMIZER, PARAMETERS
from tensorshard.predict.storage_ledger import StorageLedger
from tensorshard.torch_private.fake_tensors import active_fake_mode

STEPS = 2  # the first makes the optimizer's states at its end; the second holds them from its start


class StepWatcher:
    """Inside, notes what the storages of `engine` and of its steps are for.

    Attributes:
        known: the categories of storages whose use is known, by their numbers in the ledger.
    """

    def __init__(self, ledger: StorageLedger, engine: Engine) -> None:
        self.known: dict[int, str] = {}
        self._ledger = ledger
        self._engine = engine
        self._hooks: list[Any] = []

    def __enter__(self) -> "StepWatcher":
        optimizer = self._engine.optimizer
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_update),
            optimizer.register_step_post_hook(self._after_update),
        ]
        parameters = self._parameters()
        self._add([*parameters, *self._engine.model.buffers()], PARAMETERS)
        self._add(self._states(), OPTIMIZER)
        self._add([tensor.grad for tensor in parameters if tensor.grad is not None], GRADIENTS)
        take_step = self._engine.step

        def step(*batch: Any, **named: Any) -> torch.Tensor:
            self.note_inputs((batch, named))
            return take_step(*batch, **named)

        self._engine.step = step  # type: ignore[method-assign]
        return self

    def __exit__(self, *exception: object) -> None:
        del self._engine.step  # the class's own is back
        for hook in self._hooks:
            hook.remove()
        self._note(self._states(), OPTIMIZER)

    def note_inputs(self, tensors: Any) -> None:
        """Notes that `tensors` are a batch."""
        self._add(tensors, INPUTS)

    def _parameters(self) -> list[torch.Tensor]:
        return [*self._engine.sharded.masters().values(), *self._engine.model.parameters()]

    def _states(self) -> list[Any]:
        return [list(state.values()) for state in self._engine.optimizer.state.values()]

    def _before_update(self, *_: Any) -> None:
        self._note([tensor.grad for tensor in self._parameters() if tensor.grad is not None], GRADIENTS)
        self._ledger.updating = True

    def _after_update(self, *_: Any) -> None:
        self._ledger.updating = False

    def _add(self, tensors: Any, category: str) -> None:
        """Adds tensors to the ledger, which may not have seen them being made, and notes their category."""
        for tensor in tensor_leaves(tensors):
            self._ledger.note(tensor, "made before")
        self._note(tensors, category)

    def _note(self, tensors: Any, category: str) -> None:
        for tensor in tensor_leaves(tensors):
            number = self._ledger.number_of(tensor)
            if number is not None:
                self.known.setdefault(number, category)


def watch_steps(
    make_engine: Callable[[], Engine],
    make_batch: Callable[[], tuple[Any, Any]],
    operations: OperationLedger | None = None,
) -> tuple[StorageLedger, dict[int, str], Engine]:
    """Makes an Engine and takes :data:`STEPS` steps.

    Args:
        operations: a ledger that counts what the last step computes and sends; None for none.

    Returns:
        The ledger of construction and steps; the categories of storages whose use is known, by their numbers; the
        Engine.
    """
    # On the device only tensors of one kind count. Under a fake mode, tables of tp are checked on real tensors, which
    # are the host's. Otherwise pipelines are cut by a run on fake ones.
    counts = _is_real if active_fake_mode() is None else _is_fake
    with StorageLedger(counts, operations=operations) as ledger:
        engine = make_engine()
        with ExitStack() as stack:
            if operations is not None:
                stack.enter_context(sample_loops(operations.loop))
            watcher = stack.enter_context(StepWatcher(ledger, engine))
            inputs, targets = make_batch()
            watcher.note_inputs((inputs, targets))
            gc.collect()  # searches leave cycles of references
            ledger.initialized()
            for index in range(STEPS):
                if index == STEPS - 1:
                    if operations is not None:
                        operations.begin_step(ledger.phase)
                    engine.storage.forget_moved()
                engine.step(inputs, targets)
            if operations is not None:
                operations.end_step()
        if engine.storage.tensors:
            ledger.leave_out(_elsewhere(ledger, engine.storage.tensors))
    return ledger, watcher.known, engine


def _is_fake(storage: torch.UntypedStorage) -> bool:
    return storage.device.type == "meta"  # whatever device the tensor says


def _is_real(storage: torch.UntypedStorage) -> bool:
    return not _is_fake(storage)


def _elsewhere(ledger: StorageLedger, tensors: Sequence[torch.Tensor]) -> set[int]:
    """The numbers of storages that are not in the device's memory: offloaded ones, and those that the update on the
    host makes."""
    offloaded = {number for tensor in tensors if (number := ledger.number_of(tensor)) is not None}
    return offloaded | {allocation.number for allocation in ledger.allocations if allocation.phase == "update"}
