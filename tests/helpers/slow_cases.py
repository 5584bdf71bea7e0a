"""Which cases of a matrix are slow ones."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mark_slow(cases: Iterable[Any], slow: Collection[Any]) -> list[Any]:
    """`cases`, for ``pytest.mark.parametrize``; those that are in `slow`, too, are marked so."""
    cases = list(cases)
    unknown = [case for case in slow if case not in cases]
    assert not unknown, f"no cases are called {unknown}"
    return [_param(case, pytest.mark.slow) if case in slow else case for case in cases]


def _param(case: Any, mark: pytest.MarkDecorator) -> Any:
    return pytest.param(*case, marks=mark) if isinstance(case, tuple) else pytest.param(case, marks=mark)
