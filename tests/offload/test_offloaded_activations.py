"""What blocks keep for backward, on another tier: the same to the last bit, and nothing is held too long."""

import errno
import gc
import os
import re
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import parity
import tensorshard as ts
from off_device import off_device
from tensorshard.offload import activations
from tensorshard.offload.activations import OffloadedActivations
from tensorshard.offload.tiers import Tiers

ADAMW = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)


def _train(kind: str, fields: dict[str, Any], steps: int) -> tuple[list[Any], dict[str, torch.Tensor], Any]:
    """Losses and weights of a few steps, an evaluation and what is still held after it; the smallest tensors move."""
    engine = ts.parallelize(
        partial(parity.build, kind), ts.Plan(**fields), optimizer=ADAMW, loss_fn=parity.loss_function(kind)
    )
    losses = [engine.step(*parity.shard(engine, *parity.batch(kind, s))).item() for s in range(steps)]
    losses.append(engine.evaluate(*parity.shard(engine, *parity.batch(kind, 0))).item())
    held = None
    if engine.plan.offload is not None:
        gc.collect()
        held = engine.storage.describe(), engine.storage.activations.space.lent_bytes
    return losses, engine.full_state_dict(), held


def _compare(
    cases: list[tuple[str, dict[str, Any]]], offload: dict[str, Any], steps: int = 2
) -> list[tuple[str, str, bool]]:
    """Of each case what it is, what is wrong ("" for nothing), and whether this rank moved anything."""
    found_of_cases = []
    with mock.patch.object(activations, "SMALLEST", 64):
        for kind, fields in cases:
            plain = _train(kind, fields, steps)
            found = _train(kind, {**fields, "offload": {"buffer_memory": "512KiB", **offload}}, steps)
            same = plain[0] == found[0] and all(torch.equal(found[1][name], plain[1][name]) for name in plain[1])
            wrong = "" if same and not found[2][1] else f"losses {plain[0]} and {found[0]}, held {found[2]}"
            found_of_cases.append((f"{kind} {fields}", wrong, "activations" in found[2][0]))
    return found_of_cases


def _compare_off_device(
    cases: list[tuple[str, dict[str, Any]]], offload: dict[str, Any]
) -> list[tuple[str, str, bool]]:
    with off_device():
        return _compare(cases, offload)


def _check(results: list[list[tuple[str, str, bool]]]) -> None:
    """A loss or weight that differs from that without offload is wrong; so is what is held still, or never moved.

    Under a pipeline's schedule a rank may have no blocks: it moves nothing.
    """
    for rank, found in enumerate(results):
        assert [(rank, case, wrong) for case, wrong, _ in found if wrong] == []
    assert all(any(moved) for moved in zip(*([moved for *_, moved in found] for found in results), strict=True))


ONE = [
    ("gpt_dropout", dict(precision="bf16", micro_batches=2, clip_grad_norm=0.5)),
    ("t5", dict(recompute="selective")),  # its decoder's blocks share what the encoder made
]
TWO = [
    ("gpt_tied", dict(zero=3, micro_batches=2, clip_grad_norm=0.5)),
    ("gpt", dict(pp=2, micro_batches=4, zero=1)),
]
MORE = [
    ("gpt", dict(zero=0)),
    ("llama", dict(zero=2, recompute="full")),
    ("gpt_101", dict(tp=2, zero=1)),
    ("bert", dict(zero=3, precision="bf16", recompute="selective")),
    ("gpt", dict(zero=3, shard_units=["blocks.*.mlp", "embedding"])),
    ("resnet", dict(zero=3, recompute="full")),
    ("gpt_101", dict(tp=2, sequence_parallel=True, recompute="full")),
    ("mixtral", dict(zero=2)),
    ("gpt", dict(pp=2, micro_batches=4, pp_schedule="gpipe", recompute="full")),
    ("gpt_tied", dict(pp=2, micro_batches=4, pp_schedule="zbv")),
    ("gpt", dict(compile=True, zero=3)),
    ("llama", dict(cp=2, recompute="full")),
    ("gpt", dict(cp=2, zero=1)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "cases"), [(1, ONE), (2, TWO)])
def test_losses_and_weights_are_the_same_to_the_last_bit(ranks, tmp_path, world_size, cases):
    _check(ranks(world_size, _compare, cases, dict(activations="disk", path=str(tmp_path))))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "cases", "offload"),
    [(1, ONE, dict(activations="cpu")), (2, TWO[:1], dict(activations="disk", optimizer="cpu", gradients="cpu"))],
)
def test_the_same_from_a_device_whose_memory_is_not_the_hosts(ranks, tmp_path, world_size, cases, offload):
    _check(ranks(world_size, _compare_off_device, cases, dict(path=str(tmp_path), **offload)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("offload", "cases"),
    [(dict(activations="cpu"), MORE[::2]), (dict(activations="disk", optimizer="disk"), MORE[1::2])],
    ids=["cpu", "disk"],
)
def test_the_same_under_more_plans(ranks, tmp_path, offload, cases):
    _check(ranks(2, _compare, cases, dict(path=str(tmp_path), **offload)))


# -- one block --


class Kept(nn.Module):
    """Keeps views of one storage, other strides and dtypes, a buffer, and its own output."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Linear(16, 48)
        self.register_buffer("mask", torch.rand(64, 16) > 0.3)
        self.twist = nn.Parameter(torch.randn(16, 16, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.packed(x).view(64, 3, 4, 4).unbind(1)
        attended = scaled_dot_product_attention(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1))
        hidden = attended.transpose(0, 1).reshape(64, 16).masked_fill(self.mask, 0.5)
        order = hidden.argsort(dim=0)  # integers
        turned = torch.view_as_real((hidden.to(torch.complex64) @ self.twist).conj() * 2j).sum(-1)
        return (hidden.gather(0, order) + turned[:, 1:].sum() * turned).sigmoid_()


def _activations(tmp_path: Any, **fields: Any) -> OffloadedActivations:
    return OffloadedActivations(Tiers(ts.Offload(**{"activations": "disk", "path": str(tmp_path), **fields})))


def _gradients(model: nn.Module, run: Any) -> list[torch.Tensor]:
    model.zero_grad()
    x = torch.linspace(-2, 2, 64 * 16).view(16, 64).T.requires_grad_()  # not contiguous
    run(model, x).square().sum().backward()
    return [x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("tier", ["cpu", "disk"])
def test_views_dtypes_and_strides_are_kept_and_storages_are_moved_once(tmp_path, monkeypatch, tier):
    monkeypatch.setattr(activations, "SMALLEST", 64)
    torch.manual_seed(0)
    model = Kept()
    moved = _activations(tmp_path, activations=tier)
    plain = _gradients(model, lambda block, x: block(x))
    packed = []
    taken = moved.space.take
    monkeypatch.setattr(moved.space, "take", lambda nbytes: (packed.append(nbytes), taken(nbytes))[1])
    # Twice: the second time its backward is known to follow at once, so that it keeps all.
    for expected in (1, 0):
        packed.clear()
        found = _gradients(model, lambda block, x: moved.forward(block, block, x))
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
        assert packed.count(4 * 64 * 48) == expected  # three views of what one layer made
        assert not {model.twist.nbytes, model.packed.weight.nbytes} & set(packed) - {64 * 16 * 4}
        assert moved.space.lent_bytes == 0


def test_memory_of_what_was_moved_is_freed(tmp_path):
    moved, blocks = _activations(tmp_path), [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)]
    hidden = torch.randn(512, 64, requires_grad=True)
    seen = []
    for block in blocks:
        hidden = moved.forward(block, block, hidden)
        seen.append(torch.multiprocessing.reductions.StorageWeakRef(hidden.untyped_storage()))
    assert moved.space.lent_bytes == 6 * 512 * 64 * 4  # inputs of three layers and of three activations
    assert [each.expired() for each in seen] == [True, True, False]
    hidden.sum().backward()
    del hidden
    assert moved.space.lent_bytes == 0


def test_a_failed_forward_gives_all_back(tmp_path):
    moved = _activations(tmp_path)

    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.exp()
            kept = x.exp().sin()
            raise RuntimeError(f"no {kept.shape}")

    with pytest.raises(RuntimeError, match=r"no torch\.Size"):
        moved.forward(block := Fails(), block, torch.randn(512, 64, requires_grad=True))
    gc.collect()
    assert moved.take_failure() is None  # what was under way is over
    assert moved.space.lent_bytes == 0


def test_a_tensor_that_stays_and_is_changed_in_place_is_refused(tmp_path):
    moved, small = _activations(tmp_path), torch.ones(3, requires_grad=True)
    block = nn.Sigmoid()
    output = moved.forward(block, block, small)
    with torch.no_grad():
        output.mul_(2)
    with pytest.raises(RuntimeError, match=r"shape \[3\] that is needed for the gradient was changed in place .*clone"):
        output.sum().backward()


def test_space_of_the_file_is_used_again(tmp_path):
    space = _activations(tmp_path).space
    slots = [space.take(5000) for _ in range(4)]
    starts = [slot.start for slot in slots]
    assert starts == [0, 8192, 16384, 24576]
    for index in (2, 0, 1):  # neighbours become one
        space.give_back(slots[index], 5000, [])
    assert space.take(3 * 8192).start == 0
    assert space.lent_bytes == 4 * 8192


def test_the_budget_of_host_memory_counts_activations(tmp_path):
    tiers = Tiers(ts.Offload(activations="cpu", path=str(tmp_path), host_memory="2MiB", buffer_memory="1MiB"))
    space = OffloadedActivations(tiers).space
    taken = [space.take(600_000) for _ in range(2)]
    assert [type(slot).__name__ for slot in taken] == ["HostSlot", "ActivationSlot"]
    assert tiers.describe().splitlines()[:2] == [
        "activations      host memory          0.6 MiB",
        "activations      disk                 0.6 MiB",
    ]
    space.give_back(taken[0], 600_000, [])
    assert type(space.take(600_000)).__name__ == "HostSlot"


def _fails(folder: str, call: str) -> str:
    with mock.patch.object(activations, "SMALLEST", 64):
        fields = dict(zero=2, offload=dict(activations="disk", path=folder))
        engine = ts.parallelize(
            partial(parity.build, "gpt"), ts.Plan(**fields), optimizer=ADAMW, loss_fn=parity.loss_function("gpt")
        )
        before = engine.full_state_dict()
        found = "nothing failed"
        given = parity.shard(engine, *parity.batch("gpt", 0))

        def fail(*_: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with mock.patch.object(os, call, fail if engine.mesh.rank == 1 else getattr(os, call)):
            try:
                engine.step(*given)
            except (OSError, ValueError, RuntimeError) as error:
                found = str(error)
        after = engine.full_state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        engine.step(*given)  # once the disk has recovered
        return found


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            "posix_fallocate",
            r"needs [\d,]+ bytes for this rank, and .*set offload.path to a folder on a larger disk",
        ),
        pytest.param("pwritev", "scratch file in '{}' could not be written", marks=pytest.mark.slow),
        ("preadv", "scratch file in '{}' could not be read .*weights are as before it"),
    ],
    ids=["posix_fallocate", "pwritev", "preadv"],
)
def test_a_disk_that_fails_on_one_rank_stops_all_before_the_update(ranks, tmp_path, call, message):
    for rank, found in enumerate(ranks(2, _fails, str(tmp_path), call)):
        assert re.search(message.format(tmp_path), found), (rank, found)
