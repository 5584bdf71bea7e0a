from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tensorshard.data import ShardedBatchSampler
from tensorshard.data.sampler import TorchOrder, permute


def global_order(num_batches: int | None, dp_size: int, **options) -> list[int]:
    """What all data ranks read, batch after batch, rank after rank."""
    batches = [
        list(islice(ShardedBatchSampler(dp_rank=rank, dp_size=dp_size, **options), num_batches))
        for rank in range(dp_size)
    ]
    return [index for parts in zip(*batches, strict=True) for part in parts for index in part]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 1000, 4096, 5000])
def test_a_permutation_hits_every_sample_once(size):
    assert sorted(permute(np.arange(size), size, seed=1, epoch=2)) == list(range(size))


def test_a_permutation_depends_on_seed_and_epoch():
    orders = [permute(np.arange(500), 500, seed=s, epoch=e) for s, e in ((0, 0), (0, 1), (1, 0), (1, 1))]
    for i, order in enumerate(orders):
        assert np.array_equal(order, permute(np.arange(500), 500, seed=i // 2, epoch=i % 2))
        for other in orders[:i]:
            # Two random orders of anything agree in one place on average.
            assert (order == other).sum() < 10


def test_a_permutation_sends_each_sample_everywhere():
    size, seeds = 10, 3000
    positions = np.arange(size)
    counts = np.zeros((size, size))
    for seed in range(seeds):
        counts[positions, permute(positions, size, seed=seed, epoch=0)] += 1
    # Each of the 100 cells expects 300, with a deviation of 16.
    assert np.abs(counts - seeds / size).max() < 5 * 16.5


def test_neighbours_are_torn_apart():
    order = permute(np.arange(10_000), 10_000, seed=0, epoch=0)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05


def test_a_permutation_of_very_many_needs_no_list_of_them():
    size = 10**15 + 7
    images = permute(np.array([0, 1, size - 1]), size, seed=0, epoch=0)
    assert len(set(images.tolist())) == 3
    assert images.min() >= 0
    assert images.max() < size


@pytest.mark.parametrize("positions", [[-1, 3], [0, 10]])
def test_a_position_outside_is_refused(positions):
    with pytest.raises(ValueError, match="expected 0 to 9"):
        permute(np.array(positions), 10, seed=0, epoch=0)


def test_the_order_of_samples_is_pinned():
    # Changing this order breaks the resumption of every run under way.
    assert permute(np.arange(10), 10, seed=0, epoch=0).tolist() == [5, 7, 6, 3, 0, 4, 1, 9, 2, 8]


def test_every_number_of_ranks_reads_the_same_order():
    options = {"num_samples": 50, "global_batch_size": 8, "seed": 3}
    one = global_order(20, 1, **options)
    assert one == global_order(20, 2, **options)
    assert one == global_order(20, 4, **options)
    assert one != global_order(20, 1, **{**options, "seed": 4})


def test_ranks_take_contiguous_shares_of_a_batch():
    parts = [next(iter(ShardedBatchSampler(50, 8, dp_rank=rank, dp_size=4, shuffle=False))) for rank in range(4)]
    assert parts == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_the_stream_goes_through_epoch_after_epoch_and_drops_nothing():
    stream = global_order(25, 2, num_samples=50, global_batch_size=8, seed=0)
    epochs = [stream[start : start + 50] for start in range(0, 200, 50)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(50))
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_batch_may_span_several_epochs():
    stream = global_order(3, 2, num_samples=3, global_batch_size=8, seed=0)
    for start in range(0, 24, 3):
        assert sorted(stream[start : start + 3]) == [0, 1, 2]


def test_a_run_resumes_on_other_ranks_without_repeating_or_skipping():
    options = {"num_samples": 50, "seed": 3}
    undisturbed = global_order(30, 1, global_batch_size=8, **options)
    resumed = [
        *global_order(9, 4, global_batch_size=8, **options),
        *global_order(9, 2, global_batch_size=8, samples_consumed=9 * 8, **options),
        *global_order(6, 1, global_batch_size=16, samples_consumed=18 * 8, **options),
    ]
    assert resumed == undisturbed


def test_iterating_twice_starts_at_the_same_place():
    sampler = ShardedBatchSampler(50, 8, samples_consumed=16)
    assert list(islice(sampler, 3)) == list(islice(sampler, 3))


@pytest.mark.parametrize("dp_size", [1, 2, 4])
@pytest.mark.parametrize("num_samples", [4, 7, 8, 9, 10, 16, 17, 23])
def test_one_pass_reads_every_sample_once_and_no_rank_idles(num_samples, dp_size):
    options = {"num_samples": num_samples, "global_batch_size": 8, "num_epochs": 1, "drop_last": False}
    samplers = [ShardedBatchSampler(**options, dp_rank=rank, dp_size=dp_size) for rank in range(dp_size)]
    batches = [list(sampler) for sampler in samplers]
    assert sorted(index for rank in batches for batch in rank for index in batch) == list(range(num_samples))
    assert [len(rank) for rank in batches] == [len(sampler) for sampler in samplers]
    for parts in zip(*batches, strict=True):
        sizes = [len(part) for part in parts]
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1


def test_drop_last_leaves_out_the_incomplete_batch():
    sampler = ShardedBatchSampler(21, 8, num_epochs=1, shuffle=False)
    assert len(sampler) == 2
    assert [index for batch in sampler for index in batch] == list(range(16))


def test_several_epochs_end_where_they_should():
    options = {"num_samples": 10, "global_batch_size": 4, "num_epochs": 3, "drop_last": False}
    stream = global_order(None, 2, **options)
    assert sorted(stream) == sorted(list(range(10)) * 3)
    assert stream[8:] == global_order(None, 1, samples_consumed=8, **options)
    assert global_order(None, 1, samples_consumed=30, **options) == []


def test_an_endless_stream_has_no_length():
    with pytest.raises(TypeError, match="endless stream"):
        len(ShardedBatchSampler(10, 2))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_data_loader_reads_it(num_workers):
    dataset = TensorDataset(torch.arange(100, 110))
    sampler = ShardedBatchSampler(10, 4, dp_rank=1, dp_size=2, shuffle=False, num_epochs=1, drop_last=False)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=num_workers)
    assert len(loader) == 3
    assert [batch.tolist() for (batch,) in loader] == [[102, 103], [106, 107], [109]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"global_batch_size": 10}, "global_batch_size 10 does not divide over 4 data ranks; .* is 8 or 12"),
        ({"global_batch_size": 3}, "does not divide over 4 data ranks; the nearest that does is 4"),
        ({"global_batch_size": 0}, "global_batch_size is 0; expected a multiple of dp_size 4"),
        ({"dp_rank": 4}, "dp_rank is 4; expected 0 to 3"),
        ({"dp_size": 0}, "dp_size is 0; expected at least 1"),
        ({"num_samples": 0}, "num_samples is 0; expected at least 1"),
        ({"seed": -1}, "seed is -1; expected 0 or more"),
        ({"samples_consumed": -1}, "samples_consumed is -1"),
        ({"num_epochs": 0}, "num_epochs is 0; expected at least 1, or None"),
        ({"drop_last": False}, "endless stream has no last batch to keep"),
        ({"num_samples": 3, "num_epochs": 1, "drop_last": False}, "3 samples are left for 4 data ranks"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, message):
    options = {"num_samples": 50, "global_batch_size": 8, "dp_rank": 0, "dp_size": 4, **change}
    with pytest.raises(ValueError, match=message):
        ShardedBatchSampler(**options)


def test_the_order_of_a_data_loader_with_a_generator():
    generator = torch.Generator().manual_seed(3)
    order = TorchOrder(range(10), generator)
    loader = DataLoader(range(10), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3))
    epochs = [[int(index) for batch in loader for index in batch] for _ in range(4)]
    assert [order(epoch).tolist() for epoch in (0, 1, 3, 2)] == [epochs[0], epochs[1], epochs[3], epochs[2]]
    sampler = ShardedBatchSampler(10, 4, dp_rank=1, dp_size=2, num_epochs=2, samples_consumed=10, order=order)
    assert list(sampler) == [epochs[1][2:4], epochs[1][6:8]]
    assert torch.equal(generator.get_state(), torch.Generator().manual_seed(3).get_state())
