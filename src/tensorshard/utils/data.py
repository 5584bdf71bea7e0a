"""Samplers for ``torch.utils.data.DataLoader``."""

from collections.abc import Sized

from torch.utils.data import DistributedSampler

from tensorshard.comm.groups import get_data_parallel_rank, get_data_parallel_size

__all__ = ["DistributedGroupSampler"]


class DistributedGroupSampler(DistributedSampler):
    """torch's ``DistributedSampler`` with one share of the data for each model-parallel group.

    The ranks of a group hold parts of one model, so they need the same samples; different groups get different
    ones. Pass it to a ``DataLoader`` as its ``sampler``, and call ``set_epoch`` before each epoch, as with torch's.

    Args:
        dataset: a map-style dataset, with a length.
        num_groups: how many shares there are; by default the number of model-parallel groups.
        group_index: which share this is; by default that of this rank's group.
        shuffle, seed, drop_last: as in ``DistributedSampler``. Without `drop_last`, some samples are repeated if the
            number of groups does not divide that of the samples.

    Raises:
        RuntimeError: there are no groups, and `num_groups` and `group_index` are not both given.
        ValueError: `group_index` is not below `num_groups`.

    Examples:
        >>> dataset = torch.utils.data.TensorDataset(torch.arange(10))
        >>> sampler = ts.utils.data.DistributedGroupSampler(dataset, num_groups=2, group_index=1, shuffle=False)
        >>> list(sampler)
        [1, 3, 5, 7, 9]
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
