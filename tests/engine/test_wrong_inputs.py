"""Wrong inputs of the first hour, each told in a sentence."""

from functools import partial
from typing import Any

import torch
from torch import nn

import parity
import tensorshard as ts

SGD = partial(torch.optim.SGD, lr=0.1)


def _error(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_field_of_plan_that_does_not_exist():
    message = _error(lambda: ts.Plan(micro_batch=4))
    assert message == "TypeError: Plan has no field 'micro_batch'; did you mean 'micro_batches'?"


def _engine(loss_fn: Any, optimizer: Any = SGD) -> ts.Engine:
    model = nn.Sequential(nn.Embedding(7, 8), nn.Flatten(), nn.Linear(16, 3))
    return ts.parallelize(model, ts.Plan(), optimizer=optimizer, loss_fn=loss_fn)


def _messages() -> list[str]:
    loss_fn = nn.functional.cross_entropy
    tokens, targets = torch.tensor([[0, 6], [1, 2]]), torch.tensor([0, 2])
    engine = _engine(loss_fn)
    found = [
        _error(lambda: _engine(lambda output: output)),
        _error(lambda: _engine(loss_fn, partial(torch.optim.SGD, lr=-1))),
        _error(lambda: engine.step(tokens + 1, targets)),
        _error(lambda: engine.evaluate(tokens - 1, targets)),
        _error(lambda: engine.step(tokens, targets + 1)),
        _error(lambda: engine.step(tokens, targets.float())),
    ]
    assert engine.step(tokens, targets).isfinite()
    return found


def test_arguments_and_batches_that_do_not_fit(ranks):
    expected = [
        "TypeError: loss_fn takes (output), and is called as loss_fn(output, targets)",
        "ValueError: optimizer(parameters) failed: Invalid learning rate: -1",
        "OutOfRangeError: an embedding of the model was asked for a row that it does not have: the integer inputs of "
        "this batch are 1 to 7; of the embeddings, 0 has 7 rows",
        "OutOfRangeError: an embedding of the model was asked for a row that it does not have: the integer inputs of "
        "this batch are -1 to 5",
        "OutOfRangeError: the targets of this batch do not fit the loss: Target 3 is out of bounds. They are 1 to 3,",
        "RuntimeError: the targets of this batch do not fit the loss: ",
    ]
    found = ranks(1, _messages)[0]
    for message, start in zip(found, expected, strict=True):
        assert message.startswith(start)
    assert "class numbers are int64" in found[-1]


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


def test_a_load_that_fails_changes_nothing(ranks, tmp_path):
    sgd, adamw = str(tmp_path / "sgd"), tmp_path / "adamw"
    ranks(2, _saved, SGD, sgd)
    for message, same in ranks(2, _loaded, sgd):
        assert "was written with the optimizer SGD, and this engine has AdamW" in message
        assert same
    ranks(2, _saved, partial(torch.optim.AdamW, lr=0.1), str(adamw))
    largest = max(adamw.glob("*.distcp"), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    for message, same in ranks(2, _loaded, str(adamw)):
        assert message.startswith(f"ValueError: {adamw} cannot be read, and nothing was changed: rank ")
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
    assert second[2].startswith("FileNotFoundError:") and second[2].endswith("it has no file engine.json")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["b", "file"]
