"""Errors of torch's own collectives and sharded tensors, said in the Engine's terms."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

# torch's words when code computes with a DTensor and a plain tensor. The model's own parameters mix with plain ones.
_SHARDED = "mixed torch.Tensor and DTensor"
# Gloo's and NCCL's words when another rank did not come, or is gone.
_SIGNS = ("Timed out waiting", "Connection closed by peer", "Connection reset by peer", "gloo/transport", "NCCL error")


@contextmanager
def explained(call: str) -> Iterator[None]:
    """Adds advice to an error of a collective, or of a computation with a sharded tensor.

    Args:
        call: what the user called.
    """
    try:
        yield
    except RuntimeError as error:
        if _SHARDED in str(error):
            error.add_note(
                "one of these tensors is split over the ranks (a DTensor), and another is plain: give the whole, by "
                "tensor.full_tensor(), which every rank has to call"
            )
        if isinstance(error, dist.DistError) or any(sign in str(error) for sign in _SIGNS):
            error.add_note(
                f"{call} is a collective: every rank must call it, in the same order as all that computes on split or "
                f"sharded tensors. Rank {dist.get_rank()} waited for a rank that has failed, ran out of batches before "
                f"this one, did not call it, or took another branch in the model or the loss. Of streams whose lengths "
                f"differ by rank, end all when the first one ends (an all-reduce over engine.mesh.dp_group of whether "
                f"there is another batch tells), or deal a dataset by engine.loader. The process group is of no more "
                f"use: end the processes"
            )
        raise
