"""Checkpoints that cannot be written or read: an error on every rank, and nothing has changed."""

from functools import partial
from typing import Any

import pytest
import torch

import parity
import tensorshard as ts

SGD = partial(torch.optim.SGD, lr=0.1)


def _error(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _saved(optimizer: Any, path: str) -> None:
    engine = ts.parallelize(parity.build("gpt"), ts.Plan(), optimizer=optimizer, loss_fn=parity.loss_function("gpt"))
    engine.step(*parity.shard(engine, *parity.batch("gpt", 0)))
    engine.save(path)


def _loaded(path: str) -> tuple[str, bool]:
    """What load says, and whether the engine is as it was."""
    optimizer = partial(torch.optim.AdamW, lr=0.5)
    engine = ts.parallelize(parity.build("gpt"), ts.Plan(), optimizer=optimizer, loss_fn=parity.loss_function("gpt"))
    before = engine.full_state_dict()
    message = _error(lambda: engine.load(path))
    after = engine.full_state_dict()
    same = all(torch.equal(value, after[name]) for name, value in before.items())
    return message, same and engine.step_count == 0 and engine.optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.slow
def test_a_load_that_fails_changes_nothing(ranks, tmp_path):
    sgd, adamw = str(tmp_path / "sgd"), tmp_path / "adamw"
    ranks(2, _saved, SGD, sgd)
    for message, same in ranks(2, _loaded, sgd):
        assert "was written with the optimizer SGD, and this engine has AdamW" in message
        assert same
    ranks(2, _saved, partial(torch.optim.AdamW, lr=0.1), str(adamw))
    largest = max(adamw.glob("tensors-*.bin"), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    for message, same in ranks(2, _loaded, str(adamw)):
        assert "is cut off" in message and largest.name in message
        assert same


def _unwritable(path: str) -> tuple[str, str, str]:
    engine = parity.make_engine("gpt", {})
    rank = torch.distributed.get_rank()
    unwritable = _error(lambda: engine.save(f"{path}/file/checkpoint"))
    mixed = _error(lambda: engine.save(f"{path}/a", extra={"x": torch.zeros(1) if rank == 1 else 0}))
    engine.save(f"{path}/b")
    return unwritable, mixed, _error(lambda: engine.load(f"{path}/b" if rank == 0 else f"{path}/nowhere"))


def test_a_rank_that_fails_in_save_or_load_ends_all(ranks, tmp_path):
    (tmp_path / "file").write_text("")
    first, second = ranks(2, _unwritable, str(tmp_path))
    for unwritable, *_ in (first, second):
        assert "checkpoint cannot be written" in unwritable and "nothing was written" in unwritable
    assert first[1].startswith("RuntimeError: engine.save failed on rank 1, so it was not done on any: TypeError: a")
    assert second[1].startswith("TypeError: a checkpoint's extra must be made of numbers")
    assert first[2].startswith("RuntimeError: engine.load failed on rank 1, so it was not done on any: FileNotFound")
    assert second[2].startswith("FileNotFoundError:") and second[2].endswith("there is no such folder")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["b", "file"]
