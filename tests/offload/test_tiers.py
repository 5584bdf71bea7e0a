"""Folders for scratch files: what is wrong with one is said before anything is allocated. The budget of host memory."""

import errno
import os

import pytest
import torch

from tensorshard import Offload
from tensorshard.offload import scratch_file
from tensorshard.offload.tiers import DiskSlot, HostSlot, SlotSpec, Tiers


def _tiers(folder) -> Tiers:
    return Tiers(Offload(optimizer="disk", path=str(folder)))


def test_a_folder_that_does_not_exist(tmp_path):
    with pytest.raises(ValueError, match=r"offload.path '.*nothing' does not exist; set offload.path to a folder on a"):
        _tiers(tmp_path / "nothing")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"offload.path '.*file' is no folder"):
        _tiers(tmp_path / "file")


def test_a_folder_that_is_memory():
    with pytest.raises(ValueError, match=r"'/dev/shm' is on tmpfs, which is memory, so nothing would be saved"):
        _tiers("/dev/shm")


def test_a_folder_that_cannot_be_written(tmp_path):
    with pytest.raises(ValueError, match=r"offload.path '/proc' cannot be written \("):
        _tiers("/proc")


def test_a_folder_without_direct_io(tmp_path, monkeypatch):
    opened = os.open

    def refuse(path, flags, *args, **options):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return opened(path, flags, *args, **options)

    monkeypatch.setattr(scratch_file.os, "open", refuse)
    with pytest.raises(ValueError, match=r"does without direct I/O \(O_DIRECT\): what is written there would fill"):
        _tiers(tmp_path)


def test_a_disk_that_is_too_small(tmp_path):
    tiers = _tiers(tmp_path)
    spec = SlotSpec("optimizer states", 1 << 50, torch.float32)
    with pytest.raises(ValueError, match=r"needs 4,503,599,627,370,496 bytes for this rank, and .* the disk has"):
        tiers.add("disk", [spec])


def test_nothing_is_left_in_the_folder(tmp_path):
    tiers = _tiers(tmp_path)
    [slot] = tiers.add("disk", [SlotSpec("optimizer states", 5000, torch.float32)])
    assert isinstance(slot, DiskSlot)
    assert not slot.tensor.any()
    slot.tensor.fill_(3)
    assert list(tmp_path.iterdir()) == []
    tensor = slot.tensor
    del tiers, slot
    assert tensor.sum() == 15_000  # who still looks at it can


def test_what_the_budget_does_not_hold_goes_to_disk(tmp_path):
    tiers = Tiers(Offload(optimizer="cpu", path=str(tmp_path), host_memory="4MiB", buffer_memory="1MiB"), ranks_here=2)
    spec = SlotSpec("optimizer states", 200_000, torch.float32)
    assert [type(slot) for slot in tiers.add("cpu", [spec, spec])] == [HostSlot, DiskSlot]
    assert tiers.describe().splitlines() == [
        "optimizer states host memory          0.8 MiB",
        "optimizer states disk                 0.8 MiB",
        "buffers          host memory          1.0 MiB",
    ]
    with pytest.raises(ValueError, match=r"host_memory='1MiB' is less than the buffers of this machine's 2 ranks"):
        Tiers(Offload(optimizer="cpu", path=str(tmp_path), host_memory="1MiB", buffer_memory="1MiB"), ranks_here=2)
