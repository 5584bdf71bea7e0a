"""Windows of tokens with the tokens that follow them."""

import os

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tensorshard.data.token_file import TokenFile


class TokenDataset(Dataset[tuple[Tensor, Tensor]]):
    """Windows of ``context_length`` tokens that do not overlap, each with its next tokens.

    Item ``i`` is ``(tokens, next_tokens)``, both int64 ``[context_length]``, the second one token further
    on. Tokens after the last whole window are left out.

    Args:
        source: a token file, its path, or a one-dimensional array of integers.
        context_length: tokens in a window.

    Raises:
        ValueError: fewer than ``context_length + 1`` tokens, or no one-dimensional array of integers.
    """

    def __init__(self, source: str | os.PathLike[str] | TokenFile | np.ndarray, context_length: int) -> None:
        if context_length < 1:
            raise ValueError(f"context_length is {context_length}; expected at least 1.")
        if not isinstance(source, str | os.PathLike | TokenFile | np.ndarray):
            raise TypeError(
                f"source has the type {type(source).__name__}; expected a token file, its path or an array of integers."
            )
        if isinstance(source, str | os.PathLike):
            source = TokenFile(source)
        if isinstance(source, np.ndarray) and (source.ndim != 1 or not np.issubdtype(source.dtype, np.integer)):
            raise ValueError(
                f"source is {source.dtype}{list(source.shape)}; expected a one-dimensional array of integers."
            )
        if len(source) < context_length + 1:
            where = source.path if isinstance(source, TokenFile) else "The array"
            raise ValueError(
                f"{where} holds {len(source)} tokens; a window of context_length {context_length} "
                f"and its next token need {context_length + 1}."
            )
        self.source = source
        self.context_length = context_length

    def __len__(self) -> int:
        """Number of windows."""
        return (len(self.source) - 1) // self.context_length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"Window {index} of a dataset of {len(self)}.")
        tokens = self.source.tokens if isinstance(self.source, TokenFile) else self.source
        start = index * self.context_length
        window = torch.from_numpy(tokens[start : start + self.context_length + 1].astype(np.int64))
        return window[:-1], window[1:]
