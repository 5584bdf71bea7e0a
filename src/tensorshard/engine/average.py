"""Averages of an Engine's weights over its updates, sharded as its master weights are."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any, Literal

import torch

from tensorshard.comm.sharding import to_local
from tensorshard.data_parallel.sharded_model import ShardedModel

Decay = float | None | Callable[[int], float]
Start = Literal["first_update", "initial"]
_STARTS: tuple[Start, ...] = ("first_update", "initial")


class WeightAverage:
    """An average of the trained weights, made by :meth:`tensorshard.Engine.average`.

    It holds what ``torch.optim.swa_utils.AveragedModel`` holds (Izmailov et al. 2018), this rank's part of it: the
    first update copies the weights, each later one moves the average towards them. One that starts with the initial
    weights has them already, and every update moves it.

    Args:
        averages: that this one belongs to.
        decay, every, start: as for :meth:`tensorshard.Engine.average`.

    Attributes:
        start: "first_update" or "initial".
        updates: how many weights it is an average of, the initial ones among them where it starts with these.
        fewest: what `updates` begins at.
        tensors: this rank's parts, by the parameters' names: laid out as the masters.
    """

    def __init__(self, averages: "WeightAverages", name: str, decay: Decay, every: int | None, start: Start) -> None:
        self._averages = averages
        self._name = name
        self._decay = decay
        self._every = every
        self.start = start
        self.updates = self.fewest = int(start == "initial")
        self.waited = 0  # updates of the weights since the last one
        self.tensors: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def update(self) -> None:
        """Moves the average towards the present weights. Called by yourself if ``every=None``. Every rank calls it.

        Raises:
            RuntimeError: within :meth:`applied`.
        """
        self._averages.check_none_applied(f"update() of the average {self._name!r}")
        self._averages.finish_update()
        self.move()

    @torch.no_grad()
    def after_update(self) -> None:
        """Called after each update of the weights."""
        self.waited += 1
        if self._every is not None and self.waited >= self._every:
            self.move()

    def move(self) -> None:
        """Moves the average towards the present weights, which no update is changing."""
        self.waited = 0
        weight = 1.0 if self.updates == 0 else 1.0 - self._decay_now()
        for name, master in self._averages.sharded.masters().items():
            if name in self.tensors:
                local, average = to_local(master.detach()), to_local(self.tensors[name])
                if self.updates == 0:
                    average.copy_(local)
                else:
                    average.lerp_(local, weight)
        self.updates += 1

    def _decay_now(self) -> float:
        if self._decay is None:
            return self.updates / (self.updates + 1)
        if not callable(self._decay):
            return self._decay
        decay = self._decay(self.updates)
        _check_decay(decay, f"decay({self.updates})")
        return decay

    @torch.no_grad()
    def follow(self) -> None:
        """Takes in the parameters that are trained by now, with the value that they have had so far."""
        for name, master in self._averages.sharded.trained_masters().items():
            if name not in self.tensors:
                self.tensors[name] = master.detach().clone()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the model has the average in place of its weights: to evaluate, predict, generate and
        export. Then it has its own again, to the last bit. Every rank calls it.

        Inside, ``engine.full_state_dict`` and ``engine.save_pretrained`` write the average. Updates, ``engine.save``
        and ``engine.load`` raise an error. Buffers, running statistics too, are the model's own. It takes no further
        memory, and two all-gathers of the weights.

        Raises:
            RuntimeError: an average is applied already.
        """
        self._averages.check_none_applied(f"applied() of the average {self._name!r}")
        self._averages.finish_update()
        self._exchange()
        self._averages.applied = self._name
        try:
            yield
        finally:
            self._averages.applied = None
            self._exchange()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the model with the average as its weights, as :meth:`tensorshard.Engine.predict` gives it."""
        with self.applied():
            return self._averages.predict(*args, **kwargs)

    @torch.no_grad()
    def _exchange(self) -> None:
        sharded = self._averages.sharded
        sharded.finish_gather()
        masters = sharded.masters()
        for name, tensor in self.tensors.items():
            own, average = to_local(masters[name].detach()), to_local(tensor)
            kept = own.clone()
            own.copy_(average)
            average.copy_(kept)
        sharded.all_gather_loaded()


class WeightAverages:
    """The averages of one Engine.

    Args:
        finish_update: waits until the weights are those after the last update. A collective.
        predict: computes outputs.

    Attributes:
        by_name: all averages.
        applied: the name of the one that the model has in place of its weights; None for its own.
    """

    def __init__(self, sharded: ShardedModel, finish_update: Callable[[], None], predict: Callable[..., Any]) -> None:
        self.sharded = sharded
        self.finish_update = finish_update
        self.predict = predict
        self.by_name: dict[str, WeightAverage] = {}
        self.applied: str | None = None
        self._due = False  # the last update was not over when it was noted

    def add(self, name: Any, decay: Decay, every: Any, start: Any) -> WeightAverage:
        """A new average, of the weights from now on.

        Raises:
            TypeError, ValueError: an argument is of the wrong kind; the name is taken.
        """
        if not isinstance(name, str) or not name or "." in name:
            raise ValueError(f"engine.average was given the name {name!r}; it must be a word without dots")
        if name in self.by_name:
            raise ValueError(f"there is an average called {name!r} already; give this one another name")
        if decay is not None and not callable(decay):
            _check_decay(decay, "decay")
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ValueError(
                f"engine.average was given every={every!r}; it must be a number of updates of at least 1, or None if "
                f"you call update() of the average yourself"
            )
        if start not in _STARTS:
            raise ValueError(
                f"engine.average was given start={start!r}; it must be 'first_update', for an average that begins with "
                f"the weights after the first update, as torch's AveragedModel does, or 'initial', for one that begins "
                f"with those before it, as copy.deepcopy(model) does"
            )
        self.check_none_applied("engine.average")
        self.finish_update()
        average = WeightAverage(self, name, decay, every, start)
        average.follow()
        self.by_name[name] = average
        return average

    def before_update(self) -> None:
        """Called before each update of the weights, when the last one is over."""
        self.check_none_applied("an update of the weights")
        self.take_in_update()
        for average in self.by_name.values():
            average.follow()

    def after_update(self, *, pending: bool) -> None:
        """Called after each update.

        Args:
            pending: whether it goes on.
        """
        self._due = True
        if not pending:
            self.take_in_update()

    def take_in_update(self) -> None:
        """Takes in the last update, which is over now."""
        due, self._due = self._due, False
        if due:
            for average in self.by_name.values():
                average.after_update()

    def check_none_applied(self, call: str) -> None:
        """Raises:
        RuntimeError: the model has an average in place of its weights.
        """
        if self.applied is not None:
            raise RuntimeError(
                f"{call} was asked for while the model has the average {self.applied!r} in place of its weights: "
                f"leave the context of its applied() first"
            )


def _check_decay(decay: Any, what: str) -> None:
    if isinstance(decay, bool) or not isinstance(decay, Real) or not 0 <= float(decay) <= 1:
        raise (ValueError if isinstance(decay, Real) else TypeError)(
            f"{what} of engine.average is {decay!r}; it must be a number from 0 to 1 such as 0.999, a function from "
            f"the number of updates to one, or None for the mean over all updates"
        )
