"""Samplers for ``torch.utils.data.DataLoader``."""

from collections.abc import Sized

from torch.utils.data import DistributedSampler

from tensorshard.comm.groups import get_data_parallel_rank, get_data_parallel_size

__all__ = ["DistributedGroupSampler"]


class DistributedGroupSampler(DistributedSampler):
    """torch's ``DistributedSampler`` with one share of the data per model-parallel group.

    The ranks of a group hold parts of one model and therefore need the same samples; different groups get
    different ones. As with torch's, call ``set_epoch`` before each epoch, and hand it to a ``DataLoader`` as
    its ``sampler``.

    Args:
        dataset: what is sampled.
        num_groups: how many shares; by default the number of model-parallel groups.
        group_index: whose share; by default that of this rank's group.
        shuffle, seed, drop_last: as in ``DistributedSampler``. Without `drop_last`, samples are repeated
            where the data does not divide.

    Raises:
        RuntimeError: there are no groups, and `num_groups` and `group_index` are not both given.
        ValueError: `group_index` is not below `num_groups`.
    """

    def __init__(
        self,
        dataset: Sized,
        num_groups: int | None = None,
        group_index: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        num_groups = get_data_parallel_size() if num_groups is None else num_groups
        group_index = get_data_parallel_rank() if group_index is None else group_index
        if not 0 <= group_index < num_groups:
            raise ValueError(f"group_index={group_index} of num_groups={num_groups} was given: count them from 0")
        super().__init__(
            dataset,  # type: ignore[arg-type]  # a length and items by index are all it needs
            num_replicas=num_groups,
            rank=group_index,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )
