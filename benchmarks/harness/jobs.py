"""Passes a job to new ranks through a file, and reads what each of them measured."""

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_type_hints

from benchmarks.harness.ranks import run_ranks

_Job = TypeVar("_Job")


def run_job(
    module: str, job: Any, world_size: int, *, environment: Mapping[str, str], timeout: float
) -> list[dict[str, Any]]:
    """Runs `module` on the ranks. Its argument is a file that has `job` (a dataclass) as JSON.

    Returns:
        What each rank wrote, in their order.

    Raises:
        RankError: a rank failed or took more than `timeout` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        job_file = Path(folder) / "job.json"
        job_file.write_text(json.dumps(asdict(job)))
        run_ranks(module, [str(job_file)], world_size, environment=environment, timeout=timeout)
        return [json.loads(_measurement_file(job_file, rank).read_text()) for rank in range(world_size)]


def load_job(job_file: Path, kind: type[_Job]) -> _Job:
    """Reads the job, of class `kind`, that :func:`run_job` wrote, with the dataclasses in it, such as its work. Of
    several that a field may be, it is the one with these fields."""
    types = get_type_hints(kind)
    content = json.loads(job_file.read_text())
    return kind(**{name: _made(value, get_args(types[name]) or (types[name],)) for name, value in content.items()})


def _made(value: Any, kinds: Sequence[Any]) -> Any:
    for kind in filter(is_dataclass, kinds):
        if isinstance(value, dict) and {field.name for field in fields(kind)} == value.keys():
            return kind(**value)  # type: ignore[operator]
    return value


def hand_in(job_file: Path, rank: int, outcome: Mapping[str, Any]) -> NoReturn:
    """Writes what this rank measured, for :func:`run_job` to read, and ends the process."""
    from torch import distributed as dist

    _measurement_file(job_file, rank).write_text(json.dumps(outcome))
    dist.barrier()  # other ranks may still be reading what this rank sent
    # Destructors are skipped: a contender's threads may abort the process while the interpreter shuts down (seen
    # with DeepSpeed 3), and the results are on disk already.
    os._exit(0)


def _measurement_file(job_file: Path, rank: int) -> Path:
    return job_file.with_name(f"rank{rank}.json")
