"""``tensorshard export``: a checkpoint's weights for other programs."""

import argparse
import shutil
from pathlib import Path

from tensorshard.commands.arguments import HelpFormat
from tensorshard.config import ConfigError

_EPILOG = """\
examples:
  tensorshard export runs/my_run-1/checkpoints/step-1000 weights
      safetensors, with config.json for a model of transformers: its from_pretrained("weights") opens them
  tensorshard export runs/my_run-1/checkpoints/step-1000 weights --to torch
      weights/model.pt: the state dict, for torch.load(..., weights_only=True)
  tensorshard export runs/lora-1/checkpoints/step-1000 weights --merge
      of a run with adapters: the base with the adapters merged into it; without --merge the adapters alone
  tensorshard export s3://bucket/my_run/step-1000 s3://bucket/weights
      from an object store, and to one
"""
_DTYPES = ("fp32", "bf16", "fp16")


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds ``export`` to the command line."""
    parser = commands.add_parser(
        "export",
        help="write a checkpoint's weights as Hugging Face or torch.save do",
        description="Writes the weights of CHECKPOINT, of any plan, to the new directory "
        "DIR; either may be a URL. It runs in one process and holds a tensor at a time; with --merge, the whole model.",
        usage="tensorshard export CHECKPOINT DIR [options]",
        epilog=_EPILOG,
        formatter_class=HelpFormat,
        allow_abbrev=False,
    )
    parser.add_argument(
        "words", nargs="*", metavar="CHECKPOINT DIR", help="the checkpoint to read, and the directory to write"
    )
    parser.add_argument(
        "--to",
        choices=("hf", "torch"),
        default="hf",
        help="hf for safetensors as Hugging Face writes them, torch for one file of torch.save (default: hf)",
    )
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        help="dtype of floating-point tensors in the files (default: that of the master weights, fp32)",
    )
    parser.add_argument(
        "--max-shard-size", metavar="SIZE", help="the most bytes in a file of safetensors, such as 500MB (default: 5GB)"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace weights that are in DIR, once the new ones are complete"
    )
    parser.add_argument(
        "--merge", action="store_true", help="merge the adapters of peft into the base's weights, as merge_and_unload"
    )
    parser.set_defaults(command=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code.

    Raises:
        ConfigError: the checkpoint cannot be exported as asked; nothing was written.
    """
    if len(args.words) != 2:
        given = " ".join(args.words) or "nothing"
        raise ConfigError(f"export takes a checkpoint and a directory to write, and was given {given}")
    import torch

    from tensorshard.checkpoint.export import export_checkpoint
    from tensorshard.common.stores import local_or_url, open_store
    from tensorshard.weights.files.export import MAX_SHARD_SIZE

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    source, target = map(local_or_url, args.words)
    dtype = dtypes.get(args.dtype)
    size = MAX_SHARD_SIZE if args.max_shard_size is None else args.max_shard_size
    options = dict(to=args.to, dtype=dtype, max_shard_size=size, overwrite=args.overwrite, merge=args.merge)
    try:
        adapters = export_checkpoint(source, target, **options)
    except (OSError, ValueError, ImportError) as error:
        message = str(error).replace("overwrite=True", "--overwrite").replace("merge=True", "--merge")
        raise ConfigError(message) from error
    if args.to == "hf" and isinstance(source, Path) and isinstance(target, Path):
        _copy_tokenizer(source, target)
    written = open_store(args.words[1])
    files = written.files()
    print(f"{target}: {', '.join(files)} ({sum(written.size(file) or 0 for file in files):,} bytes)")
    if adapters:
        print(
            f"These are the adapters alone ({', '.join(adapters)}): peft.PeftModel.from_pretrained(base, DIR) opens "
            f"them. --merge writes the base with the adapters merged into its weights."
        )
    return 0


_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja"),
)


def _copy_tokenizer(checkpoint: Path, target: Path) -> None:
    """Copies the tokenizer of the run that wrote a checkpoint, as ``save_pretrained`` of transformers has it."""
    from tensorshard.config import load_config
    from tensorshard.trainer.run_directory import RunDirectory
    from tensorshard.trainer.text import tokenizer_of

    config = RunDirectory(checkpoint.resolve().parent.parent).config
    name = tokenizer_of(load_config(str(config))) if config.is_file() else None
    if name is None:
        return
    place = Path(name)
    files = {each: place / each for each in _TOKENIZER_FILES} if place.is_dir() else {"tokenizer.json": place}
    for written, file in files.items():
        if file.is_file():
            shutil.copyfile(file, target / written)
