"""What is known of a run before its first step, kept for a report: ``sessions.jsonl`` in the run's directory."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


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
