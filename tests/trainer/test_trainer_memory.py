"""Peak memory of the process."""

import resource
from pathlib import Path

import pytest
import torch

from tensorshard.trainer import memory
from tensorshard.trainer.memory import PeakMemory, format_bytes


def test_the_peak_remembers_what_was_freed_until_it_is_reset() -> None:
    peak = PeakMemory(torch.device("cpu"))
    peak.reset()
    before = peak.bytes()
    # Where the system lets no process reset its peak, an earlier peak may lie far above what is held now.
    block = torch.ones((before - _held_now() + 64 * 2**20) // 4)
    del block
    grown = peak.bytes() - before
    assert 60 * 2**20 < grown < 80 * 2**20
    peak.reset()
    if _can_reset():
        assert peak.bytes() < before + 32 * 2**20
    else:
        assert peak.bytes() == before + grown


def _can_reset() -> bool:
    """Whether this system lets a process reset its peak; some containers do not."""
    try:
        memory._CLEAR_REFS.write_text(memory._RESET_PEAK)
    except OSError:
        return False
    return True


def _held_now() -> int:
    """Resident bytes of this process at this moment; 0.1 ms."""
    line = next(line for line in memory._STATUS.read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def test_without_proc_the_peak_is_that_of_the_whole_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "none")
    monkeypatch.setattr(memory, "_CLEAR_REFS", tmp_path / "none" / "none")
    peak = PeakMemory(torch.device("cpu"))
    peak.reset()
    assert peak.bytes() == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_peak_is_the_allocators() -> None:
    device = torch.device("cuda", 0)
    peak = PeakMemory(device)
    peak.reset()
    before = peak.bytes()
    torch.ones(2**20, device=device)
    assert peak.bytes() == before + 4 * 2**20


def test_sizes_for_people() -> None:
    assert [format_bytes(n) for n in (12, 2048, 5 * 2**20, 3 * 2**30)] == [
        "12 B",
        "2 KiB",
        "5 MiB",
        "3.00 GiB",
    ]
