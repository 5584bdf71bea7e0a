"""What was estimated is compared with what is measured after ten steps, and kept for later searches."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from log_lines import logged
from tensorshard.predict.hardware import THIS_MACHINE, Hardware, Link, Rates, find_hardware, save_measured
from tensorshard.trainer.hooks import ExpectationHook

LINK = Link(1e9, 1e-5)
RATES = Rates({"float32": 1e9}, 1e9, (1.0, 1.0), (1.0, 1.0), 1e-6, False, 8, LINK, LINK, 1e9)


def _after_ten_steps(
    hardware: Hardware | None, estimated: int, *, keeps: bool = False, seconds: float = 0.2
) -> list[str]:
    """A run whose first three steps take 5 s, and the others 0.3 s, against the estimated `seconds`."""
    expected: Any = SimpleNamespace(
        hardware=hardware,
        step_seconds=None if hardware is None else seconds,
        step_span=(seconds / 2, seconds * 2),
        ranks=[SimpleNamespace(peak_allocated=estimated)],
    )
    memory: Any = SimpleNamespace(bytes=lambda: 700 << 20)
    now = iter([t for step in range(12) for t in (10.0 * step, 10.0 * step + (5.0 if step < 3 else 0.3))])
    hook = ExpectationHook(expected, memory, 100 << 20, clock=lambda: next(now))
    nothing: Any = None
    trainer: Any = SimpleNamespace(engine=SimpleNamespace(keeps_freed_memory=keeps))
    with logged(logging.INFO) as lines:
        for _ in range(12):
            hook.before_step(trainer)
            hook.after_step(trainer, nothing)
    return [line for line in lines if "after 10 steps" in line]


def test_ratios_of_this_machine_are_kept_and_others_are_said_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORSHARD_CACHE", str(tmp_path))
    save_measured(1 << 34, 0, RATES, "a test")
    (line,) = _after_ten_steps(Hardware("h100", 1 << 34, rates=RATES), 500 << 20)
    assert "estimated to take 0.2 s, and takes 0.3 s" in line and "500 MiB of live tensors, and is 600 MiB" in line
    assert "(between 0.1 and 0.4 s)" in line
    before = find_hardware(THIS_MACHINE)
    assert before is not None and (before.time_ratio, before.memory_ratio) == (1.0, 1.0)
    (line,) = _after_ten_steps(before, 500 << 20)
    assert "use 1.50 x the estimated times and 1.20 x the estimated memory" in line
    after = find_hardware(THIS_MACHINE)
    assert after is not None
    assert (after.time_ratio, after.memory_ratio) == (pytest.approx(1.5), pytest.approx(1.2))
    assert after.rates == RATES
    (line,) = _after_ten_steps(after, 1 << 20)  # libraries are larger than that
    assert "memory" not in line
    (line,) = _after_ten_steps(after, 500 << 20, keeps=True)  # which it would not hold where memory is scarce
    assert "with freed memory that is kept" in line and "the estimated memory" not in line
    assert not _after_ten_steps(after, 1 << 20, seconds=0.03)  # fixed costs are larger than that
    assert find_hardware(THIS_MACHINE) == after
    (line,) = _after_ten_steps(None, 500 << 20)
    assert "step was estimated" not in line and "later searches" not in line
    assert not _after_ten_steps(None, 1 << 20)
