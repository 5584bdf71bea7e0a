"""Before training, the first rank runs a model on simulated ranks, and says what needs whole sequences."""

import logging
from typing import Any

import pytest
import torch
from torch import nn

import parity
import tensorshard as ts
from tensorshard.context_parallel.rules import reductions


class Spectrum(nn.Module):
    """Transforms the sequence, which no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(31, 8), nn.Linear(8, 31)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        return self.head(hidden + torch.fft.fft(hidden, dim=1).real + hidden.mean(1, keepdim=True))


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _made(inputs: Any, steps: int = 0, broken: bool = False) -> list[str]:
    """What is logged by `parallelize`, and by steps after it."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("tensorshard")
    log.addHandler(handler)
    try:
        torch.manual_seed(0)
        with pytest.MonkeyPatch.context() as patch:
            if broken:
                patch.setattr(reductions, "_across", lambda func, _, x, *rest: func(x.local, *rest[2][1:], **rest[3]))
            engine = ts.parallelize(
                Spectrum(), ts.Plan(cp=2, zero=1), optimizer=parity.ADAMW, loss_fn=_loss, sample_inputs=inputs
            )
        for _ in range(steps):
            tokens = torch.arange(40).view(4, 10) % 31
            engine.step(tokens, tokens)
    finally:
        log.removeHandler(handler)
    return said


def test_operations_on_whole_sequences_are_listed_before_training_once(ranks):
    first, other = ranks(2, _made, torch.arange(40).view(4, 10) % 31, 1)
    listed = [message for message in first if "computed on whole sequences" in message]
    assert len(listed) == 1 and "fft_fft (" in listed[0] and "test_checked_before_training.py:" in listed[0]
    assert not [message for message in other if "whole sequences" in message]


@pytest.mark.slow
def test_inputs_are_guessed_and_what_cannot_be_checked_is_said(ranks):
    assert any("fft_fft (" in message for message in ranks(2, _made, None)[0])


def _refused() -> str:
    with pytest.raises(ValueError, match="cp=2") as error:
        _made(torch.arange(40).view(4, 10) % 31, broken=True)
    return str(error.value)


@pytest.mark.slow
def test_a_rule_that_computes_something_else_is_found_before_training(ranks):
    for said in ranks(2, _refused):
        assert "cp=2 was given, but on 2 simulated ranks" in said and "computes something else" in said
        assert "set cp=1" in said
