"""Where a DTensor's shard lies.

`compute_local_shape_and_global_offset`: the shape and the place in the full tensor of this rank's shard.

Why: checkpoints write shards with their places, those of strided placements included.

Checked: torch 2.11 and 2.13.

Public way: none for strided placements; arithmetic as in ``tensorshard.comm.sharding`` for others.
"""

from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = ["compute_local_shape_and_global_offset"]
