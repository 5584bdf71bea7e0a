"""Whether a checkpoint is whole, cheaply or byte for byte, and what it holds."""

from pathlib import Path
from typing import Any

from tensorshard.common.stores import local_or_url
from tensorshard.weights.files.checkpoint_files import OpenCheckpoint, open_checkpoint
from tensorshard.weights.files.manifest import CheckedFile, DamagedCheckpointError

__all__ = ["DamagedCheckpointError", "check", "is_whole", "why_not_whole"]


def why_not_whole(path: Any) -> str | None:
    """What is wrong with the checkpoint at `path`, a folder or a URL, as far as is seen without reading its tensors.

    Returns:
        None if the manifest and ``engine.json`` are as they were written, and all files are there with their sizes;
        else a sentence that names the first file that is not.
    """
    try:
        open_checkpoint(local_or_url(path))
    except (ValueError, OSError, KeyError) as error:
        return str(error)
    return None


def is_whole(path: Any) -> bool:
    """Whether `path` is a whole checkpoint, as far as is seen without reading its tensors."""
    return why_not_whole(path) is None


def check(path: Any) -> OpenCheckpoint:
    """Reads every byte of the checkpoint at `path`, a folder or a URL, and compares it with the manifest.

    Checkpoints of format 1 have no checksums: of them, only the sizes are checked.

    Returns:
        What the checkpoint says about itself.

    Raises:
        FileNotFoundError: it is not a checkpoint.
        DamagedCheckpointError: a file is missing, cut off or changed; the message names it.
    """
    place: Path | str = local_or_url(path)
    checkpoint = open_checkpoint(place)
    if checkpoint.manifest is not None:
        for name, entry in checkpoint.manifest.files.items():
            with CheckedFile(checkpoint.store, name, entry) as file:
                file.check()
    return checkpoint
