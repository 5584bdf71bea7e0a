"""What is recorded of a run: each step's metrics, and each start of the run."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from tensorshard.model.batches import batch_size
from tensorshard.torch_private import pytree


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
    """

    step: int
    loss: Tensor
    batch: BatchSize
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Session:
    """One start of a run; a resumed run has several.

    Args:
        first_step: the first step that it takes.
        steps: how many the run is to have in all.
        world_size: the number of ranks.
        device: what they compute on, "cpu" or "cuda".
        plan: the fields of the resolved plan.
        held_before_bytes: what each rank held before the model was made, counted as the peak is.
        estimated_bytes: live tensors at the peak of each rank, as estimated; None without an estimate.
        estimated_step_seconds: of a step, as estimated; None where the speed of the hardware is not known.
    """

    first_step: int
    steps: int
    world_size: int
    device: str
    plan: dict[str, Any]
    held_before_bytes: list[int]
    estimated_bytes: list[int] | None = None
    estimated_step_seconds: float | None = None


def write_session(path: Path, session: Session) -> None:
    """Appends `session` to the file `path` as one line of JSON."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(session)) + "\n")


def read_sessions(path: Path) -> list[Session]:
    """What :func:`write_session` wrote, in order. An unfinished last line is left out. Empty without a file.

    Raises:
        ValueError: a line has other fields.
    """
    if not path.is_file():
        return []
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    try:
        return [Session(**json.loads(line)) for line in lines]
    except TypeError as error:
        raise ValueError(f"{path} was written by another version of tensorshard ({error}); delete it") from error
