"""Peak memory of the process."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tensorshard.host import memory as host_memory
from tensorshard.trainer import memory
from tensorshard.trainer.memory import PeakMemory


@pytest.mark.slow
def test_the_peak_remembers_what_was_freed_until_it_is_reset() -> None:
    """In a process of its own: what earlier tests freed and an allocator kept would be used again here."""
    script = """if True:
        import torch
        from tensorshard.trainer.memory import PeakMemory

        peak = PeakMemory(torch.device("cpu"))
        peak.reset()
        before = peak.bytes()
        block = torch.ones(64 * 2**20)
        del block
        grown = peak.bytes() - before
        peak.reset()
        print(grown, peak.bytes() - before)
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    grown, left = map(int, done.stdout.split())
    assert 200 * 2**20 < grown < 300 * 2**20
    assert left < grown / 2 if _can_reset() else left == grown


def _can_reset() -> bool:
    """Whether this system lets a process reset its peak; some containers do not."""
    try:
        memory._CLEAR_REFS.write_text(memory._RESET_PEAK)
    except OSError:
        return False
    return True


def test_without_proc_the_peak_is_that_of_the_whole_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host_memory, "_STATUS", tmp_path / "none")
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
