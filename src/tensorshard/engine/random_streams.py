"""The Engine's own random streams. torch's global generators are left to the user, outside of the Engine's calls."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tensorshard.comm.decisions import decide_once
from tensorshard.comm.world import world
from tensorshard.model.state_places import host_random_restored, host_random_states, set_host_random_states
from tensorshard.plan.mesh import Mesh
from tensorshard.torch_private.fake_tensors import unset_fake_temporarily

States = dict[str, torch.Tensor]
"""The state of a generator for each type of device, "cpu" and perhaps "cuda"."""


class RandomStreams:
    """One random stream for each device, which replaces torch's global one inside :meth:`installed`.

    Args:
        seed: of the streams.
        device: of this rank. The CPU always has a stream.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._device = device
        self._installed = False
        self._states: States = {}
        self.begin(0)

    def begin(self, step: int) -> None:
        """Begins the streams anew: at step 0 with the seed itself, later with a number made from seed and step."""
        seed = (self._seed + step * 0x9E37_79B9_7F4A_7C15) % 2**63  # far apart for steps close to each other
        with unset_fake_temporarily():
            self._states = {"cpu": torch.Generator().manual_seed(seed).get_state()}
            if self._device.type == "cuda":
                self._states["cuda"] = torch.Generator(self._device).manual_seed(seed).get_state()

    def states(self) -> States:
        """The states of the streams, for a checkpoint."""
        return dict(self._states)

    def load_states(self, states: States) -> None:
        """Continues the streams where :meth:`states` was called.

        Args:
            states: for every device that this rank has.
        """
        self._states = {device: states[device].clone() for device in self._states}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """A context in which torch's global generators are these streams. It may be nested.

        After an exception, the streams are as before, so that a repeated step draws the same numbers.
        """
        if self._installed or world().is_simulated:
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
        """Swaps the states of the streams and of torch's global generators."""
        others = {"cpu": torch.get_rng_state()}
        torch.set_rng_state(self._states["cpu"])
        if "cuda" in self._states:
            others["cuda"] = torch.cuda.get_rng_state(self._device)
            torch.cuda.set_rng_state(self._states["cuda"], self._device)
        self._states = others


@contextmanager
def kept_random_state(device: torch.device) -> Iterator[None]:
    """A context that leaves the global generators of Python, numpy and torch (of the CPU and `device`) as they were."""
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" and torch.cuda.is_initialized() else None
    try:
        with host_random_restored():
            yield
    finally:
        with unset_fake_temporarily():
            torch.set_rng_state(cpu)
            if cuda is not None:
                torch.cuda.set_rng_state(cuda, device)


def share_host_random_state(mesh: Mesh) -> None:
    """Gives ranks that compute the same samples the same state of Python's and numpy's global generators.

    They run the same code, in which a layer may be left out or a span masked by numbers from there. From then on they
    draw the same, as long as their code does. A collective.
    """
    for axis in ("tp", "pp", "cp"):
        if mesh.degrees[axis] > 1 and not world().is_simulated:
            set_host_random_states(decide_once(host_random_states, mesh.group(axis)))
