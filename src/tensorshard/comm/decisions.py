"""One rank decides for all: what it works out, or the error that it meets, is broadcast to the others."""

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

_Result = TypeVar("_Result")


def decide_once(
    decide: Callable[[], _Result], group: dist.ProcessGroup, *, rank: int = 0, device: torch.device | None = None
) -> _Result:
    """What ``decide()`` returns on one rank of `group`, on every rank. A collective of the group.

    The result travels by pickle, between processes of one job. Under the ``fake`` backend, where no other rank exists,
    each decides for itself.

    Args:
        decide: called on that rank alone.
        group: the ranks.
        rank: which of them decides, counted within the group.
        device: where the message travels; None for the backend's own.

    Raises:
        Exception: what it raised there, of the same class and with the same message on every rank; as a RuntimeError on
            the others where the class itself cannot travel.
    """
    if group.size() == 1 or dist.get_backend(group) == "fake":
        return decide()
    outcome: list[Any] = [None]
    failure: Exception | None = None
    if group.rank() == rank:
        try:
            outcome = [(True, decide())]
        except Exception as error:
            failure = error
            outcome = [(False, error if _travels(error) else RuntimeError(f"{type(error).__name__}: {error}"))]
    dist.broadcast_object_list(outcome, group=group, group_src=rank, device=device)
    if failure is not None:
        raise failure  # with the traceback of where it happened
    succeeded, value = outcome[0]
    if not succeeded:
        raise value
    return value


def _travels(error: Exception) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:  # exceptions whose constructors take other arguments than they keep
        return False
