"""Plain PyTorch on one process, with the loss of logits or one of those that do without them."""

import os
from collections.abc import Callable

from torch import Tensor
from torch import distributed as dist
from torch.nn import functional as F

from benchmarks.language_models import LanguageModel
from benchmarks.peers import ModelFactory, Step
from benchmarks.workload import OPTIMIZER, loss_fn, loss_of_probabilities

Loss = Callable[[LanguageModel, Tensor, Tensor], Tensor]


def build(model: ModelFactory, rank: int, world_size: int, *, loss: str = "whole") -> Step:
    """Options: `loss`: of "whole" logits; of their "softmax"; "cut": Apple's cut cross entropy in the form that runs
    without a GPU; "chunked": torch 2.13's ``F.linear_cross_entropy``, a chunk of the batch at a time."""
    assert world_size == int(os.environ["WORLD_SIZE"]) == 1
    dist.init_process_group("gloo")
    plain = model()
    optimizer = OPTIMIZER(plain.parameters())
    compute = {"whole": _whole, "softmax": _of_probabilities, "cut": _cut, "chunked": _chunked}[loss]

    def step(inputs: Tensor, targets: Tensor) -> float:
        value = compute(plain, inputs, targets)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.item()

    return step


def _whole(model: LanguageModel, inputs: Tensor, targets: Tensor) -> Tensor:
    return loss_fn(model(inputs), targets)


def _of_probabilities(model: LanguageModel, inputs: Tensor, targets: Tensor) -> Tensor:
    return loss_of_probabilities(model(inputs), targets)


def _cut(model: LanguageModel, inputs: Tensor, targets: Tensor) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(model.features(inputs), model.head, targets, impl="torch_compile")


def _chunked(model: LanguageModel, inputs: Tensor, targets: Tensor) -> Tensor:
    from torch.nn import LinearCrossEntropyOptions

    features = model.features(inputs).flatten(0, 1)
    return F.linear_cross_entropy(features, model.head, targets.flatten(), options=LinearCrossEntropyOptions())
