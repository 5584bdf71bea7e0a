"""Which ways to split a region are worth a try, judged by how far earlier ways came.

A run ends at the first operation whose shapes do not fit, or with wrong numbers. If dividing one more attribute does
not change that, or makes an operation fail that worked before, then dividing yet another one does not help either. So
several attributes are only divided together if each step towards that got further.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from tensorshard.tensor_parallel.search.proposals import Proposal
from tensorshard.tensor_parallel.table.styles import Divide
from tensorshard.tensor_parallel.verify.comparison import MismatchError

_Divided = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class _Refused:
    """A way that was refused.

    Args:
        error: how its run ended; None if it was skipped.
        got_further: whether it came further than the same way with one attribute less, or ended differently.
    """

    error: MismatchError | None
    got_further: bool


class Progress:
    """What is known so far about the ways to split one region."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, dict[_Divided, _Refused]] = {}

    def is_worth_trying(self, proposal: Proposal) -> bool:
        """Whether `proposal` may get further than earlier ways. If not, it is noted as refused."""
        seen, divided = self._alike(proposal), _divided(proposal)
        if len(divided) < 2 or any(fewer not in seen or seen[fewer].got_further for fewer in _one_less(divided)):
            return True
        seen[divided] = _Refused(None, False)
        return False

    def note(self, proposal: Proposal, error: MismatchError) -> None:
        """Notes that `proposal` was refused with `error`."""
        seen, divided = self._alike(proposal), _divided(proposal)
        further = not divided or any(
            fewer not in seen or (seen[fewer].got_further and _is_further(error, seen[fewer].error))
            for fewer in _one_less(divided)
        )
        seen[divided] = _Refused(error.again(), further)

    def _alike(self, proposal: Proposal) -> dict[_Divided, _Refused]:
        """The refused ways that differ from `proposal` only in what they divide."""
        others = tuple((name, style) for name, style in proposal.styles.items() if not isinstance(style, Divide))
        return self._seen.setdefault((others, tuple(proposal.sliced_inputs.items())), {})


def _divided(proposal: Proposal) -> _Divided:
    styles = proposal.styles.items()
    return frozenset((name, option) for name, style in styles if isinstance(style, Divide) for option in style.targets)


def _one_less(divided: _Divided) -> Iterator[_Divided]:
    return (divided - {option} for option in divided)


def _is_further(error: MismatchError, before: MismatchError | None) -> bool:
    if before is None or _end(error) == _end(before):
        return False
    return error.operations >= before.operations or not (error.in_operation and before.in_operation)


def _end(error: MismatchError) -> tuple[int, str, float]:
    return error.operations, str(error), error.amount
