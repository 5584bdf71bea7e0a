"""The random numbers of an Engine's calls. torch's global generators are left to the user, outside of them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from tensorshard.comm.decisions import decide_once
from tensorshard.comm.world import world
from tensorshard.model.state_places import host_random_restored, host_random_states, set_host_random_states
from tensorshard.plan.mesh import Mesh
from tensorshard.random.kernels import drawing_from, repeats_in_backward
from tensorshard.random.philox import key_of
from tensorshard.random.rank_stream import RankStream, kept_torch_random_state, seeded
from tensorshard.random.users_draws import UsersDraws


class EngineRandom:
    """The seed of a run, and what is drawn from it.

    Inside :meth:`installed`, torch's global generators begin with a number made of the seed, the step, and how many
    calls of this kind the step has had. With ``random="by_rank"``, the model draws from them.

    Args:
        seed: of the run.
        place: this rank's place among those that draw other numbers.
        device: of this rank.
        shares_samples: whether ranks with the same place draw for different parts of the same samples.
    """

    def __init__(self, seed: int, place: int, device: torch.device, *, shares_samples: bool) -> None:
        self.seed = seed
        self._place = place
        self._device = device
        self._stream = RankStream(device) if shares_samples else None
        if self._stream is not None:
            repeats_in_backward(self._stream)
        self._installed = False
        self._calls: dict[str, tuple[int, int]] = {}  # the step of the last ones, and their number
        self.step_count: Callable[[], int] = int
        self.users_draws: UsersDraws | None = None

    def of_samples(self) -> AbstractContextManager[None]:
        """A context in which the random numbers that you draw belong to samples, so that they are the same under every
        plan: noise for a diffusion model, the places that a masked language model has to guess.

        Each number depends on the seed, the step, how many such contexts and draws came before in this step, and the
        sample's place in the whole batch. The first dimension of what is drawn is the samples of this data rank, which
        follow those of earlier ranks; a scalar is the same on all ranks. All data ranks have equally many samples, but
        for batches of :meth:`tensorshard.Engine.loader`. Loss functions may use it in a step, too.

        Examples:
            >>> adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
            >>> mse = torch.nn.functional.mse_loss
            >>> engine = ts.parallelize(torch.nn.Linear(4, 4), ts.Plan(), optimizer=adamw, loss_fn=mse)
            >>> clean = torch.ones(8, 4)
            >>> with engine.random.of_samples():
            ...     noise = torch.randn_like(clean)
            >>> loss = engine.step(clean + noise, clean)
        """
        assert self.users_draws is not None
        return self.users_draws.drawing()

    def state_dict(self) -> int:
        """The seed, for a checkpoint. With the step, it says what will be drawn."""
        return self.seed

    def load_state_dict(self, seed: int) -> None:
        """Goes on with the seed of the run that was saved."""
        self.seed = seed

    @contextmanager
    def installed(self, kind: str | None = None) -> Iterator[None]:
        """A context in which torch's global generators are this rank's. It may be nested.

        After an exception, the call is not counted, so that a repeated step draws the same numbers.

        Args:
            kind: of the call, such as "step". Evaluations are counted apart, so that they change nothing for training.
        """
        if self._installed or world().is_simulated:
            yield
            return
        kind = kind or ("forward" if torch.is_grad_enabled() else "evaluation")
        now = self.step_count()
        step, number = self._calls.get(kind, (now, 0))
        number = number if step == now else 0
        with seeded(key_of(self.seed, now, kind, number, self._place) % 2**63, self._device):
            self._installed = True
            try:
                with nullcontext() if self._stream is None else drawing_from(self._stream):
                    yield
            finally:
                self._installed = False
        self._calls[kind] = now, number + 1


@contextmanager
def kept_random_state(device: torch.device) -> Iterator[None]:
    """A context that leaves the global generators of Python, numpy and torch (of the CPU and `device`) as they were."""
    with host_random_restored(), kept_torch_random_state(device):
        yield


def share_host_random_state(mesh: Mesh) -> None:
    """Gives ranks that compute the same samples the same state of Python's and numpy's global generators.

    They run the same code, in which a layer may be left out or a span masked by numbers from there. From then on they
    draw the same, as long as their code does. A collective.
    """
    for axis in ("tp", "pp", "cp"):
        if mesh.degrees[axis] > 1 and not world().is_simulated:
            set_host_random_states(decide_once(host_random_states, mesh.group(axis)))
