"""How near the suite's comparisons of numbers come to their bounds, written down where one asks for it.

With ``TENSORSHARD_TEST_BOUNDS=FILE`` every comparison by `assert_within`, ``torch.testing.assert_close`` and
``pytest.approx``, in the tests' process and on the ranks, adds a line of JSON to FILE: the test, what was compared, and
the measured value divided by its bound. ``python tests/helpers/bounds.py FILE`` prints those that come near.
"""

import json
import os
import sys
from collections import defaultdict
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

VARIABLE = "TENSORSHARD_TEST_BOUNDS"
NEAR = 0.1  # of a bound


def assert_within(measured: float | torch.Tensor, bound: float, what: str) -> None:
    """`measured`, of what is named by `what`, is at most `bound`."""
    measured = float(measured)
    if bound > 0:
        _write(what, measured / bound)
    assert measured <= bound, f"{what} differs by {measured:.2e}, and {bound:.1e} are allowed"


def record_comparisons() -> None:
    """From now on, writes down the comparisons of torch and pytest in this process, if the environment asks for it."""
    if VARIABLE not in os.environ:
        return
    import pytest

    approx = type(pytest.approx(1.0))  # what lists and dicts are compared by, too
    assert_close, equals = torch.testing.assert_close, approx.__eq__

    def recorded_assert_close(actual: Any, expected: Any, **options: Any) -> None:
        assert_close(actual, expected, **options)
        _write("assert_close", _share_of_tolerance(actual, expected, options.get("rtol"), options.get("atol")))

    def recorded_equals(self: Any, actual: Any) -> bool:
        result = equals(self, actual)
        if result and actual != self.expected and self.tolerance:
            _write("approx", float(abs(actual - self.expected) / self.tolerance))
        return result

    torch.testing.assert_close = recorded_assert_close
    approx.__eq__ = recorded_equals  # type: ignore[method-assign]


def _share_of_tolerance(actual: Any, expected: Any, rtol: float | None, atol: float | None) -> float:
    """The largest of |actual - expected| / (atol + rtol |expected|)."""
    from torch.testing._comparison import default_tolerances

    share = 0.0
    for found, want in zip(tree_leaves(actual), tree_leaves(expected), strict=True):
        if not isinstance(want, torch.Tensor | float | complex):
            continue
        a, b = (torch.as_tensor(value).detach() for value in (found, want))
        relative, absolute = (rtol, atol) if rtol is not None and atol is not None else default_tolerances(a, b)
        allowed = absolute + relative * b.to(torch.float64).abs()
        excess = (a.to(torch.float64) - b.to(torch.float64)).abs() / allowed
        if excess.numel():
            share = max(share, excess.nan_to_num(0.0).max().item())
    return share


def _write(what: str, share: float) -> None:
    path = os.environ.get(VARIABLE)
    if path:
        test = os.environ.get("PYTEST_CURRENT_TEST", "").removesuffix(" (call)")
        with open(path, "a") as file:
            file.write(json.dumps({"test": test, "what": what, "share": share}) + "\n")


def _print_near(path: str) -> None:
    worst: dict[tuple[str, str], float] = defaultdict(float)
    with open(path) as file:
        for line in file:
            entry = json.loads(line)
            key = entry["test"], entry["what"]
            worst[key] = max(worst[key], entry["share"])
    near = sorted(((share, *key) for key, share in worst.items() if share > NEAR), reverse=True)
    for share, test, what in near:
        print(f"{share:6.2f}  {test}  {what}")
    print(f"{len(near)} of {len(worst)} comparisons come within a factor of {1 / NEAR:.0f} of their bounds")


if __name__ == "__main__":
    _print_near(sys.argv[1])
