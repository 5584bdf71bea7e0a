"""What is printed where a run ended early and could not say so itself: how far it came, and how it goes on."""

import sys
from pathlib import Path

from omegaconf import DictConfig

from tensorshard.common.stores import local_or_url
from tensorshard.common.words import fit, terminal_width
from tensorshard.trainer.run_directory import RunDirectory


def ending_of(config: DictConfig, path: Path) -> str:
    """What the run in the folder `path` has reached, where its files are, and the command that goes on, from its newest
    whole checkpoint. "" for a run that has not begun to train."""
    from tensorshard.report.figures import figures
    from tensorshard.report.read_run import read_run
    from tensorshard.trainer.report import again_command, places, resume_command

    given = config.train.get("checkpoint_dir")
    directory = RunDirectory(path, None if given is None else local_or_url(given))
    try:
        newest = directory.newest_checkpoint()
        if newest is None and not directory.metrics.is_file():
            return ""
        rows = [*figures([read_run(path)]), *((name, [str(place)]) for name, place in places(directory).items())]
    except Exception:  # whatever ended the run is what counts
        return ""
    width = terminal_width(sys.stderr)
    lines = [fit(f"{name:<21} {cells[0]}", width) for name, cells in rows]
    if newest is None:
        lines += ["no checkpoint was written yet; begin anew with:", again_command(config, directory)]
    else:
        step = directory.step_of(newest)
        lines += [f"the checkpoint is after step {step}; continue with:", resume_command(config, directory)]
    return "\n".join(lines)
