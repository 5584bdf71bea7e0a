"""The training loop, the moments of it that a hook can act on, and the record of one step.

Also here: stopping a run from outside, at the same step on every rank.
"""

import os
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tensorshard.comm.collectives import on_group_device
from tensorshard.comm.groups import world_group
from tensorshard.engine.engine import Engine
from tensorshard.model.batches import batch_size
from tensorshard.torch_private import pytree

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_BATCH_SYSTEMS = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")
"""Environment variables of workers whose batch system may announce the end with SIGUSR1, as Slurm's --signal does."""


class StopRequest:
    """While open, Ctrl-C (SIGINT) and SIGTERM ask for an end after the current step. A context manager.

    Under torchrun and Slurm SIGUSR1 does, too.

    Signals reach the ranks at different moments, perhaps a step apart, or reach only one rank. So after each step
    the ranks ask each other whether one was asked to stop (:meth:`agreed`), and all stop together.

    The second SIGINT ends the process at once, by the system's own handler: it works even while the
    interpreter waits inside a collective. Further SIGTERMs are the same request again, as launchers repeat
    them.

    The ranks' answers are sent from the CPU, so that asking does not wait for a GPU. That takes a backend for the CPU,
    which ``join_world`` gives the default process group; in a world without one, they are sent from the GPU.
    """

    def __init__(self) -> None:
        self._previous: dict[int, Any] = {}
        self.requested = False

    def __enter__(self) -> "StopRequest":
        # Python allows signal handlers only in the main thread. In another thread, the program's own handlers stay.
        if threading.current_thread() is threading.main_thread():
            announced = (signal.SIGUSR1,) if any(name in os.environ for name in _BATCH_SYSTEMS) else ()
            for number in (*_STOP_SIGNALS, *announced):
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def agreed(self) -> bool:
        """Whether any rank was asked to stop. Collective: every rank calls it after the same step."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self.requested
        flag = torch.tensor(int(self.requested), dtype=torch.int32)
        with on_group_device(flag, world_group()) as sent:
            dist.all_reduce(sent, op=dist.ReduceOp.MAX)
        return bool(flag.item())


def ignore_stop_signals(worker_id: int) -> None:
    """A ``worker_init_fn`` for ``DataLoader``: its processes get Ctrl-C too, but are needed until the end."""
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class Hook:
    """Something that is done during training. Every method is optional.

    Every rank calls the same methods in the same order. A hook that communicates must do so on every rank: no
    ``if rank == 0`` around a collective.
    """

    @property
    def name(self) -> str:
        """The name under which its state is saved; unique among a trainer's hooks."""
        return type(self).__name__

    def before_train(self, trainer: "Trainer") -> None:
        """Once, before the first step."""

    def before_step(self, trainer: "Trainer") -> None:
        """Before the batch of each step is fetched."""

    def after_step(self, trainer: "Trainer", record: "StepRecord") -> None:
        """After each optimizer step."""

    def after_train(self, trainer: "Trainer") -> None:
        """Once, after the last step, also where training was interrupted; not after an error."""

    def on_error(self, trainer: "Trainer", error: Exception) -> None:
        """When training ends with `error`, perhaps on this rank alone. It is raised again afterwards."""

    def close(self) -> None:
        """Always last, whatever happened."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, in numbers, strings, lists and dicts; saved with each checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what :meth:`state_dict` gave. Called before training, if there is anything to take."""


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


@dataclass(frozen=True)
class BatchSize:
    """The size of a batch in samples, and in tokens if samples are sequences of token ids."""

    samples: int
    tokens: int | None

    @classmethod
    def of(cls, inputs: Any) -> "BatchSize":
        """The size of `inputs`: a tensor, or a tuple or dict of them, whose first dimension is the batch.

        Tokens are counted if the first tensor holds integers and has two dimensions, [batch, sequence].

        Raises:
            TypeError, ValueError: `inputs` do not show how many samples they hold.
        """
        samples = batch_size(inputs)
        first = next(leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim() > 0)
        is_text = first.dim() == 2 and not first.is_floating_point()
        return cls(samples, first.numel() if is_text else None)

    def times(self, count: int) -> "BatchSize":
        """The size of `count` batches like this one."""
        return BatchSize(self.samples * count, None if self.tokens is None else self.tokens * count)


@dataclass
class StepRecord:
    """One optimizer step, as hooks see it; they add what they measure to `metrics`.

    Attributes:
        step: optimizer steps done, this one included.
        loss: global mean loss, a tensor on the engine's device: reading it waits for the device.
        batch: size of the global batch.
        metrics: measurements by name, to be logged beside the loss.
        returned: what the loss function returned by name beside it, as ``Engine.metrics``: scalars on the device.
    """

    step: int
    loss: Tensor
    batch: BatchSize
    metrics: dict[str, float] = field(default_factory=dict)
    returned: Mapping[str, Tensor] = field(default_factory=dict)
