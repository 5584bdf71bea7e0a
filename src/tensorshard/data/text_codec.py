"""Text to tokens and back: bytes, or a tokenizer of Hugging Face's ``tokenizers``."""

from pathlib import Path
from typing import Any, Protocol

BYTES = "bytes"


class TextCodec(Protocol):
    """Turns text into token ids and back."""

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary: token ids are below it."""

    def encode(self, text: str) -> list[int]:
        """The token ids of `text`."""

    def decode(self, tokens: list[int]) -> str:
        """The text of `tokens`."""


class ByteCodec:
    """Each token is a byte of UTF-8."""

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(token for token in tokens if 0 < token < 256).decode(errors="replace")


class TokenizerCodec:
    """Tokens of a ``tokenizer.json``."""

    def __init__(self, file: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer: Any = Tokenizer.from_file(str(file))
        self.vocab_size: int = self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens)


def find_codec(name: str) -> TextCodec:
    """The codec that `name` stands for.

    Args:
        name: "bytes", a ``tokenizer.json``, or a directory that has one.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: the package ``tokenizers`` is missing.
        ValueError: the file is no tokenizer.
    """
    if name == BYTES:
        return ByteCodec()
    file = Path(name)
    file = file / "tokenizer.json" if file.is_dir() else file
    if not file.is_file():
        raise FileNotFoundError(f"there is no tokenizer {file}; give a tokenizer.json, its directory, or '{BYTES}'")
    try:
        return TokenizerCodec(file)
    except ImportError as error:
        raise ImportError("reading a tokenizer.json needs the package tokenizers: pip install tokenizers") from error
    except Exception as error:  # the package raises this for a file that is no tokenizer
        raise ValueError(f"{file} is not a tokenizer.json: {error}") from error
