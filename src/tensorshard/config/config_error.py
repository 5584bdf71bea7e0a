"""The error of this package, and how it names the nearest known word."""

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """A config, or an override of one, that cannot be honoured; the message is one sentence."""


class MissingValueError(ConfigError):
    """A required value (``"???"``) that was not given.

    Attributes:
        target: what is called with the value; None if it is not an argument of a recorded call.
    """

    def __init__(self, source: str, key: str, target: str | None) -> None:
        needed = "" if target is None else f", which {target} needs"
        what = "DIR, a directory as Hugging Face writes it" if key == "model.pretrained" else "VALUE"
        super().__init__(f"{source}: {key} has no value{needed}; give it one: {key}={what}")
        self.target = target


def suggest(word: str, known: Iterable[str], what: str) -> str:
    """The end of a sentence about an unknown `word`: the nearest of the `known` ones, and all of them.

    Args:
        what: what the known words are, for instance ``"its arguments"``.
    """
    words = sorted(known)
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    all_words = f"{what}: {', '.join(words) or 'none'}"
    return f"did you mean {near[0]!r}? ({all_words})" if near else all_words
