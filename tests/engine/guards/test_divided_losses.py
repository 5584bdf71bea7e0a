"""A loss that was divided by the micro-batches, by which the Engine divides: named once, and nothing else is."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tensorshard as ts
from log_lines import logged
from tensorshard.torch_private.autograd import divisor_of_mean

SGD = partial(torch.optim.SGD, lr=0.1)
CLASSES = 5
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_entropy: Loss = F.cross_entropy


def _squares(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, F.one_hot(targets, CLASSES).float())


# A loss, how many micro-batches the plan has, and whether the loss was divided by them for sure.
LOSSES: dict[str, tuple[Loss, int, bool]] = {
    "cross entropy": (lambda x, y: _entropy(x, y) / 4, 4, True),
    "of two": (lambda x, y: _entropy(x, y) / 2, 2, True),
    "of segments": (lambda x, y: F.cross_entropy(x[:, :, None, None], y[:, None, None]) / 4, 4, True),
    "in place": (lambda x, y: _entropy(x, y).div_(4), 4, True),
    "cast": (lambda x, y: _entropy(x.double(), y).float().squeeze() / 4, 4, True),
    "of logits": (lambda x, y: F.binary_cross_entropy_with_logits(x[:, 0], (y > 2).float()) / 4, 4, True),
    "squares": (lambda x, y: _squares(x, y) / 4, 4, True),
    "whole": (_entropy, 4, False),
    "by another number": (lambda x, y: _entropy(x, y) / 2, 4, False),
    "of one micro-batch": (lambda x, y: _entropy(x, y) / 4, 1, False),
    "a weight": (lambda x, y: _entropy(x, y) * 0.25, 4, False),
    "half of squares": (lambda x, y: _squares(x, y) / 2, 2, False),
    "two terms": (lambda x, y: (_entropy(x, y) + _squares(x, y)) / 2, 2, False),
    "a sum by its samples": (lambda x, y: F.cross_entropy(x, y, reduction="sum") / len(y), 4, False),
    "a mean of sums": (lambda x, y: F.cross_entropy(x, y, reduction="none").mean() / 4, 4, False),
    "a number with a point": (lambda x, y: _entropy(x, y) / 4.0, 4, False),
}


def _said(size: int) -> dict[str, tuple[list[str], list[str]]]:
    """What two steps say, in a loop of one's own and by engine.step."""
    said = {}
    for name, (loss_fn, micro_batches, _) in LOSSES.items():
        of_loops = []
        for by_hand in (True, False):
            plan = ts.Plan(zero=1, micro_batches=micro_batches)
            engine = ts.parallelize(nn.Linear(6, CLASSES), plan, optimizer=SGD, loss_fn=loss_fn, check_samples=False)
            inputs, targets = torch.randn(16, 6).chunk(size)[engine.mesh.dp_rank], torch.arange(16 // size) % CLASSES
            with logged() as lines:
                for _ in range(2):
                    if not by_hand:
                        engine.step(inputs, targets)
                        continue
                    for x, y in zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
                        engine.backward(loss_fn(engine.model(x), y))
                    engine.optimizer.step()
                    engine.optimizer.zero_grad()
            of_loops.append([line for line in lines if "was divided by" in line])
        said[name] = (of_loops[0], of_loops[1])
    return said


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_was_divided_for_sure_is_named_once(ranks, size):
    said = ranks(size, _said, size)[0]
    for name, (_, count, is_divided) in LOSSES.items():
        words = f"was divided by {count}, and Plan(micro_batches={count}) divides by it again"
        for lines in said[name]:
            assert len(lines) == int(is_divided), (name, lines)
            assert all(words in line for line in lines)


def test_a_graph_tells_by_what_its_mean_was_divided():
    x, y = torch.randn(4, CLASSES, requires_grad=True), torch.arange(4)
    assert divisor_of_mean(_entropy(x, y) / 3) == 3
    assert divisor_of_mean(_entropy(x, y) / 3 / 3) is None
    assert divisor_of_mean(x.sum()) is None and divisor_of_mean(torch.zeros(())) is None
    assert divisor_of_mean(_entropy(x, y) / torch.tensor(4.0)) is None
