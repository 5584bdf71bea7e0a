"""``tensorshard checkpoint``: what a checkpoint holds, and whether it is whole."""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from tensorshard.commands.arguments import HelpFormat
from tensorshard.common.words import size_text
from tensorshard.config import ConfigError
from tensorshard.plan.plan import AXES

if TYPE_CHECKING:
    from tensorshard.weights.files.checkpoint_files import OpenCheckpoint

_EPILOG = """\
examples:
  tensorshard checkpoint runs/my_run-1/checkpoints/step-1000
      what it holds; every byte is read and compared with the checksums that were written
  tensorshard checkpoint s3://bucket/my_run/step-1000 --quick
      the same, without reading the tensors: only whether all files are there with their sizes
"""
_LARGEST = 10  # tensors that are listed
_KINDS = {
    "model": "weights",
    "buffers": "buffers",
    "optimizer": "optimizer states",
    "generator": "random streams",
    "state": "registered states",
}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds ``checkpoint`` to the command line."""
    parser = commands.add_parser(
        "checkpoint",
        help="print what a checkpoint holds, and check all of its bytes",
        description="Prints the step, plan, parts, largest tensors and files of the checkpoint PATH, a folder or a "
        "URL, and reads all of it. Exit status 1 means that it is damaged; the message names the file.",
        usage="tensorshard checkpoint PATH [options]",
        epilog=_EPILOG,
        formatter_class=HelpFormat,
        allow_abbrev=False,
    )
    parser.add_argument("words", nargs="*", metavar="PATH", help="the checkpoint")
    parser.add_argument("--quick", action="store_true", help="check that all files are there with their sizes, no more")
    parser.set_defaults(command=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code.

    Raises:
        ConfigError: there is no checkpoint, or it cannot be opened.
    """
    if len(args.words) != 1:
        raise ConfigError(f"checkpoint takes the path of one, and was given {' '.join(args.words) or 'nothing'}")
    from tensorshard.checkpoint.integrity import DamagedCheckpointError, check
    from tensorshard.common.stores import local_or_url
    from tensorshard.weights.files.checkpoint_files import open_checkpoint

    path = local_or_url(args.words[0])
    try:
        checkpoint = open_checkpoint(path)
        print(describe(checkpoint), flush=True)
        if not args.quick:
            check(path)
    except DamagedCheckpointError as error:
        print(f"tensorshard: {error}", file=sys.stderr)
        return 1
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(str(error)) from error
    if checkpoint.manifest is None:
        print("whole      all files are there; format 1 has no checksums, so their bytes are not checked")
    elif args.quick:
        print("whole      all files are there with their sizes; their bytes were not read")
    else:
        print("whole      all bytes are as they were written")
    return 0


def describe(checkpoint: "OpenCheckpoint") -> str:
    """What `checkpoint` holds, as a table."""
    document = checkpoint.document
    entries: dict[str, Any] = checkpoint.metadata.state_dict_metadata
    tensors = {
        name: (tuple(entry.size), str(entry.properties.dtype).removeprefix("torch."), _bytes(entry))
        for name, entry in entries.items()
    }
    lines = [
        f"step       {document.get('step_count')}",
        f"written by {document['imported']['source']}"
        if "imported" in document
        else f"plan       {_plan_text(document.get('plan', {}))}, on {document.get('world_size')} ranks",
        f"optimizer  {(document.get('optimizer') or {}).get('class')}",
    ]
    for kind, words in _KINDS.items():
        sizes = [size for name, (_, _, size) in tensors.items() if name.partition(".")[0] == kind]
        if sizes:
            plural = "" if len(sizes) == 1 else "s"
            lines.append(f"holds      {words}: {len(sizes)} tensor{plural}, {size_text(sum(sizes))}")
    if document.get("base"):
        lines.append(f"base       not here: {len(document['base'])} frozen parameters, of which it has checksums")
    if document.get("extra"):
        lines.append(f"extra      {', '.join(document['extra'])}")
    largest = sorted(tensors.items(), key=lambda pair: -pair[1][2])[:_LARGEST]
    lines += [
        f"tensor     {size_text(size):>9}  {name} {list(shape)} {dtype}" for name, (shape, dtype, size) in largest
    ]
    if len(tensors) > len(largest):
        lines.append(f"           and {len(tensors) - len(largest)} smaller ones")
    names = list(checkpoint.manifest.files) if checkpoint.manifest is not None else checkpoint.store.files()
    files = {name: checkpoint.store.size(name) or 0 for name in names}
    lines += [f"file       {size_text(size):>9}  {name}" for name, size in files.items()]
    lines.append(f"files      {len(files)}, {sum(files.values()):,} bytes")
    return "\n".join(lines)


def _bytes(entry: Any) -> int:
    return int(entry.size.numel()) * int(entry.properties.dtype.itemsize)


def _plan_text(plan: dict[str, Any]) -> str:
    """The degrees of a stored plan that are not 1, and its ZeRO stage."""
    degrees = [f"{axis}={plan[axis]}" for axis in AXES if plan.get(axis, 1) != 1]
    return ", ".join([*degrees, f"zero={plan.get('zero')}", str(plan.get("precision"))])
