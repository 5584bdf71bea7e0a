"""The option ``--allow``, of commands that read a run's config."""

import argparse


def add_allow(parser: argparse.ArgumentParser) -> None:
    """Adds ``--allow MODULE``, which may be given several times."""
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="MODULE",
        help="a module that a YAML config may call, such as your own; "
        "tensorshard, torch.nn, torch.optim, torchmetrics and transformers are allowed",
    )
