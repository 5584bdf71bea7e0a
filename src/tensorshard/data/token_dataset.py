"""Windows of tokens with the tokens that follow them, or with some of them masked, for BERT."""

import os

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tensorshard.data.token_file import TokenFile

IGNORED_TARGET = -100


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


class MaskedTokens(Dataset[tuple[Tensor, Tensor]]):
    """A masked-language-model view of a token dataset (Devlin et al., "BERT", 2019, section 3.1).

    Item ``i`` is ``(tokens, targets)``, both int64 ``[context_length]``. Of the tokens,
    ``mask_probability`` (at least one) are to be predicted: 80% of these show the mask token, 10% a random
    one and 10% themselves. The targets are the tokens there and -100 elsewhere.

    Which ones is a function of ``(seed, i)`` alone. As in BERT's own data, each window appears ``copies``
    times with other masks: item ``i`` is window ``i % len(dataset)``.

    Args:
        dataset: the windows; their next tokens are not used.
        vocab_size: random tokens are ``0`` to ``vocab_size - 1``.
        mask_token: the token shown in place of a masked one; inside the vocabulary, and best not in the text.
        seed: of the masks.
        copies: how often each window appears.
        mask_probability: share of tokens to predict.

    Raises:
        ValueError: a mask token outside the vocabulary, less than one copy, a probability outside (0, 1], a
            negative seed.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        *,
        vocab_size: int,
        mask_token: int,
        seed: int = 0,
        copies: int = 10,
        mask_probability: float = 0.15,
    ) -> None:
        if not 0 <= mask_token < vocab_size:
            raise ValueError(
                f"mask_token is {mask_token}, outside a vocab_size of {vocab_size}; a token of its own needs "
                f"a vocab_size of {mask_token + 1}."
            )
        if copies < 1:
            raise ValueError(f"copies is {copies}; expected at least 1.")
        if not 0.0 < mask_probability <= 1.0:
            raise ValueError(f"mask_probability is {mask_probability}; expected more than 0 and at most 1.")
        if seed < 0:
            raise ValueError(f"seed is {seed}; expected 0 or more.")
        self.dataset = dataset
        self.vocab_size = vocab_size
        self.mask_token = mask_token
        self.seed = seed
        self.copies = copies
        self.mask_probability = mask_probability

    def __len__(self) -> int:
        return self.copies * len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"Window {index} of a dataset of {len(self)}.")
        original, _ = self.dataset[index % len(self.dataset)]
        random = np.random.default_rng((self.seed, index))
        num_predicted = max(1, round(self.mask_probability * len(original)))
        predicted = torch.from_numpy(random.permutation(len(original))[:num_predicted])
        fate = random.random(num_predicted)
        replacements = np.where(fate < 0.8, self.mask_token, random.integers(self.vocab_size, size=num_predicted))

        shown = torch.from_numpy(fate < 0.9)
        tokens = original.clone()
        tokens[predicted[shown]] = torch.from_numpy(replacements)[shown]
        targets = torch.full_like(original, IGNORED_TARGET)
        targets[predicted] = original[predicted]
        return tokens, targets
