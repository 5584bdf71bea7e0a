"""How much memory the machine and a memory cgroup leave, and how much this process holds."""

import mmap
import sys
from pathlib import Path

import pytest
import torch

from tensorshard.host import memory as host_memory
from tensorshard.host.memory import HeldMemory


def test_available_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 4000 kB\n")
    (tmp_path / "own").write_text("0::/job/one\n")
    outer = tmp_path / "groups" / "job"
    (outer / "one").mkdir(parents=True)
    monkeypatch.setattr(host_memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "_OWN_CGROUP", tmp_path / "own")
    monkeypatch.setattr(host_memory, "_CGROUPS", tmp_path / "groups")
    assert host_memory.available_on_host() == 4000 << 10
    for folder, limit in ((outer / "one", "max"), (outer, str(3000 << 10))):
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text(str(1000 << 10))
        (folder / "memory.stat").write_text(f"anon 1\ninactive_file {500 << 10}\n")
    assert host_memory.available_on_host() == 2500 << 10
    (tmp_path / "own").unlink()
    (tmp_path / "meminfo").unlink()
    assert host_memory.available_on_host() is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_held_memory():
    before = host_memory.held_memory()
    held = mmap.mmap(-1, 64 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # which no heap keeps
    torch.frombuffer(held, dtype=torch.uint8).fill_(1)
    during = host_memory.held_memory()
    assert before is not None and during is not None
    assert 60 << 20 < during.now - before.now < 80 << 20
    held.close()
    after = host_memory.held_memory()
    assert after is not None
    assert after.now < during.now - (60 << 20)
    assert after.peak > during.now - (8 << 20) > after.now  # up to what libraries have been read since


def test_held_memory_where_the_system_does_not_say(tmp_path, monkeypatch):
    monkeypatch.setattr(host_memory, "_STATUS", tmp_path / "none")
    assert host_memory.held_memory() is None
    assert host_memory.room_for_rank(1) is None


def test_ranks_share_what_is_available(monkeypatch):
    monkeypatch.setattr(host_memory, "held_memory", lambda: HeldMemory(100, 150))
    monkeypatch.setattr(host_memory, "available_on_host", lambda: 1000)
    assert host_memory.room_for_rank(1) == 1100
    assert host_memory.room_for_rank(4) == 350
