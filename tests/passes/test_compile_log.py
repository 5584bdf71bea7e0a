"""A step that compiles says so."""

import logging
import unittest.mock
from functools import partial
from typing import Any

import torch
from torch import nn

from log_lines import logged
from tensorshard import Plan, parallelize
from tensorshard.passes.compile_log import CompileLog


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x


def _all_messages() -> list[tuple[list[str], list[str]]]:
    return [_messages(True, False), _messages(True, True), _messages(False, False)]


def _messages(compile_: bool, own_loop: bool) -> tuple[list[str], list[str]]:
    """What the first step logs, and the second."""
    torch.compiler.reset()
    eager = partial(torch.compile, backend="eager")  # what is compiled does not matter, nor how
    found: list[list[str]] = []
    with unittest.mock.patch.object(torch, "compile", eager):
        engine: Any = parallelize(
            _Net,
            Plan(zero=0, compile=compile_),
            optimizer=partial(torch.optim.SGD, lr=0.1),
            loss_fn=nn.functional.mse_loss,
        )
        x = torch.ones(4, 8)
        for _ in range(2):
            with logged(logging.INFO) as messages:
                if own_loop:
                    engine.backward(nn.functional.mse_loss(engine.model(x), x))
                    engine.optimizer.step()
                    engine.optimizer.zero_grad()
                else:
                    engine.step(x, x)
            found.append([message for message in messages if message.startswith("torch.compile")])
    return found[0], found[1]


def test_compilation_is_announced_and_timed_once(ranks):
    *compiled, not_compiled = ranks(1, _all_messages)[0]
    for first, second in compiled:
        assert len(first) == 2 and not second
        assert first[0].startswith("torch.compile is compiling the model's blocks")
        assert first[1].startswith("torch.compile took ") and first[1].endswith(" s")
    assert not_compiled == ([], [])


def test_seconds_are_those_of_all_compilations():
    now = 0.0
    log = CompileLog(clock=lambda: now)
    with logged(logging.INFO) as messages, log.watched():
        for _ in range(2):
            with log.watched():
                log._begun()
                now += 1.5
                log._ended()
                now += 100.0
    assert messages[1:] == ["torch.compile took 3.0 s"]
