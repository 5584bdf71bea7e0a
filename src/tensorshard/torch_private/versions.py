"""The one place that knows how supported versions of torch differ."""

import torch.distributed as dist

# torch 2.13 renamed them, and warns about the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
