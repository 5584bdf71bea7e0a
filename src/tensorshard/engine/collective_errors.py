"""Errors of torch's own collectives, said in the Engine's terms."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

# What Gloo and NCCL say where another rank did not come, or is gone.
_SIGNS = ("Timed out waiting", "Connection closed by peer", "Connection reset by peer", "gloo/transport", "NCCL error")


@contextmanager
def explained(call: str) -> Iterator[None]:
    """Adds to an error that comes of a collective what every rank must do.

    Args:
        call: what the user called.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or any(sign in str(error) for sign in _SIGNS):
            error.add_note(
                f"{call} is a collective: every rank must call it, in the same order as all that computes on split or "
                f"sharded tensors. Rank {dist.get_rank()} waited for a rank that has failed, did not call it, or took "
                f"another branch in the model or the loss. The process group is of no more use: end the processes"
            )
        raise
