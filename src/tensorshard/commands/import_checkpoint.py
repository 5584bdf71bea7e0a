"""``tensorshard import-checkpoint``: another program's checkpoint as one of ours."""

import argparse
from pathlib import Path

from tensorshard.commands.arguments import HelpFormat
from tensorshard.config import ConfigError

_EPILOG = """\
examples:
  tensorshard import-checkpoint out/global_step500 imported
      DeepSpeed's, of ZeRO 0 to 3, or a universal one; engine.load("imported") goes on from it, under any plan
  tensorshard import-checkpoint outputs/checkpoint-500 imported
      the transformers Trainer's: alone, under FSDP or under DeepSpeed; Accelerate's save_state likewise
  tensorshard import-checkpoint dcp/step-500 s3://bucket/imported
      a folder of torch.distributed.checkpoint, of FSDP, FSDP2 or torchtitan; to an object store
  tensorshard import-checkpoint checkpoints/iter_0001000 imported
      Megatron-Core's torch_dist; its tensors become the model's when engine.load("imported") has one
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds ``import-checkpoint`` to the command line."""
    parser = commands.add_parser(
        "import-checkpoint",
        help="write another program's checkpoint as one of tensorshard",
        description="Reads the checkpoint PATH of another program, weights, optimizer states, step and scaler, and "
        "writes it to OUT as one of tensorshard, which any plan loads. It runs in one process and holds a piece of a "
        "tensor at a time. engine.load reads PATH itself, too.",
        usage="tensorshard import-checkpoint PATH OUT [options]",
        epilog=_EPILOG,
        formatter_class=HelpFormat,
        allow_abbrev=False,
    )
    parser.add_argument("words", nargs="*", metavar="PATH OUT", help="the checkpoint to read, and the folder to write")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a checkpoint that is at OUT, once the new one is complete"
    )
    parser.set_defaults(command=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code.

    Raises:
        ConfigError: the checkpoint cannot be read, or OUT cannot be written; nothing was written.
    """
    if len(args.words) != 2:
        given = " ".join(args.words) or "nothing"
        raise ConfigError(f"import-checkpoint takes a checkpoint and a folder to write, and was given {given}")
    from tensorshard.checkpoint.imported import import_checkpoint
    from tensorshard.commands.checkpoint import describe
    from tensorshard.common.stores import local_or_url
    from tensorshard.weights.files.checkpoint_files import open_checkpoint

    source, target = local_or_url(args.words[0]), local_or_url(args.words[1])
    if not isinstance(source, Path):
        raise ConfigError(f"{source} is a URL; other programs' checkpoints are read from a disk: copy it to one")
    try:
        imported = import_checkpoint(source, target, overwrite=args.overwrite)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(str(error).replace("overwrite=True", "--overwrite")) from error
    print(f"{source}: {imported.document['imported']['source']}\n\n{describe(open_checkpoint(target))}")
    return 0
