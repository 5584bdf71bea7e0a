"""``tensorshard data tokenize``: text files into token files."""

import argparse
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from tensorshard.commands.arguments import HelpFormat
from tensorshard.common.paths import read_utf8
from tensorshard.config import ConfigError

if TYPE_CHECKING:
    from tensorshard.data.text import TextCodec

_EPILOG = """\
examples:
  tensorshard data tokenize book.txt
      bytes, into train.npy and validation.npy
  tensorshard data tokenize *.txt --tokenizer tokenizer.json --output data
      by a tokenizer of Hugging Face's, into data/
  tensorshard train gpt model.vocab_size=256 data.train.source=train.npy data.validation.source=validation.npy
      trains on them
"""
_PIECE = 1 << 20  # characters that are tokenized at a time


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds ``data`` to the command line."""
    parser = commands.add_parser(
        "data",
        help="turn text into token files to train on",
        description="Writes DIR/train.npy and DIR/validation.npy from text files.",
        usage="tensorshard data tokenize TEXT... [options]",
        epilog=_EPILOG,
        formatter_class=HelpFormat,
        allow_abbrev=False,
    )
    parser.add_argument("words", nargs="*", metavar="tokenize TEXT", help="text files in UTF-8")
    parser.add_argument(
        "--tokenizer",
        default="bytes",
        metavar="FILE",
        help="a tokenizer.json, or its directory (default: bytes, a vocabulary of 256)",
    )
    parser.add_argument("--output", default=".", metavar="DIR", help="where to write (default: the current directory)")
    parser.add_argument(
        "--validation",
        type=float,
        default=0.05,
        metavar="SHARE",
        help="the share of each text, from its end, that goes to validation.npy (default: 0.05)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace token files that exist")
    parser.set_defaults(command=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code.

    Raises:
        ConfigError: the arguments make no sense, or a text cannot be tokenized; nothing was written.
    """
    if not args.words or args.words[0] != "tokenize":
        given = " ".join(args.words) or "nothing"
        raise ConfigError(f"data was given {given}; it takes: tokenize TEXT...")
    texts = [Path(word) for word in args.words[1:]]
    if not texts:
        raise ConfigError("tokenize takes at least one text file")
    for text in texts:
        if text.is_dir():
            raise ConfigError(f"{text} is a directory; name text files, such as {text / '*.txt'}")
        if not text.is_file():
            raise ConfigError(f"there is no file {text}")
    if not 0 <= args.validation < 1:
        raise ConfigError(f"--validation {args.validation:g}: it is the share of a text, at least 0 and below 1")
    from tensorshard.data.text import find_codec

    folder = Path(args.output)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--output {folder}: that is a file; token files are written to a directory")
    try:
        codec = find_codec(args.tokenizer)
        folder.mkdir(parents=True, exist_ok=True)
        names = ("train", "validation") if args.validation else ("train",)
        files = {name: folder / f"{name}.npy" for name in names}
        there = [str(file) for file in files.values() if file.exists() and not args.overwrite]
        if there:
            raise ConfigError(f"{there[0]} is there already; give another --output, or --overwrite")
        counts = _write(texts, codec, files, args.validation)
    except (OSError, ImportError, ValueError) as error:
        raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from error
    for name, file in files.items():
        print(f"{file}: {counts[name]:,} tokens of a vocabulary of {codec.vocab_size:,}")
    return 0


def _write(texts: list[Path], codec: "TextCodec", files: dict[str, Path], share: float) -> dict[str, int]:
    """Writes all token files or none, reading each text once. Returns the number of tokens in each.

    Raises:
        ValueError: a file would be empty; a text is not UTF-8.
    """
    import numpy as np

    from tensorshard.data import token_file_writer

    with ExitStack() as stack:
        writers = {
            name: stack.enter_context(token_file_writer(file, vocab_size=codec.vocab_size, overwrite=True))
            for name, file in files.items()
        }
        for text in texts:
            content = read_utf8(text)
            end = round((1 - share) * len(content))
            for name, part in {"train": (0, end), "validation": (end, len(content))}.items():
                for piece in _pieces(content, *part):
                    writers[name].write(np.asarray(codec.encode(piece), dtype=np.int64))
        counts = {name: writer.num_tokens for name, writer in writers.items()}
        for name, count in counts.items():
            if not count:
                raise ConfigError(f"{files[name]} would be empty: the texts are too short for --validation {share:g}")
    return counts


def _pieces(content: str, start: int, end: int) -> Iterator[str]:
    """``content[start:end]`` in pieces that end at the end of a line if possible."""
    while start < end:
        cut = end if end - start <= _PIECE else content.rfind("\n", start, start + _PIECE) + 1 or start + _PIECE
        yield content[start:cut]
        start = cut
