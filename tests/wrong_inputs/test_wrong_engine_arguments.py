"""Arguments of an Engine and batches that do not fit, each refused in a sentence."""

from functools import partial
from typing import Any

import torch
from torch import nn

import tensorshard as ts

SGD = partial(torch.optim.SGD, lr=0.1)


def _error(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


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
