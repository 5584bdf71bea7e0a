"""Checkpoints without tensors, which are whole all the same."""

from pathlib import Path

from tensorshard.weights.files.manifest import FORMAT, MANIFEST, Manifest, entry_of


def write_whole(path: Path) -> None:
    """Writes one to the folder `path`."""
    path.mkdir(parents=True, exist_ok=True)
    document = f'{{"format": {FORMAT}}}'.encode()
    (path / "engine.json").write_bytes(document)
    (path / MANIFEST).write_bytes(Manifest("engine.json", {"engine.json": entry_of(document)}, {}).to_bytes())
