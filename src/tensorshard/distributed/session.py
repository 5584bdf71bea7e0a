"""TorchShard's entry point: makes the model-parallel groups, and patches torch's classes while they exist."""

from datetime import timedelta

from tensorshard.comm import groups
from tensorshard.distributed import torch_patches


def init_process_group(
    group_size: int | None = None,
    *,
    device_type: str | None = None,
    timeout: timedelta | None = None,
    check_collectives: bool = False,
) -> None:
    """Makes the model-parallel groups, and the data-parallel groups across them. Every process calls it.

    If there is no torch process group yet, it makes one first: torchrun's, if torchrun started this process, else one
    of this process alone. While the groups exist, torch's ``DistributedDataParallel``, ``GradScaler``,
    ``clip_grad_norm_`` and ``ZeroRedundancyOptimizer`` take models in which some parameters are split.

    Args:
        group_size: ranks in each model-parallel group; None for all ranks.
        device_type: where the parameters of parallel layers are: "cuda" or "cpu". By default "cuda" if the world
            communicates over NCCL.
        timeout: of the groups that are made here; None for the backend's default. A group of all processes is the world
            itself, and keeps the world's timeout.
        check_collectives: whether the ranks compare their calls before each collective of this package over these
            groups. If the calls differ, or a rank does not come within `timeout`, they raise
            :class:`CollectiveMismatchError`. This is slow, and meant for debugging.
            ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` checks torch's own collectives.

    Raises:
        TypeError: `group_size` is not an integer.
        ValueError: `group_size` does not divide the number of ranks.
        RuntimeError: it was called before with other arguments. A second call with the same does nothing.

    Examples:
        >>> ts.distributed.init_process_group()
        >>> ts.distributed.get_rank(), ts.distributed.get_world_size(), ts.distributed.get_group_size()
        (0, 1, 1)
    """
    groups.init_process_group(
        group_size,
        device_type=device_type,
        timeout=timeout,
        check_collectives=check_collectives,
        install=torch_patches.install,
    )
