"""What CPU ranks do with memory that is freed."""

import subprocess
import sys
from unittest import mock

import pytest

from tensorshard import host_allocator

# Large tensors with small ones between them: in a heap, these keep what was freed below them.
_FREED = """
import torch
from tensorshard import host_allocator

if {set_for_training}:
    host_allocator.set_for_training()

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

torch.ones(6 << 20)  # 24 MiB: from now on glibc would take such tensors from a heap
before, large, small = resident(), [], []
for _ in range(8):
    large.append(torch.ones(5 << 20))
    small.append(torch.ones(1 << 14))
held = resident()
large.clear()
print((held - resident()) / (held - before))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_large_tensors_leave_no_holes():
    shares = {}
    for ours in (True, False):
        script = _FREED.format(set_for_training=ours)
        run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        shares[ours] = float(run.stdout)
    assert shares[True] > 0.8
    assert shares[False] < 0.5


def test_the_users_variables_stand(monkeypatch):
    for name in host_allocator.environment_for_training():
        monkeypatch.delenv(name, raising=False)
    with mock.patch.object(host_allocator, "_set") as set_option:
        host_allocator.set_for_training.__wrapped__()
        assert set_option.call_count == 3
        monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "0")
        host_allocator.set_for_training.__wrapped__()
        assert set_option.call_count == 3
