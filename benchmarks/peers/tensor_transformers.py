"""Transformers' own tensor parallelism: ``from_pretrained(..., tp_plan="auto")``."""

import tempfile
import warnings
from pathlib import Path

from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import LlamaModel
from transformers.utils import logging

from benchmarks.layers import LayerWork, LlamaLayers


def build(work: LayerWork, rank: int, world_size: int) -> nn.Module:
    if work.kind != "llama":
        raise ValueError(f"Transformers splits models of its own, such as 'llama', not {work.kind!r}")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = [tempfile.mkdtemp(prefix="benchmark-llama-")] if rank == 0 else [""]
    dist.broadcast_object_list(folder)
    if rank == 0:
        plain = work.module()
        assert isinstance(plain, LlamaLayers)
        plain.model.save_pretrained(folder[0])
    dist.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # a later version wants it said in another way
        model = LlamaModel.from_pretrained(folder[0], tp_plan="auto")
    dist.barrier()
    if rank == 0:
        for path in Path(folder[0]).iterdir():
            path.unlink()
        Path(folder[0]).rmdir()
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise RuntimeError("Transformers left all parameters whole, so that this is not tensor parallelism")
    return LlamaLayers(work.width, work.num_heads, work.sequence, model).train()
