"""What is added to errors of torch's sharded tensors."""

import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from engines import engine_of
from toys import Odd, data


def _mixes() -> list[str]:
    shards: list[DTensor] = []
    engine = engine_of(Odd(), loss_fn=lambda output, y: (output[:2] - shards[0]).square().mean(), zero=3)
    shards.append(distribute_tensor(torch.ones(2, 1), engine.mesh.along("dp_shard"), [Shard(0)]))
    try:
        engine.step(*data(0, 4))
    except RuntimeError as error:
        return error.__notes__
    return []


def test_a_tensor_of_ones_own_that_is_sharded(ranks):
    for notes in ranks(2, _mixes):
        assert "tensor.full_tensor()" in notes[-1] and "zero=2" not in notes[-1]
