"""The one place that knows how supported versions of torch differ, and where their unexported names are."""

from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

__all__ = ["AllGather", "ReduceScatter"]
