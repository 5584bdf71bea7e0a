"""``tensorshard check``: does the installation work, and how fast is this machine?"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tensorshard.commands.arguments import HelpFormat
from tensorshard.commands.env import describe_machine
from tensorshard.common.paths import cache_folder
from tensorshard.config import ConfigError
from tensorshard.host.memory import cores_here

_EPILOG = """\
examples:
  tensorshard check
      in about a minute: versions, steps of two ranks against one process, measured rates, and two small runs whose
      memory and time are predicted first
  tensorshard estimate my_config.py --world-size 2 --gpu this-machine
      a step's time with the rates that were measured
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds ``check`` to the command line."""
    parser = commands.add_parser(
        "check",
        help="check the installation and measure this machine, for estimates of time",
        description="Prints versions and backends, predicts the memory and the time of two small runs, compares steps "
        "of two ranks with one process, and measures matrix products, memory, collectives, the disk, and then the two "
        "runs. What it finds is kept as the hardware 'this-machine' of estimates. Exit status 1 means that something "
        "does not work.",
        epilog=_EPILOG,
        formatter_class=HelpFormat,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--save",
        metavar="FILE",
        help="where the predictions go before anything is measured, as JSON, and then what was measured (default: a "
        "file in the cache folder)",
    )
    parser.set_defaults(command=run, parser=parser, words=None)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code.

    Raises:
        ConfigError: the file of predictions cannot be written; nothing was measured.
        LaunchError, WorkerFailedError: two ranks do not work together, or compute other results than one process.
    """
    from tensorshard.predict.hardware import THIS_MACHINE, Hardware, rates_from_json, save_measured
    from tensorshard.trainer import checked_predictions
    from tensorshard.trainer.launch.launcher import World, launch, visible_gpus
    from tensorshard.trainer.machine_check import describe
    from tensorshard.trainer.machine_check import run as run_check
    from tensorshard.trainer.memory import gpu_name, hardware_of_run

    print(describe_machine(sys.stdout), flush=True)
    gpus = visible_gpus()
    world = World(nproc=min(gpus, 2) or 2)
    device = "cuda" if gpus else "cpu"
    begin = time.monotonic()
    found = checked_predictions.predict(world.size, device, hardware_of_run(gpus=gpus > 0))
    name = gpu_name() or "GPU" if gpus else f"CPU, {cores_here()} cores"
    values = checked_predictions.document(found, world.size, device, name)
    file = _file(args.save, device)
    _write(file, values)
    where = "" if file is None else f", written to {file}"
    print(f"predicted before anything is measured{where}:\n{checked_predictions.describe(values)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="tensorshard-check-") as folder:
        results = Path(folder) / "results.json"
        launch(run_check, (str(results),), world)
        measured = json.loads(results.read_text())
        rates = rates_from_json(measured["rates"])
        here = Hardware(THIS_MACHINE, measured["memory"], measured["context"], rates)
        for entry in values["runs"]:
            launch(checked_predictions.measure, (entry["plan"], str(results)), world)
            entry["measured"] = json.loads(results.read_text())
            entry["at_measured_rates"] = checked_predictions.at_measured_rates(found[entry["plan"]], here)
    _write(file, values)
    print(describe(rates, time.monotonic() - begin))
    for note in measured["notes"]:
        print(note)
    print(f"predicted and measured:\n{checked_predictions.describe(values)}")
    if file is not None:
        print(f"both are in {file}; sent with an issue, it becomes a row of benchmarks/results/predictions.md")
    path = save_measured(measured["memory"], measured["context"], rates, "measured by 'tensorshard check'")
    if path is None:
        print("the rates are not kept, as there is no cache folder (TENSORSHARD_CACHE)")
    else:
        print(f"kept in {path}; use it with --gpu this-machine")
    return 0


def _file(given: str | None, device: str) -> Path | None:
    """Where predictions and measurements go; None without a cache folder."""
    folder = cache_folder()
    return Path(given) if given is not None else None if folder is None else folder / f"predictions-{device}.json"


def _write(file: Path | None, values: dict[str, Any]) -> None:
    """Writes them.

    Raises:
        ConfigError: the file cannot be written.
    """
    from tensorshard.trainer.checked_predictions import write

    if file is None:
        return
    try:
        write(file, values)
    except OSError as error:
        raise ConfigError(f"--save {file}: it cannot be written ({error})") from error
