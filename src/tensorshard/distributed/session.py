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

    A world that does not exist yet is joined first: torchrun's if this process was started by it, else a
    world of one. As long as the groups exist, torch's ``DistributedDataParallel``, ``GradScaler``, ``clip_grad_norm_``
    and ``ZeroRedundancyOptimizer`` know of split parameters (``docs/torchshard.md``).

    Args:
        group_size: ranks per model-parallel group; None for all of the world.
        device_type: where the parameters of parallel layers live: "cuda" or "cpu". By default "cuda" where
            the world communicates over NCCL.
        timeout: of the groups made here (a group of all processes is the world, and keeps its own); None for
            the backend's.
        check_collectives: before each collective of this package over these groups, compare what the ranks
            are about to call, and raise :class:`CollectiveMismatchError` where it differs or a rank does not
            come within `timeout`. Slow: for finding mistakes. Torch's own calls are checked by
            ``TORCH_DISTRIBUTED_DEBUG=DETAIL``.

    Raises:
        TypeError: `group_size` is no integer.
        ValueError: `group_size` does not divide the world.
        RuntimeError: called before with other arguments. Called twice with the same, it does nothing.
    """
    groups.init_process_group(
        group_size,
        device_type=device_type,
        timeout=timeout,
        check_collectives=check_collectives,
        install=torch_patches.install,
    )
