"""Random words for boxes of a tensor: Random123's known answers, and parts that equal the whole."""

import itertools
import random

import numpy as np
import pytest
import torch

from tensorshard.random.philox import key_of, words_of_box
from tensorshard.random.philox_on_device import words_on_device

# Random123's kat_vectors: philox 4x64-10 of a counter and a key of zeros, and of ones.
ZEROS = [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]


def test_the_first_block_of_a_zero_key_is_random123s():
    # numpy counts before it computes, so its first block is that of counter 1, and block -1 that of counter 0.
    generator = np.random.Philox(key=0, counter=2**256 - 1)
    assert generator.random_raw(4).tolist() == ZEROS
    expected = np.random.Philox(key=0).random_raw(4).view(np.int32)
    assert words_of_box(0, (8,), (0,), (8,)).tolist() == expected.tolist()


@pytest.mark.slow
def test_parts_equal_the_whole():
    chooser = random.Random(0)
    for number in range(1000):
        whole = [chooser.choice([1, 2, 3, 5, 8, 13, 40]) for _ in range(chooser.randint(1, 5))]
        begin = [chooser.randrange(n) for n in whole]
        size = [chooser.randint(1, n - b) for n, b in zip(whole, begin, strict=True)]
        drawn = words_of_box(number, whole, [0] * len(whole), whole)
        part = words_of_box(number, whole, begin, size)
        there = words_on_device(number, whole, begin, size, torch.device("cpu"))
        cut = tuple(slice(b, b + n) for b, n in zip(begin, size, strict=True))
        assert torch.equal(part, drawn[cut]), (whole, begin, size)
        assert torch.equal(part, there), (whole, begin, size)


@pytest.mark.parametrize("shape", [(4, 12, 64, 64), (16, 700, 30), (3, 5000), (40_000,)])
def test_large_parts_equal_the_whole(shape):
    drawn = words_of_box(7, shape, [0] * len(shape), shape)
    for place in range(len(shape)):
        half = shape[place] // 2
        begin, size = [0] * len(shape), list(shape)
        begin[place], size[place] = half, shape[place] - half
        assert torch.equal(words_of_box(7, shape, begin, size), drawn.narrow(place, half, shape[place] - half))


def test_the_number_of_samples_does_not_matter():
    assert torch.equal(words_of_box(1, (2, 30), (0, 0), (2, 30)), words_of_box(1, (9, 30), (0, 0), (2, 30)))


def test_nothing_is_drawn_for_nothing():
    assert words_of_box(1, (4, 3), (0, 0), (0, 3)).shape == (0, 3)
    assert words_of_box(1, (), (), ()).shape == ()


def test_steps_sites_and_draws_are_independent():
    count = 1 << 16
    masks = [
        words_of_box(key_of(seed, step, site), (count,), (0,), (count,)) < 0
        for seed, step, site in itertools.product(range(2), range(3), ("a", "b"))
    ]
    signs = torch.stack(masks).double().mul_(2).sub_(1)
    z_of_means = signs.mean(1) * count**0.5
    assert z_of_means.abs().max() < 4.5
    correlations = (signs @ signs.t() / count * count**0.5)[tuple(torch.triu_indices(len(masks), len(masks), 1))]
    assert correlations.abs().max() < 4.5
    assert 0.6 < correlations.square().mean() < 1.5
    for lag in (1, 2, 7, 8, 64):
        assert abs((signs[0][lag:] * signs[0][:-lag]).sum()) / count**0.5 < 4.5
