"""Steps of an Engine under a ledger, and what each storage in it is for."""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from tensorshard.engine.engine import Engine
from tensorshard.estimate.operation_ledger import OperationLedger
from tensorshard.estimate.rank_estimate import GRADIENTS, INPUTS, OPTIMIZER, PARAMETERS
from tensorshard.estimate.storage_ledger import StorageLedger
from tensorshard.modules.tensors import tensor_leaves
from tensorshard.offload.slots import Slots

STEPS = 2  # the first makes the optimizer's states, at its end; the second has them all the time


def watch_steps(
    make_engine: Callable[[], Engine],
    make_batch: Callable[[], tuple[Any, Any]],
    operations: OperationLedger | None = None,
) -> tuple[StorageLedger, dict[int, str], Engine]:
    """Makes an Engine and takes :data:`STEPS` steps.

    Args:
        operations: counts what the last of them computes and sends; None for nobody.

    Returns:
        The ledger of all of it; the categories of storages whose use is known, by their numbers; the Engine.
    """
    known: dict[int, str] = {}
    with operations or nullcontext(), StorageLedger() as ledger:
        engine = make_engine()

        def note(tensors: Any, category: str) -> None:
            for tensor in tensor_leaves(tensors):
                number = ledger.number_of(tensor)
                if number is not None:
                    known.setdefault(number, category)

        def masters() -> list[torch.Tensor]:
            return list(engine.sharded.masters().values())

        def before_update(*_: Any) -> None:
            held = [*masters(), *engine.model.parameters()]
            note([tensor.grad for tensor in held if tensor.grad is not None], GRADIENTS)
            ledger.updating = True

        def after_update(*_: Any) -> None:
            ledger.updating = False

        engine.optimizer.register_step_pre_hook(before_update)
        engine.optimizer.register_step_post_hook(after_update)
        inputs, targets = make_batch()
        for tensor in tensor_leaves((inputs, targets)):
            ledger.note(tensor, "input")
        note((inputs, targets), INPUTS)
        note([*masters(), *engine.model.parameters(), *engine.model.buffers()], PARAMETERS)
        gc.collect()  # what searches leave in circles of references
        ledger.initialized()
        for index in range(STEPS):
            if index == STEPS - 1:
                if operations is not None:
                    operations.begin_step(ledger.phase)
                if engine.slots is not None:
                    engine.slots.forget_moved()
            engine.step(inputs, targets)
        if operations is not None:
            operations.end_step()
        note([list(state.values()) for state in engine.optimizer.state.values()], OPTIMIZER)
        if engine.slots is not None:
            ledger.leave_out(_elsewhere(ledger, engine.slots))
    return ledger, known, engine


def _elsewhere(ledger: StorageLedger, slots: Slots) -> set[int]:
    """The numbers of storages that are not in the device's memory: those that are offloaded, and what the update on the
    host makes for itself."""
    offloaded = {number for tensor in slots.tensors if (number := ledger.number_of(tensor)) is not None}
    return offloaded | {allocation.number for allocation in ledger.allocations if allocation.phase == "update"}
