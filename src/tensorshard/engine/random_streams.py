"""The Engine's own random numbers: torch's global generators are the user's, before, between and after its calls."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tensorshard.torch_private.fake_tensors import active_fake_mode, unset_fake_temporarily

States = dict[str, torch.Tensor]
"""The state of a generator for each type of device, "cpu" and perhaps "cuda"."""


class RandomStreams:
    """One random stream a device, which takes the place of torch's global one within :meth:`installed`.

    Args:
        seed: where the streams begin.
        device: of this rank. The CPU always has a stream.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._device = device
        self._installed = False
        self._states: States = {}
        self.begin(0)

    def begin(self, step: int) -> None:
        """Begins the streams anew: at step 0 with the seed itself, later with a number made of the two."""
        seed = (self._seed + step * 0x9E37_79B9_7F4A_7C15) % 2**63  # far apart for steps close to each other
        with unset_fake_temporarily():
            self._states = {"cpu": torch.Generator().manual_seed(seed).get_state()}
            if self._device.type == "cuda":
                self._states["cuda"] = torch.Generator(self._device).manual_seed(seed).get_state()

    def states(self) -> States:
        """Where the streams are, for a checkpoint."""
        return dict(self._states)

    def load_states(self, states: States) -> None:
        """Goes on where :meth:`states` was called.

        Args:
            states: for every device that this rank has.
        """
        self._states = {device: states[device].clone() for device in self._states}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within this, all that draws from torch's global generators draws from these streams.

        If an exception leaves it, the streams are where they were before, so that a step that is taken again draws the
        same. May be nested.
        """
        if self._installed or active_fake_mode() is not None:
            yield
            return
        before = self.states()
        self._installed = True
        self._exchange()
        try:
            yield
        except BaseException:
            self._remove()
            self._states = before
            raise
        self._remove()

    def _remove(self) -> None:
        self._installed = False
        self._exchange()

    def _exchange(self) -> None:
        """The streams' states become the global ones, and the other way round."""
        others = {"cpu": torch.get_rng_state()}
        torch.set_rng_state(self._states["cpu"])
        if "cuda" in self._states:
            others["cuda"] = torch.cuda.get_rng_state(self._device)
            torch.cuda.set_rng_state(self._states["cuda"], self._device)
        self._states = others


@contextmanager
def kept_random_state(device: torch.device) -> Iterator[None]:
    """Leaves torch's global generators, of the CPU and of `device`, as they were."""
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" and torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        with unset_fake_temporarily():
            torch.set_rng_state(cpu)
            if cuda is not None:
                torch.cuda.set_rng_state(cuda, device)
