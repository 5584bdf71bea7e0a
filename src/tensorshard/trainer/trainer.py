"""The training loop."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tensorshard.engine.engine import Engine
from tensorshard.trainer.hooks.hook import Hook
from tensorshard.trainer.interruption import StopRequest
from tensorshard.trainer.step_record import BatchSize, StepRecord


class Trainer:
    """Takes an engine through its batches. Hooks do everything else.

    Args:
        engine: what :func:`tensorshard.parallelize` returned.
        loader: this data rank's batches of ``(inputs, targets)``; at its end it begins again.
        max_steps: optimizer steps of the whole run, those before a resume included.
        hooks: called in this order at every moment. One that measures comes before the one that logs; one
            that saves comes last. :func:`tensorshard.trainer.run.run` shows the usual ones.
        replay_every: steps between those whose first micro-batch is computed twice and compared before the update, see
            :meth:`Engine.replay`; 0 for none.
        stop: called after each step; True ends training. None: training never stops early.

    Attributes:
        samples_consumed: samples trained on so far, over all data ranks.
        last_record: of the last step taken, or None.
        interrupted: whether `stop` ended training before `max_steps`.

    Raises:
        ValueError: two hooks have the same name, under which their states would be saved.
    """

    def __init__(
        self,
        engine: Engine,
        loader: Iterable[Any],
        *,
        max_steps: int,
        hooks: Sequence[Hook] = (),
        stop: StopRequest | None = None,
        replay_every: int = 0,
    ) -> None:
        if max_steps < 1:
            raise ValueError(f"max_steps is {max_steps}; expected at least 1.")
        names = [hook.name for hook in hooks]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"There are several hooks named {', '.join(twice)}; give each its own `name`, under which "
                f"its state is saved."
            )
        self.engine = engine
        self.loader = loader
        self.max_steps = max_steps
        self.hooks = list(hooks)
        self.stop = stop
        self.replay_every = replay_every
        self.samples_consumed = 0
        self.last_record: StepRecord | None = None
        self.interrupted = False

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.engine.step_count

    def fit(self) -> None:
        """Trains until `max_steps`, or until the step in which any rank is asked to stop.

        Raises:
            NonFiniteLossError: from the engine, before the update that would have ruined the weights.
        """
        try:
            for hook in self.hooks:
                hook.before_train(self)
            batches = self._batches()
            while self.step < self.max_steps and not self.interrupted:
                for hook in self.hooks:
                    hook.before_step(self)
                inputs, targets = next(batches)
                if self.replay_every and (self.step + 1) % self.replay_every == 0:
                    self.engine.replay(inputs, targets)
                loss = self.engine.step(inputs, targets)
                batch = BatchSize.of(inputs).times(self.engine.mesh.dp_size)
                self.samples_consumed += batch.samples
                self.last_record = StepRecord(self.step, loss, batch, returned=self.engine.metrics)
                for hook in self.hooks:
                    hook.after_step(self, self.last_record)
                self.interrupted = self.stop is not None and self.step < self.max_steps and self.stop.agreed()
            for hook in self.hooks:
                hook.after_train(self)
        except Exception as error:
            for hook in self.hooks:
                hook.on_error(self, error)
            raise
        finally:
            for hook in self.hooks:
                hook.close()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside the engine's own state: the ``extra`` of ``Engine.save``."""
        return {
            "samples_consumed": self.samples_consumed,
            "hooks": {hook.name: state for hook in self.hooks if (state := hook.state_dict())},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what ``Engine.load`` returned. Hooks that were not there when it was saved start anew."""
        self.samples_consumed = int(state["samples_consumed"])
        for hook in self.hooks:
            if hook.name in state["hooks"]:
                hook.load_state_dict(state["hooks"][hook.name])

    def _batches(self) -> Iterator[Any]:
        """Batches without end."""
        while True:
            count = 0
            for batch in self.loader:
                count += 1
                yield batch
            if not count:
                raise ValueError("The loader gave no batch; expected at least one batch of (inputs, targets).")
