"""``tensorshard train``: checks what can be checked, then starts workers, or becomes one under torchrun."""

import argparse
import os
import sys
from functools import partial
from typing import TYPE_CHECKING

from omegaconf import DictConfig, open_dict

from tensorshard.commands.arguments import HelpFormat, add_allow, config_and_overrides, find_own_modules
from tensorshard.commands.ending import ending_of
from tensorshard.common.stores import is_url, open_store
from tensorshard.common.words import fit, terminal_width
from tensorshard.config import ConfigError, to_yaml
from tensorshard.config.files import ASKED
from tensorshard.config.lazy import MissingValueError
from tensorshard.trainer.launch.launch_errors import LaunchError
from tensorshard.trainer.launch.worker import RUN_FILE, run_worker

if TYPE_CHECKING:
    from tensorshard.predict import Estimate
    from tensorshard.trainer.launch.launcher import World
    from tensorshard.trainer.planned_run import PlanRequest, ReadConfig
    from tensorshard.trainer.run_directory import RunDirectory
    from tensorshard.trainer.settings import TrainSettings

RESUME_NEWEST = "latest"
"""The value that the trainer gets for ``--resume`` without a path."""

_PROCESSES = ("nproc", "nnodes", "node_rank", "rdzv_endpoint", "max_restarts", "log_dir")
"""The arguments for starting processes."""

_EPILOG = """\
examples:
  tensorshard train
      the quickstart: a small GPT on Python's own sources, about two minutes on two cores
  tensorshard train quickstart train.steps=50 optimizer.lr=1e-3 --nproc 4
      the same, shorter, on four processes
  tensorshard train my_config.py train.plan.zero=2 train.plan.precision=bf16
      a config of your own; every field of tensorshard.Plan is a key of train.plan
  tensorshard train my_config.py train.plan=auto
      the best plan for the processes at hand; train.plan.tp=auto chooses tp alone
  tensorshard train my_config.py train.plan=plan.yaml
      the plan that 'tensorshard plan --save plan.yaml' wrote
  tensorshard train runs/quickstart-1/config.yaml --resume
      continue a run at its newest checkpoint, on any number of processes
  tensorshard train my_config.py --nnodes 2 --rdzv-endpoint node0:29500
      the same command on each of two machines
  torchrun --nproc-per-node 2 --no-python tensorshard train my_config.py
      as workers of another launcher
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds ``train`` to the command line."""
    parser = commands.add_parser(
        "train",
        help="train a model as a config says, sharded over the devices of one machine or several",
        description="Trains a model as CONFIG says. Options and overrides may come in any order.",
        usage="tensorshard train [CONFIG] [KEY=VALUE ...] [options]",
        epilog=_EPILOG,
        formatter_class=HelpFormat,
        allow_abbrev=False,
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="CONFIG KEY=VALUE",
        help="the config: a .py file, the config.yaml of an earlier run, or the name of one that is shipped "
        "(default: quickstart); and overrides of its values, as YAML",
    )
    parser.add_argument("--output", metavar="DIR", help="the run's directory (default: a new one, runs/CONFIG-N)")
    parser.add_argument(
        "--resume",
        nargs="?",
        const=RESUME_NEWEST,
        metavar="CHECKPOINT",
        help="continue from this checkpoint, or from the run's newest if none is named",
    )
    add_allow(parser)
    parser.add_argument(
        "--print-config", action="store_true", help="print the config with the overrides, and start nothing"
    )
    parser.add_argument(
        "--no-estimate", action="store_true", help="do not estimate the memory first (as train.estimate=false)"
    )
    parser.add_argument(
        "--profile-memory",
        action="store_true",
        help="record what the first two steps hold, for a page memory.html (as train.profile_memory=true)",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="print every field of the plan, and the mesh, before training"
    )
    parser.add_argument("--force", action="store_true", help="start even if the estimate says that it does not fit")
    processes = parser.add_argument_group("processes")
    processes.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="processes on this machine (default: one for each visible GPU, or 2 if there is none)",
    )
    processes.add_argument(
        "--nnodes", metavar="N", help="machines (default: 1), or MIN:MAX of machines that may come and go, such as 1:4"
    )
    processes.add_argument(
        "--node-rank",
        type=int,
        metavar="I",
        help="number of this machine, counted from 0 (default: given out when they meet)",
    )
    processes.add_argument(
        "--rdzv-endpoint", metavar="HOST:PORT", help="where the machines meet: a free port on one of them"
    )
    processes.add_argument(
        "--max-restarts",
        type=int,
        metavar="N",
        help="after a failure start all processes again, at most N times, from the newest checkpoint (default: 0)",
    )
    processes.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="how long a process waits for the others in a collective before it ends with an error (default: 300)",
    )
    processes.add_argument(
        "--log-dir", metavar="DIR", help="directory for the output of ranks other than 0 (default: a temporary one)"
    )
    parser.set_defaults(command=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code.

    Raises:
        ConfigError, LaunchError: the config or an option makes no sense, or processes cannot be started; nothing runs.
        WorkerFailedError: a worker failed.
        LaunchInterrupted: a signal ended the run.
    """
    from tensorshard.comm.world import ranks_here
    from tensorshard.trainer.launch.launcher import launch
    from tensorshard.trainer.start import check_holds_no_run

    find_own_modules()
    source, overrides = _config_and_overrides(args)
    world = None if _is_worker(args) else _world(args)
    world_size = int(os.environ["WORLD_SIZE"]) if world is None else world.size
    _check_paths(args)
    _check_timeout(args.timeout)
    read = _load(source, overrides, args.allow)
    config = read.config
    if config.get("train") is not None:
        with open_dict(config.train):
            if args.no_estimate:
                config.train.estimate = False
            if args.profile_memory:
                config.train.profile_memory = True
        given = args.output or config.train.get("output_dir")
        if given and args.resume is None and world is not None and world.nnodes == 1:  # a host may come back
            check_holds_no_run(given)
    if options := _options(args):
        with open_dict(config):
            config[ASKED]["options"] = options
    expected = None
    request = read.request if read.request.searches else None
    if request is not None and world is not None and world.nnodes == 1:
        expected = _choose_plan(config, request, world.size)
        request = None
    if args.print_config:
        print(fit(to_yaml(config), terminal_width(sys.stdout)), end="")
        return 0
    if request is None and _check(config, world_size).estimate and expected is None:
        local_ranks = ranks_here() if world is None else world.nproc
        expected = _estimate(config, world_size, local_ranks, args.force)
    call = (config, args.resume, args.output, args.timeout, expected, request, args.verbose)
    if world is None:
        run_worker(train_worker, call, report=True)
    else:
        launch(train_worker, call, world, log_dir=args.log_dir, ending=partial(ending_of, config))
    return 0


def _load(source: str, overrides: list[str], allow: list[str]) -> "ReadConfig":
    from tensorshard.trainer.planned_run import read_config

    try:
        return read_config(source, overrides, allow=allow)
    except MissingValueError as error:
        if error.target != "tensorshard.data.TokenDataset":
            raise
        raise ConfigError(f"{error}; `tensorshard data tokenize TEXT...` makes token files from text") from error


def _choose_plan(config: DictConfig, request: "PlanRequest", world_size: int) -> "Estimate":
    """Sets the best plan for this machine in `config` and prints it; returns its estimate."""
    from tensorshard.trainer.launch.launcher import visible_gpus
    from tensorshard.trainer.planned_run import choose_for_run

    search = choose_for_run(config, request, world_size, world_size, gpus=visible_gpus() > 0)
    print(fit(f"the best plan for {search.describe()}", terminal_width(sys.stdout)), flush=True)
    return search.best.estimate


def _estimate(config: DictConfig, world_size: int, ranks_here: int, force: bool) -> "Estimate | None":
    """Prints the estimate and returns it; None if there is none, and on workers other than the first."""
    if os.environ.get("RANK", "0") != "0":
        return None
    from tensorshard.trainer.estimated_run import estimate_first
    from tensorshard.trainer.launch.launcher import visible_gpus

    estimate, lines = estimate_first(config, world_size, ranks_here, gpus=visible_gpus() > 0, force=force)
    print(fit("\n".join(["estimated memory", *lines]), terminal_width(sys.stdout)), flush=True)
    return estimate


def train_worker(
    config: DictConfig,
    resume: str | None,
    output: str | None,
    timeout: float | None = None,
    expected: "Estimate | None" = None,
    request: "PlanRequest | None" = None,
    verbose: bool = False,
) -> None:
    """Runs the trainer in one process of a run."""
    from tensorshard.trainer.run import run as run_trainer

    def ended(directory: "RunDirectory") -> None:
        print(ending_of(config, directory.path), file=sys.stderr, flush=True)

    run_trainer(
        config,
        resume=resume,
        output=output,
        timeout=timeout,
        expected=expected,
        request=request,
        verbose=verbose,
        ended=None if RUN_FILE in os.environ else ended,  # else the launcher says it, after the error
    )


def _config_and_overrides(args: argparse.Namespace) -> tuple[str, list[str]]:
    """The config and its overrides, from the words of the command line that are not options."""
    words = args.words
    if args.resume and ("=" in args.resume or args.resume.endswith((".py", ".yaml", ".yml"))):
        # This is not a checkpoint: --resume had no path, and argparse took the next word for one.
        words = [*words, args.resume]
        args.resume = RESUME_NEWEST
    return config_and_overrides(words)


def _options(args: argparse.Namespace) -> list[str]:
    """The given options that a continued run needs, too, as words of a command line."""
    words = [word for module in args.allow for word in ("--allow", module)]
    for name in (*_PROCESSES, "timeout"):
        value = getattr(args, name)
        if value is not None:
            words += [_option(name), f"{value:g}" if isinstance(value, float) else str(value)]
    return words + [
        _option(name) for name in ("no_estimate", "profile_memory", "force", "verbose") if getattr(args, name)
    ]


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _is_worker(args: argparse.Namespace) -> bool:
    """Whether a launcher, such as torchrun, has started this process as one rank of a world."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return False
    for name in _PROCESSES:
        if getattr(args, name) is not None:
            raise LaunchError(
                f"{_option(name)} is for starting processes, but a launcher has started this one already (RANK and "
                f"WORLD_SIZE are set); leave it out"
            )
    return True


def _world(args: argparse.Namespace) -> "World":
    from tensorshard.trainer.launch.launcher import World, visible_gpus

    fewest, most = _nodes(args.nnodes)
    return World(
        nproc=(visible_gpus() or 2) if args.nproc is None else args.nproc,
        nnodes=most,
        min_nodes=fewest,
        max_restarts=args.max_restarts or 0,
        node_rank=args.node_rank,
        rdzv_endpoint=args.rdzv_endpoint,
    )


def _nodes(text: str | None) -> tuple[int | None, int]:
    """The fewest machines, None for all of them, and all."""
    if text is None:
        return None, 1
    fewest, separator, most = text.rpartition(":")
    if not most.isdecimal() or (separator and not fewest.isdecimal()):
        raise LaunchError(f"--nnodes is {text!r}; it must be a number, such as 2, or MIN:MAX, such as 1:4")
    return int(fewest) if separator else None, int(most)


def _check_paths(args: argparse.Namespace) -> None:
    if args.resume not in (None, RESUME_NEWEST) and not _is_checkpoint(args.resume):
        raise ConfigError(f"--resume {args.resume}: there is no such checkpoint directory")
    if args.output is not None and is_url(args.output):
        raise ConfigError(
            f"--output {args.output}: logs and measurements go to a folder of this machine; for checkpoints in an "
            f"object store set train.checkpoint_dir={args.output}"
        )
    if args.output is not None and os.path.exists(args.output) and not os.path.isdir(args.output):
        raise ConfigError(f"--output {args.output}: that is a file; a run writes a directory")


def _is_checkpoint(path: str) -> bool:
    """Whether there may be a checkpoint at `path`, a folder or a URL."""
    if not is_url(path):
        return os.path.isdir(path)
    try:
        return bool(open_store(path).files())
    except (OSError, ImportError, ValueError) as error:
        raise ConfigError(f"--resume {path}: {error}") from error


def _check_timeout(seconds: float | None) -> None:
    from tensorshard.comm.world import as_timedelta

    if seconds is not None:
        try:
            as_timedelta(seconds)
        except ValueError as error:
            raise ConfigError(f"--timeout {seconds:g}: it must be a number of seconds above 0") from error


def _check(config: DictConfig, world_size: int) -> "TrainSettings":
    """Checks that `world_size` processes can run `config`, and returns its settings."""
    from tensorshard.trainer.initial_model import check_files
    from tensorshard.trainer.settings import TrainSettings

    try:
        settings = TrainSettings.from_config(config)
        plan = settings.plan.resolve(world_size)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"train.plan: {error}") from error
    settings.check_batch(plan.dp_size)
    check_files(config.model)
    return settings
