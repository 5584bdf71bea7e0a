"""Units of parameters on another tier: what is read when, and into how much memory."""

import errno
import os

import pytest
import torch
from torch import nn

from tensorshard import Offload
from tensorshard.offload.offloaded_parameters import OffloadedParameters, ParameterUnit
from tensorshard.offload.tiers import Tiers

SIZES = [(5000, 7), (300_000,), (5000, 7), (0, 3)]  # elements of each unit's parameters


def _parameters(folder, tier: str = "disk") -> tuple[OffloadedParameters, Tiers, list[list[torch.Tensor]]]:
    tiers = Tiers(Offload(optimizer="cpu", parameters=tier, path=str(folder)))
    torch.manual_seed(0)
    return OffloadedParameters(tiers), tiers, [[torch.randn(size) for size in sizes] for sizes in SIZES]


def _unit(parameters: OffloadedParameters, shards: list[torch.Tensor]) -> ParameterUnit:
    kept = [parameters.keep(shard) for shard in shards]
    masters = [nn.Parameter(shown) for shown, _ in kept]
    return parameters.unit(masters, [place for _, place in kept], [shard.dtype for shard in shards])


def _pass(parameters: OffloadedParameters, units: list[ParameterUnit], phase: str) -> list[list[torch.Tensor]]:
    seen = []
    for unit in units:
        with parameters.read(unit, phase) as tensors:
            seen.append([tensor.clone() for tensor in tensors])
    return seen


def _same(found: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> bool:
    return all(torch.equal(a, b) for x, y in zip(found, expected, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("tier", ["cpu", "disk"])
def test_units_are_read_as_they_are_in_any_order(tmp_path, tier):
    parameters, _, values = _parameters(tmp_path, tier)
    units = [_unit(parameters, shards) for shards in values]
    for order in ([0, 1, 2, 3], [0, 1, 2, 3], [2, 0, 2, 1], [3, 1]):  # learned, then another
        parameters.begin()
        assert _same(_pass(parameters, [units[i] for i in order], "forward"), [values[i] for i in order])
    units[1].slots[0].tensor.mul_(2)
    parameters.begin()
    assert _same(_pass(parameters, units[:2], "forward"), [values[0], [values[1][0] * 2]])


def test_the_next_unit_is_read_ahead_and_memory_is_used_again(tmp_path, monkeypatch):
    parameters, _, values = _parameters(tmp_path)
    units = [_unit(parameters, shards) for shards in values]
    for _ in range(2):
        parameters.begin()
        _pass(parameters, units, "forward")
        _pass(parameters, units[::-1], "backward")
    read = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: read.append(args[2]) or preadv(*args))
    parameters.begin()
    _pass(parameters, units[:1], "forward")
    assert parameters._ahead is not None
    assert parameters._ahead.unit is units[1]
    parameters._ahead.wait()
    count = len(read)
    _pass(parameters, units[1:], "forward")
    _pass(parameters, units[::-1], "backward")
    assert count == 3  # the first unit's two tensors, and the one of the second
    assert len(read) == 2 * 6  # each tensor that is not empty, in forward and in backward: none is read twice
    assert {len(memory) for memory in parameters._free} == {units[0].nbytes}  # that of the largest unit is freed


def test_a_failure_is_kept_until_it_is_asked_for(tmp_path, monkeypatch):
    parameters, tiers, values = _parameters(tmp_path)
    units = [_unit(parameters, shards) for shards in values]

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        assert not any(tensor.any() for tensors in _pass(parameters, units, "forward") for tensor in tensors)
    assert "could not be read" in str(tiers.take_failure())
    assert tiers.take_failure() is None
    assert _same(_pass(parameters, units[:1], "forward"), values[:1])


def test_a_disk_that_is_too_small_is_refused(tmp_path):
    parameters, *_ = _parameters(tmp_path)
    with pytest.raises(ValueError, match=r"needs 4,503,599,627,370,496 bytes for this rank"):
        parameters.add([torch.empty(1).expand(1 << 50)])
