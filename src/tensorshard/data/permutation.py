"""A random order of any number of samples that takes no memory to hold."""

import numpy as np

_ROUNDS = 8


def permute(positions: np.ndarray, size: int, *, seed: int, epoch: int) -> np.ndarray:
    """Where a pseudo-random permutation of ``range(size)`` sends each of ``positions``.

    A Feistel network permutes the smallest ``[0, 4**k)`` that holds ``size`` values; a value that lands
    outside ``[0, size)`` is sent through again until it lands inside ("cycle walking"), which keeps the map
    one-to-one: J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002. At most four
    passes are expected for each value, and nothing of length ``size`` is ever made.

    Args:
        positions: integers in ``[0, size)``, of any shape.
        size: number of elements of the permutation.
        seed: non-negative; with ``epoch``, the key of the permutation.
        epoch: non-negative.

    Returns:
        int64 array of the shape of ``positions``.

    Raises:
        ValueError: a position outside ``[0, size)``.
    """
    values = np.array(positions, dtype=np.int64)
    if values.size and not 0 <= values.min() <= values.max() < size:
        raise ValueError(f"positions run from {values.min()} to {values.max()}; expected 0 to {size - 1}.")
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = np.random.SeedSequence((seed, epoch)).generate_state(_ROUNDS, np.uint64)

    walking = np.ones(values.shape, dtype=bool)
    while walking.any():
        values[walking] = _feistel(values[walking].astype(np.uint64), half_bits, keys).astype(np.int64)
        walking &= values >= size
    return values


def _feistel(values: np.ndarray, half_bits: int, keys: np.ndarray) -> np.ndarray:
    """A balanced Feistel network on ``2 * half_bits`` bits, one round a key."""
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_scramble(right ^ key) & mask)
    return (left << shift) | right


def _scramble(values: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea, Flood, OOPSLA 2014): each input bit stirs every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
