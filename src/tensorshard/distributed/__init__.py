"""Model-parallel groups, and differentiable collectives over them, by TorchShard's names."""

from tensorshard.comm.differentiable import all_to_all, copy, gather, gather_for_sum, reduce, reduce_scatter, scatter
from tensorshard.comm.groups import (
    CollectiveMismatchError,
    destroy_process_group,
    get_data_parallel_group,
    get_data_parallel_rank,
    get_data_parallel_size,
    get_group,
    get_group_size,
    get_mesh,
    get_rank,
    get_world_size,
    is_initialized,
)
from tensorshard.distributed.session import init_process_group

__all__ = [
    "CollectiveMismatchError",
    "all_to_all",
    "copy",
    "destroy_process_group",
    "gather",
    "gather_for_sum",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_size",
    "get_group",
    "get_group_size",
    "get_mesh",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_initialized",
    "reduce",
    "reduce_scatter",
    "scatter",
]
