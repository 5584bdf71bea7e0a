"""Errors of torch's own collectives and sharded tensors, said in the Engine's terms."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch.distributed as dist

from tensorshard.comm.call_watch import CallWatch, add_cause, is_of_collective

# torch's words when code computes with a DTensor and a plain tensor. The model's own parameters mix with plain ones.
_SHARDED = "mixed torch.Tensor and DTensor"


@contextmanager
def explained(call: str, watch: CallWatch | None = None, *, counted: bool = True) -> Iterator[None]:
    """Adds advice to an error of a collective, or of a computation with a sharded tensor.

    Args:
        call: what the user called.
        watch: knows what the other ranks do.
        counted: whether all ranks make this call, the same number of times.
    """
    try:
        with watch.calling(call) if watch is not None and counted else nullcontext():
            yield
    except RuntimeError as error:
        if _SHARDED in str(error):
            error.add_note(
                "one of these tensors is split over the ranks (a DTensor), and another is plain: give the whole, by "
                "tensor.full_tensor(), which every rank has to call"
            )
        if is_of_collective(error):
            cause = None if watch is None else watch.explain(call)
            if cause is not None:
                add_cause(error, call, cause)
            else:
                error.add_note(
                    f"{call} is a collective: every rank must call it, in the same order as all that computes on split "
                    f"or sharded tensors. Rank {dist.get_rank()} waited for a rank that has failed, ran out of batches "
                    f"before this one, did not call it, or took another branch in the model or the loss. Of streams "
                    f"whose lengths differ by rank, end all when the first one ends (an all-reduce over "
                    f"engine.mesh.dp_group of whether there is another batch tells), or deal a dataset by "
                    f"engine.loader. The process group is of no more use: end the processes"
                )
        raise
