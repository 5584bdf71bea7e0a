"""Engines of the models of toys.py, and what tests look at in them."""

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import parity
import tensorshard as ts
from toys import data, squares

ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, eps=1e-3)

LEVELS = [0, 1, 2, 3]


def engine_of(model: Any, optimizer: Any = ADAMW, loss_fn: Any = squares, seed: int = 0, **fields: Any) -> ts.Engine:
    return ts.parallelize(model, ts.Plan(**fields), optimizer=optimizer, loss_fn=loss_fn, seed=seed)


def own_shard(engine: ts.Engine, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.chunk(engine.mesh.dp_size)[engine.mesh.dp_rank] for tensor in tensors]


def train_odd(model: type[nn.Module], fields: dict[str, Any], sometimes: int | None) -> tuple:
    engine = engine_of(model(), **fields)
    losses = [engine.step(*own_shard(engine, *data(step, sometimes=sometimes))).item() for step in range(4)]
    return losses, engine.full_state_dict()


def assert_same_state(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-5
) -> None:
    counters = {name: value for name, value in found.items() if name == "calls"}  # a loop over parts counts more
    parity.assert_same_state(found, expected | counters, tolerance)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Operations(TorchDispatchMode):
    """Counts operations, and remembers of which types their results were."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.dtypes.add(result.dtype)
        return result
