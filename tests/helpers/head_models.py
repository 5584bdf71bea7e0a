"""Models whose last layer computes their loss, made of plain ones, with the same weights by the same names."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import seeds
import tensorshard as ts
from tensorshard.models import GPT, Bert
from tensorshard.nn import ParallelLinearCrossEntropy


def _replace(owner: nn.Module, name: str, **options: object) -> None:
    """Puts a head with the weights of the linear layer ``owner.name`` in its place."""
    linear = getattr(owner, name)
    head = ParallelLinearCrossEntropy.from_linear(linear, **options)
    head.weight = linear.weight  # the object itself, which may be tied
    setattr(owner, name, head)


def gpt_with_head(model: nn.Module) -> nn.Module:
    _replace(model, "head", reduction="sum")
    model.__class__ = _GPT
    return model


def bert_with_head(model: nn.Module) -> nn.Module:
    _replace(model.head, "decoder", reduction="sum")
    model.__class__ = BertWithHead
    return model


def resnet_with_head(model: nn.Module) -> nn.Module:
    _replace(model.classifier, "1")
    return _resnet(model)


class _GPT(GPT):
    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x), targets)


class BertWithHead(Bert):
    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = self.embeddings(tokens, torch.zeros_like(tokens))
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        for block in self.blocks:
            x = block(x, mask)
        head = self.head
        return head.decoder(head.norm(nn.functional.gelu(head.dense(x))), targets)


def _resnet(model: nn.Module) -> nn.Module:
    from transformers import ResNetForImageClassification

    class _ResNet(ResNetForImageClassification):
        def forward(self, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return self.classifier[1](self.classifier[0](self.resnet(images).pooler_output), targets)

    model.__class__ = _ResNet
    return model


# -- a small model that is its own, and what its tests share --

UPDATE = dict(lr=0.2, momentum=0.9, weight_decay=0.05)
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.5, nesterov=True)


class HeadClassifier(nn.Module):
    """Its head has 37 classes."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))
        self.head = ParallelLinearCrossEntropy(8, 37, bias=True, **options)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x), targets)


def classifier_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of 8 samples."""
    generator = seeds.generator(5)
    return torch.randn(8, 6, generator=generator), torch.randint(37, (8,), generator=generator)


def given_loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss that the model returned."""
    return output


def parallelized(
    model: nn.Module | Callable[[], nn.Module], plan: ts.Plan, optimizer: Any = SGD, seed: int = 3
) -> ts.Engine:
    """An Engine of a model that returns its loss."""
    return ts.parallelize(model, plan, optimizer=optimizer, loss_fn=given_loss, seed=seed)
