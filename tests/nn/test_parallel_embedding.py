"""ParallelEmbedding against nn.Embedding."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tensorshard.distributed as tsd
from rank_pool import RankError
from shards import full
from tensorshard.nn import ParallelEmbedding
from tensorshard.nn.functional import parallel_embedding

WORLDS = [
    pytest.param(2, 2, id="2 ranks"),
    pytest.param(4, 4, id="4 ranks"),
    pytest.param(4, 2, id="2 groups of 2"),
]

OPTIONS = [
    {},
    {"padding_idx": 2},
    {"padding_idx": -1},
    {"scale_grad_by_freq": True},
    {"scale_grad_by_freq": True, "padding_idx": 0},
    {"max_norm": 1.0},
    {"max_norm": 1.5, "norm_type": 1.0},
]


def _compare(group_size: int) -> None:
    tsd.init_process_group(group_size)
    for dim in (0, 1, -1):
        for vocabulary, features in ((8, 4), (9, 5), (3, 3)):
            for options in OPTIONS:
                torch.manual_seed(7)
                whole = nn.Embedding(vocabulary, features, dtype=torch.float64, **options)
                torch.manual_seed(7)
                layer = ParallelEmbedding(vocabulary, features, dtype=torch.float64, dim=dim, **options)
                torch.manual_seed(tsd.get_data_parallel_rank())
                indices = torch.randint(vocabulary - 1, (3, 4))  # one row is never looked up
                torch.testing.assert_close(full(layer.weight), whole.weight)
                expected, output = whole(indices), layer(indices)
                torch.testing.assert_close(output, expected)
                torch.testing.assert_close(full(layer.weight), whole.weight)  # with max_norm, rescaled
                seed = torch.randn_like(expected)
                expected.backward(seed)
                output.backward(seed)
                torch.testing.assert_close(full(layer.weight.grad, layer.weight), whole.weight.grad)


@pytest.mark.fast_cases("2 ranks")
@pytest.mark.parametrize(("world_size", "group_size"), WORLDS)
def test_weights_values_and_gradients(ranks, world_size, group_size):
    ranks(world_size, _compare, group_size)


def _convert_and_call() -> None:
    tsd.init_process_group(2)
    whole = nn.Embedding(7, 4, padding_idx=3)
    model = nn.ModuleDict({"tokens": nn.Embedding(7, 4, padding_idx=3), "head": nn.Linear(4, 7)})
    model["tokens"].load_state_dict(whole.state_dict())
    ParallelEmbedding.convert_parallel_embedding(model, dim=0)
    indices = torch.tensor([[0, 6, 3]])
    torch.testing.assert_close(model["tokens"](indices), whole(indices))
    assert model["tokens"].padding_idx == 3 and "7, 4, padding_idx=3, dim=0" in repr(model)
    for dim in (0, 1):
        part = tsd.scatter(whole.weight.detach(), dim)
        torch.testing.assert_close(
            parallel_embedding(indices, part, num_embeddings=7 if dim == 0 else None, dim=dim), whole(indices)
        )


def test_conversion_and_functional_form(ranks):
    ranks(2, _convert_and_call)


def test_without_a_dim_it_is_an_embedding():
    torch.manual_seed(0)
    plain = nn.Embedding(5, 3, sparse=True)
    torch.manual_seed(0)
    layer = ParallelEmbedding(5, 3, sparse=True)
    indices = torch.tensor([0, 4])
    assert torch.equal(layer(indices), plain(indices))
    given = torch.randn(5, 3)
    assert torch.equal(ParallelEmbedding(5, 3, _weight=given).weight, given)


def _bad(case: str) -> None:
    tsd.init_process_group(2)
    dist.barrier()
    if case in ("vocabulary", "features", "negative"):
        layer = ParallelEmbedding(5, 4, dim=1 if case == "features" else 0)
        layer(torch.tensor([0, -1 if case == "negative" else 5]))
    elif case == "sparse":
        ParallelEmbedding(5, 4, sparse=True, dim=0)
    elif case == "no size":
        parallel_embedding(torch.tensor([0]), torch.ones(2, 4), dim=0)
    elif case == "wrong size":
        parallel_embedding(torch.tensor([0]), torch.ones(2, 4), num_embeddings=9, dim=0)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("vocabulary", "IndexError: index 5, number 1 of 2, is outside the 5 embeddings: use 0 to 4"),
        ("features", "IndexError: index 5, number 1 of 2, is outside the 5 embeddings"),
        ("negative", "IndexError: index -1, number 1 of 2, is outside the 5 embeddings"),
        ("sparse", "sparse=True was given for a split embedding"),
        ("no size", "without num_embeddings="),
        ("wrong size", "num_embeddings=9 was given, of which rank 0 of 2 holds 5 rows; its weight has 2"),
    ],
)
def test_bad_input(ranks, case, message):
    with pytest.raises(RankError, match=message):
        ranks(2, _bad, case)
