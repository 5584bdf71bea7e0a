"""Which samples of the whole batch each forward of an Engine has, for random numbers that belong to them."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from tensorshard.comm.collectives import all_gather_into
from tensorshard.model.forward_contexts import RootRole, hook_root, surround_parts
from tensorshard.plan.mesh import Mesh
from tensorshard.plan.plan import Plan
from tensorshard.random.call_sites import ModelRandomness
from tensorshard.random.trial_runs import forward, samples_of
from tensorshard.torch_private.autograd import is_in_backward

logger = logging.getLogger("tensorshard")

REMEDY = "set Plan(random='by_rank'), under which each rank draws by itself and the numbers depend on the plan"


class SameNumbers:
    """The random numbers of a model under an Engine.

    In steps and evaluations, micro-batches are told where they are in the whole batch. In a loop of one's own, data
    ranks have equally many samples in each forward, and forwards are counted between updates.

    Args:
        device: of this rank.
        step_count: says how many steps were taken.
    """

    def __init__(
        self,
        randomness: ModelRandomness,
        plan: Plan,
        mesh: Mesh,
        device: torch.device,
        step_count: Callable[[], int],
    ) -> None:
        self._randomness, self._mesh, self._device, self._step_count = randomness, mesh, device, step_count
        randomness.first_of_rank = self._find_first
        if mesh.rank == 0 and (mesh.dp_size > 1 or plan.micro_batches > 1):
            randomness.note_host_draws = _warn_of_host_draws
        self._placed, self._begun = False, 0
        self._counted: list[int] = []
        self._first_of_rank: int | None = None
        self._index = 0
        self._sizes: list[int] = []
        self._parts: Sequence[Any] = ()

    @property
    def belong_to_rows(self) -> bool:
        """Whether some belong to rows that values choose, as those of routed experts do."""
        return bool(self._randomness.row_modules)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around each call of the Engine that runs the model."""
        self._randomness.begin_step(self._step_count())
        self._randomness.begin_again()
        try:
            yield
        finally:
            self._placed, self._counted = False, []

    def begin(self, parts: Sequence[Any], own: Sequence[bool], first: int | None = None) -> None:
        """Called before the micro-batches of a step or an evaluation. A collective of the data ranks.

        Args:
            parts: the inputs of each. own: whether it has samples of this rank, and not one that stands in.
            first: how many samples of the whole batch come before them, if that is known.
        """
        self._parts = parts
        self._sizes = [samples_of(part) for part in parts]
        counted = [size if is_own else 0 for size, is_own in zip(self._sizes, own, strict=True)]
        self._counted, self._first_of_rank = counted, first
        if first is None and self._randomness.may_draw:
            self._find_first()

    def _find_first(self) -> int:
        """How many samples of the step's whole batch come before those of this rank; 0 outside of steps, where forwards
        say it. A collective, once a step."""
        if not self._placed and not self._counted:
            return 0
        if self._first_of_rank is None:
            self._first_of_rank = first_sample(sum(self._counted), self._mesh, self._device)
        return self._first_of_rank

    def place(self, index: int) -> None:
        """Called before the forwards of each micro-batch that :meth:`begin` was told of."""
        self._placed = True
        self._begun += 1
        self._index = index
        self._randomness.begin_samples(sum(self._counted[:index]), self._sizes[index])

    @property
    def micro_batch(self) -> int | None:
        """How many micro-batches have begun so far; None outside of steps."""
        return self._begun if self._placed else None

    def first_of(self, rows: int) -> int | None:
        """The number of the first of `rows` that belong to the samples of the micro-batch; None outside of steps."""
        if not self._placed:
            return None
        first, samples = self._find_first() + sum(self._counted[: self._index]), self._sizes[self._index]
        return first * rows // samples if samples else 0

    def loss_of_output(self, loss_fn: Callable[[Any, Any], Any], output: Any, targets: Any) -> Any:
        """``loss_fn(output, targets)``, of the micro-batch whose forward was the last."""
        inputs = self._randomness.inputs

        def run(model: nn.Module, given: Any) -> None:
            loss_fn(forward(model, given[0]), given[1])

        with self._randomness.loss(run, (inputs, targets)):
            return loss_fn(output, targets)

    def loss_of_model(self, loss_fn: Callable[[Any, Any], Any], model: Any, batch: Any) -> Any:
        """``loss_fn(model, batch)``, of the micro-batch that was placed."""

        def run(model: nn.Module, given: Any) -> None:
            loss_fn(model, given)

        with self._randomness.loss(run, batch):
            return loss_fn(model, batch)

    @contextmanager
    def stage(self, index: int) -> Iterator[None]:
        """Around a stage's forward of a micro-batch."""
        self.place_stage(index)
        with self._randomness.forward():
            yield

    def place_stage(self, index: int) -> None:
        """Called before a stage computes anything of a micro-batch."""
        self.place(index)
        self._randomness.note_inputs(self._parts[index])

    def _alone(self, name: str, args: Any, kwargs: Any) -> AbstractContextManager[None]:
        self._randomness.begin_step(self._step_count())
        return self._randomness.part(name, (args, kwargs), self._mesh.dp_rank * samples_of((args, kwargs)))

    def _is_called_alone(self) -> bool:
        return not (self._placed or self._randomness.is_running or is_in_backward())

    def follow(self, model: nn.Module) -> None:
        """Follows the forwards of `model`, whoever calls it, and calls of its parts that a loop makes itself."""
        opened: list[ExitStack] = []
        parts = surround_parts(model, self._alone, self._is_called_alone)
        known = 0

        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            nonlocal known
            self._randomness.begin_step(self._step_count())
            if not self._placed:
                samples = samples_of((args, kwargs))
                self._randomness.continue_with(self._mesh.dp_rank * samples, samples)
            self._randomness.note_inputs((args, kwargs))
            if known != len(self._randomness.quiet):  # hooks take time
                known = len(self._randomness.quiet)
                for name in self._randomness.quiet & parts.keys():
                    parts.pop(name)()
            opened.append(ExitStack())
            opened[-1].enter_context(self._randomness.forward())

        def leave(*_: Any) -> None:
            if opened:
                opened.pop().close()

        hook_root(model, RootRole.SAME_NUMBERS, before=enter, with_kwargs=True)
        hook_root(model, RootRole.SAME_NUMBERS, after=leave, always=True)


def first_sample(samples: int, mesh: Mesh, device: torch.device) -> int:
    """How many samples earlier data ranks have, if this one has `samples`. A collective of the data ranks."""
    if mesh.dp_size == 1:
        return 0
    sizes = torch.empty(mesh.dp_size, dtype=torch.int64, device=device)
    mine = torch.tensor([samples], device=device)
    all_gather_into(sizes, mine, mesh.dp_group, what="how many samples each data rank has")
    return int(sizes[: mesh.dp_rank].sum())


def _warn_of_host_draws() -> None:
    logger.warning(
        "the model draws from Python's or numpy's global generator, more numbers for more samples, and they belong to "
        "no sample: each data rank and micro-batch draws others, and with several of them a step is not that of one "
        "process. What torch draws (torch.rand, torch.bernoulli) is the same at every layout"
    )
