"""The id of a run at a service, kept in the run's directory, so that a resumed run goes on under it."""

from pathlib import Path


def read_id(path: Path) -> str | None:
    """The id in the file `path`; None if there is none yet."""
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None


def keep_id(path: Path, name: str) -> None:
    """Writes the id `name` to the file `path`."""
    path.write_text(f"{name}\n", encoding="utf-8")
