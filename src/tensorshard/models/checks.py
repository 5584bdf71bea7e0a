"""What every reference model checks before it is built or run."""

from torch import Tensor


def check_sizes(**sizes: int) -> None:
    """Raise a ValueError unless every size is at least 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}; expected at least 1.")


def check_dropout(dropout: float) -> None:
    """Raise a ValueError unless ``dropout`` is a probability below 1."""
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout is {dropout}; expected 0 or more and less than 1.")


def check_tokens(tokens: Tensor, context_length: int) -> None:
    """Raise a ValueError unless ``tokens`` is ``[batch, time]``, with at most ``context_length`` of time."""
    if tokens.dim() != 2:
        raise ValueError(f"tokens have the shape {list(tokens.shape)}; expected [batch, time].")
    if tokens.shape[1] > context_length:
        raise ValueError(
            f"tokens are {tokens.shape[1]} long; this model was built for a context_length of at most {context_length}."
        )
