"""Models that decide by the values of their tensors: tensor parallelism is found for them on real ones."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import parity
import seeds
import tensorshard as ts
from tensorshard.tensor_parallel.search.find_table import find_tensor_plan
from toys import plain_loop

ADAMW = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1, eps=1e-4)
WIDTH, VOCABULARY = 32, 61


class Routed(nn.Module):
    """Each token goes to one expert; how many go to which depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weight, chosen = self.router(tokens).softmax(-1).max(-1)
        mixed = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            (places,) = torch.where(chosen == index)
            mixed = mixed.index_add(0, places, expert(tokens[places]) * weight[places, None])
        return x + mixed.view_as(x)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Routed() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Translator(nn.Module):
    """Torch's decoder compares its mask with a causal one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 4, 1, 1, 64, batch_first=True, dropout=0.0)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.size(1))
        return self.head(self.transformer(self.embedding(source), self.embedding(target), tgt_mask=mask))


MODELS: dict[str, type[nn.Module]] = {"mixture": Mixture, "translator": Translator}


def _build(kind: str) -> nn.Module:
    seeds.seed(2)
    return MODELS[kind]()


def _batch(kind: str, step: int) -> tuple[Any, torch.Tensor]:
    tokens = torch.randint(0, VOCABULARY, (4, 9), generator=seeds.generator(step))
    inputs = tokens[:, :-1]
    return (inputs if kind == "mixture" else {"source": tokens.flip(1), "target": inputs}), tokens[:, 1:].contiguous()


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _train(kind: str, fields: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = ts.parallelize(_build(kind), ts.Plan(**fields), optimizer=ADAMW, loss_fn=_loss)
    losses = [engine.step(*_batch(kind, step)).item() for step in range(4)]
    return losses, engine.full_state_dict()


@pytest.mark.slow_cases("translator")
@pytest.mark.parametrize("kind", MODELS)
def test_they_train_as_one_process_does(ranks, kind):
    results = ranks(2, _train, kind, dict(tp=2))
    model = _build(kind)
    steps = [[_batch(kind, step)] for step in range(4)]
    expected = list(plain_loop(model, ADAMW(model.parameters()), steps, loss_fn=_loss))
    for losses, _ in results:
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    parity.assert_same_state(results[0][1], model.state_dict(), 1e-5)


def test_the_search_is_the_same_each_time():
    first, second = (find_tensor_plan(_build("mixture"), 2) for _ in range(2))
    assert first.plan.to_dict() == second.plan.to_dict()
    assert first.split_share > 0.9
