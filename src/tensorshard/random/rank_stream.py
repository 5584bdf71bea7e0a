"""Numbers from torch's generators, for ranks that compute different parts of the same samples."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tensorshard.torch_private.fake_tensors import unset_fake_temporarily


class RankStream:
    """Each draw takes one number of the CPU's generator, and draws from that.

    So ranks whose parts differ in size go on with the same numbers, and so does recomputation, which restores the
    generator. Parts of the same size get the same numbers.

    Args:
        device: of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def repeats(self) -> bool:
        """As :class:`tensorshard.random.kernels.Source` says: draws in a backward cannot be told from repeated ones."""
        return True

    @contextmanager
    def draw(self) -> Iterator[None]:
        """Around the call of a random operator."""
        with unset_fake_temporarily():
            seed = int(torch.randint(1 << 62, ()))
        with seeded(seed, self._device):
            yield


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, torch's global generators begin with `seed`; afterwards they go on as before."""
    with kept_torch_random_state(device):
        torch.manual_seed(seed)
        yield


@contextmanager
def kept_torch_random_state(device: torch.device) -> Iterator[None]:
    """A context that leaves torch's global generators, of the CPU and of `device`, as they were."""
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" and torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        with unset_fake_temporarily():
            torch.set_rng_state(cpu)
            if cuda is not None:
                torch.cuda.set_rng_state(cuda, device)
