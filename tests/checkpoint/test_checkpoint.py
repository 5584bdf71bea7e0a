"""Checkpoints between layouts, and what must not be opened or overwritten."""

import json
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import parity
from tensorshard.weights.files.checkpoint_files import open_checkpoint, read_metadata, read_tensors

PLANS = {
    "zero3_on_2": (2, dict(zero=3)),
    "zero1_on_2": (2, dict(zero=1)),
    "zero2_on_4": (4, dict(zero=2)),
    "hybrid_on_4": (4, dict(zero=3, dp_replicate=2)),
    "one": (1, dict()),
}


def _train_and_save(fields: dict, path: str, before: int, after: int) -> list[float]:
    engine = parity.make_engine("gpt_tied", fields)
    steps = range(before + after)
    losses = []
    for step in steps:
        if step == before:
            engine.save(path, extra={"samples_consumed": before * parity.GLOBAL_BATCH})
        losses.append(engine.step(*parity.shard(engine, *parity.batch("gpt_tied", step))).item())
    return losses[before:]


def _load_and_train(fields: dict, path: str, before: int, after: int) -> list[float]:
    engine = parity.make_engine("gpt_tied", fields)
    with torch.no_grad():
        for master in engine.sharded.masters().values():
            master.zero_()
    extra = engine.load(path)
    assert extra == {"samples_consumed": before * parity.GLOBAL_BATCH}
    assert engine.step_count == before
    return [
        engine.step(*parity.shard(engine, *parity.batch("gpt_tied", step))).item()
        for step in range(before, before + after)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "written",
    [
        pytest.param("zero3_on_2", marks=pytest.mark.slow),
        pytest.param("zero1_on_2", marks=pytest.mark.slow),
        "hybrid_on_4",
    ],
)
def test_any_layout_reads_any_other(ranks, tmp_path, written):
    world, fields = PLANS[written]
    path = str(tmp_path / "step-8")
    undisturbed = ranks(world, _train_and_save, fields, path, 8, 4)[0]
    for world_size, other in PLANS.values():
        resumed = ranks(world_size, _load_and_train, other, path, 8, 4)[0]
        torch.testing.assert_close(torch.tensor(resumed), torch.tensor(undisturbed), rtol=1e-5, atol=1e-5)


def _save_twice(folder: Path) -> tuple[list[str], int]:
    engine = parity.make_engine("gpt", {})
    engine.save(folder / "a")
    found = []
    for path, overwrite in ((folder / "a", False), (folder / "mine", True)):
        try:
            engine.save(path, overwrite=overwrite)
        except FileExistsError as error:
            found.append(str(error))
    dist.barrier()
    if engine.mesh.rank == 0:
        (folder / "a" / "tokenizer.json").write_text("mine")
    engine.step(*parity.shard(engine, *parity.batch("gpt", 0)))
    engine.save(folder / "a", overwrite=True)
    engine.save(folder / "new", overwrite=True)
    other = parity.make_engine("gpt", dict(zero=1))
    other.load(folder / "a")
    return found, other.step_count


def test_checkpoints_are_overwritten_where_that_is_said_and_nothing_else_is(ranks, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("mine")
    for (there, other), steps in ranks(2, _save_twice, tmp_path):
        assert "a is there already and is not overwritten" in there and "or give overwrite=True" in there
        assert "mine is there already and is not a checkpoint of engine.save" in other
        assert steps == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "mine", "new"]
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
    assert (tmp_path / "a" / "tokenizer.json").read_text() == "mine"


def _plans_of_saves(fields: dict, folder: Path) -> tuple[list[int], list[bool]]:
    """How many plans were made until each save, and whether each checkpoint has what was saved."""
    engine = parity.make_engine("gpt", fields)
    made = []
    local = DefaultSavePlanner.create_local_plan
    DefaultSavePlanner.create_local_plan = lambda self: (made.append(1), local(self))[1]
    plans, whole = [], []
    try:
        for number in range(5):
            if number == 3 and engine.mesh.rank == 0:  # one rank holds something new
                engine.register_state("own", torch.nn.Linear(2, 2), per_rank=True)
            elif number == 3:
                engine.register_state("own", torch.nn.ReLU(), per_rank=True)
            engine.save(folder / str(number))
            plans.append(len(made))
            now = engine.full_state_dict()
            stored = read_tensors(folder / str(number), "model.")
            whole.append(all(torch.equal(value, stored[name]) for name, value in now.items()))
            engine.step(*parity.shard(engine, *parity.batch("gpt", number)))
    finally:
        DefaultSavePlanner.create_local_plan = local
    return plans, whole


@pytest.mark.slow
@pytest.mark.parametrize("fields", [dict(zero=3), dict(tp=2, zero=0)], ids=["zero 3", "tp 2"])
def test_a_save_of_what_the_last_one_held_makes_no_plan(ranks, tmp_path, fields):
    """The first save is before there are optimizer states, and the fourth has more."""
    for plans, whole in ranks(2, _plans_of_saves, fields, tmp_path):
        assert plans == [1, 2, 2, 3, 3]
        assert all(whole)


def _load_into(kind: str, path: str) -> str:
    try:
        parity.make_engine(kind, {}).load(path)
    except (ValueError, FileNotFoundError) as error:
        return str(error)
    return ""


def _save(kind: str, path: str) -> None:
    parity.make_engine(kind, {}).save(path)


def test_another_models_checkpoint_is_refused(ranks, tmp_path):
    path = str(tmp_path / "gpt")
    ranks(2, _save, "gpt", path)
    assert "another model" in ranks(2, _load_into, "vit", path)[0]


def test_what_is_no_checkpoint_is_said(tmp_path):
    (tmp_path / "weights.pt").touch()
    for path, why in [
        (tmp_path / "nowhere", "there is no such folder"),
        (tmp_path / "weights.pt", "it is a file, and a checkpoint is the folder that engine.save wrote"),
        (tmp_path, "it has no file engine.json"),
    ]:
        with pytest.raises(FileNotFoundError, match=f"not a checkpoint of tensorshard: {why}"):
            open_checkpoint(path)


class _Evil:
    def __reduce__(self):
        return (print, ("code ran",))


def test_metadata_that_names_code_is_not_opened(tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Evil()))
    with pytest.raises(ValueError, match=r"builtins\.print"):
        read_metadata(tmp_path)
    (tmp_path / ".metadata").write_bytes(b"\x80\x04garbage")
    with pytest.raises(ValueError, match="damaged"):
        read_metadata(tmp_path)


def _fail_while_saving(path: str) -> list[str]:
    engine = parity.make_engine("gpt", {})
    engine.save(path + "/good")
    original = json.dumps
    json.dumps = lambda *a, **k: (_ for _ in ()).throw(OSError("disk full"))
    try:
        engine.save(path + "/bad")
    except OSError:
        pass
    finally:
        json.dumps = original
    dist.barrier()
    engine.load(path + "/good")
    return [name for name in ("good", "bad") if __import__("os").path.exists(f"{path}/{name}")]


@pytest.mark.slow
def test_a_failed_save_leaves_the_previous_one(ranks, tmp_path):
    assert ranks(2, _fail_while_saving, str(tmp_path))[0] == ["good"]
