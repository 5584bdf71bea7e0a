"""Saves that go on while training does."""

import threading
from pathlib import Path
from unittest import mock

import pytest
import torch

import parity
from tensorshard.checkpoint import between_saves, writing
from tensorshard.checkpoint.integrity import check

PLANS = {
    "zero 3 on 2": (2, dict(zero=3)),
    "tp 2": (2, dict(tp=2, zero=0)),
    "offloaded": (2, dict(zero=1, offload="cpu")),
    "overlapped": (2, dict(zero=1, offload=dict(optimizer="cpu", overlap=True))),
}


def _step(engine, number: int) -> float:
    return engine.step(*parity.shard(engine, *parity.batch("gpt", number))).item()


def _save_and_go_on(folder: Path, fields: dict) -> list[float]:
    """Trains on while the writing threads wait, so that what they write later must be what was."""
    engine = parity.make_engine("gpt", fields)
    for number in range(2):
        _step(engine, number)
    may_write = threading.Event()
    finish = writing.RankFile.append
    writing.RankFile.append = lambda self, *args: (
        threading.current_thread() is threading.main_thread() or may_write.wait(60),
        finish(self, *args),
    )
    try:
        engine.save(folder / "background", background=True)
        losses = [_step(engine, number) for number in (2, 3)]
        assert engine.saving == str(folder / "background") and not (folder / "background").exists()
        may_write.set()
        engine.wait_for_save()
        assert engine.saving is None
    finally:
        writing.RankFile.append = finish
    engine.save(folder / "again", background=True)
    engine.save(folder / "third")  # waits for the second
    assert (folder / "again").is_dir()
    other = parity.make_engine("gpt", fields)
    other.load(folder / "background")
    assert other.step_count == 2
    assert [_step(other, number) for number in (2, 3)] == losses
    engine.wait_for_update()
    other.wait_for_update()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "zero 3 on 2",
        "overlapped",
        pytest.param("tp 2", marks=pytest.mark.slow),
        pytest.param("offloaded", marks=pytest.mark.slow),
    ],
)
def test_what_is_saved_is_the_state_of_the_call(ranks, tmp_path, name):
    import tensorshard as ts

    world, fields = PLANS[name]
    if isinstance(fields.get("offload"), dict):
        fields = {**fields, "offload": ts.Offload(**fields["offload"])}
    ranks(world, _save_and_go_on, tmp_path, fields)
    for folder in ("background", "again", "third"):
        check(tmp_path / folder)


def _fail(folder: Path, failing_rank: int) -> tuple[str, list[str], int]:
    engine = parity.make_engine("gpt", dict(zero=3))
    engine.save(folder / "good")
    torch.distributed.barrier()
    finish = writing.RankFile.finish

    def fails(file: writing.RankFile) -> dict:
        if engine.mesh.rank == failing_rank:
            raise OSError(28, "No space left on device")
        return finish(file)

    writing.RankFile.finish = fails
    message = ""
    try:
        engine.save(folder / "bad", background=True)
        for number in range(200):
            _step(engine, number)
    except RuntimeError as error:
        message = str(error)
    finally:
        writing.RankFile.finish = finish
    failed_in = engine.step_count
    _step(engine, failed_in)  # training goes on
    engine.save(folder / "bad")
    return message, sorted(path.name for path in folder.iterdir()), failed_in


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_failed_save_is_raised_by_the_next_update_on_all_ranks(ranks, tmp_path, failing_rank):
    results = ranks(2, _fail, tmp_path, failing_rank)
    assert results[0] == results[1]  # raised in the same step
    message, names, _ = results[0]
    assert f"the save to {tmp_path}/bad in the background has failed" in message
    assert f"On rank {failing_rank}: OSError: [Errno 28] No space left on device" in message
    assert names == ["bad", "good"]
    check(tmp_path / "good")


def _little_room(folder: Path) -> float:
    from tensorshard.checkpoint import checkpoint

    engine = parity.make_engine("gpt", dict(zero=3))
    _step(engine, 0)
    available, checkpoint.available_on_host = checkpoint.available_on_host, lambda: 40_000
    try:
        engine.save(folder / "saved", background=True)
    finally:
        checkpoint.available_on_host = available
    loss = _step(engine, 1)
    engine.wait_for_save()
    other = parity.make_engine("gpt", dict(zero=3))
    other.load(folder / "saved")
    assert _step(other, 1) == loss
    return loss


def test_what_has_no_room_in_memory_is_written_before_training_goes_on(ranks, tmp_path):
    ranks(2, _little_room, tmp_path)
    check(tmp_path / "saved")


@pytest.mark.parametrize(("backends", "expected"), [(["cpu", "cuda"], "cpu"), (["cuda"], "cuda")])
def test_training_on_gpus_does_not_wait_for_them_to_look_at_a_save(backends, expected, monkeypatch):
    """Its state travels on the CPU, unless the world is one of NCCL alone."""
    group = mock.Mock(size=lambda: 2, _device_types=[torch.device(kind) for kind in backends])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    sent = []
    monkeypatch.setattr(between_saves, "all_reduce_", lambda state, *_, **__: sent.append(state))
    monkeypatch.setattr(torch, "tensor", lambda _, *, device, **__: mock.Mock(device=device, tolist=lambda: [0, 0]))
    saves = between_saves.BackgroundSaves(group)
    saves.begin(mock.Mock(is_done=True, error=None))
    saves.check()
    assert [state.device.type for state in sent] == [expected] and saves.target is None
