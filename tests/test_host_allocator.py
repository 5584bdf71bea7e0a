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

if {settings} is not None:
    host_allocator.set_for_training(**{settings})

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
    for name, settings in {"glibc": None, "memory": {}, "time": {"spare_memory": False}}.items():
        script = _FREED.format(settings=settings)
        run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        shares[name] = float(run.stdout)
    assert shares["memory"] > 0.8
    assert shares["glibc"] < 0.5
    assert shares["time"] < 0.5  # the heap keeps them for the next step


def test_the_users_variables_stand(monkeypatch):
    for name in host_allocator.environment_for_training():
        monkeypatch.delenv(name, raising=False)
    with mock.patch.object(host_allocator, "_set") as set_option:
        host_allocator.set_for_training()
        assert set_option.call_count == 3
        for name, value in host_allocator.environment_for_training().items():
            monkeypatch.setenv(name, value)  # as the launcher does
        host_allocator.set_for_training(spare_memory=False)
        assert set_option.call_count == 7
        assert set_option.call_args.args == (-3, 32 << 20)
        monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "0")
        host_allocator.set_for_training()
        assert set_option.call_count == 7
