"""What CPU ranks do with memory that is freed."""

import subprocess
import sys
from unittest import mock

import pytest

from tensorshard.host import allocator as host_allocator
from tensorshard.host.allocator import KEEP_MOST, KEEP_SMALL, set_for_training

# Large tensors with small ones between them: in a heap, these keep what was freed below them.
_FREED = """
import torch
from tensorshard.host import allocator as host_allocator

if {mapped} is not None:
    host_allocator.set_for_training({mapped})

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
    for name, mapped in {"glibc": None, "memory": KEEP_SMALL, "time": KEEP_MOST}.items():
        script = _FREED.format(mapped=mapped)
        run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        shares[name] = float(run.stdout)
    assert shares["memory"] > 0.8
    assert shares["glibc"] < 0.5
    assert shares["time"] < 0.5  # the heap keeps them for the next step


def test_the_users_variables_stand(monkeypatch):
    for name in host_allocator.environment_for_training():
        monkeypatch.delenv(name, raising=False)
    with mock.patch.object(host_allocator, "_set") as set_option:
        assert set_for_training(KEEP_SMALL)
        assert set_option.call_args.args == (-3, 16 << 20)
        for name, value in host_allocator.environment_for_training().items():
            monkeypatch.setenv(name, value)  # as the launcher does
        assert set_for_training(KEEP_MOST)
        assert set_option.call_args.args == (-3, 32 << 20)
        set_option.reset_mock()
        monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "0")
        assert not set_for_training(KEEP_MOST)
        assert not set_option.called
