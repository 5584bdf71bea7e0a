"""Compiled blocks under tensor parallelism compute what one process does, and a step that compiles says so."""

import logging
import unittest.mock
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import parity
from log_lines import logged
from tensorshard import Plan, parallelize
from tensorshard.model.forwards import Role, wrap_forward
from tensorshard.passes.compile import CompileLog, compile_blocks


def _train(kind: str, fields: dict[str, Any], backend: str, steps: int) -> tuple[dict[str, Any], int]:
    """What training came to, and how many operations of the model's were compiled into graphs."""
    from torch._dynamo import lookup_backend

    compiled = 0

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal compiled
        compiled += sum(node.op.startswith("call") for node in graph.graph.nodes)
        return lookup_backend(backend)(graph, inputs)

    original = torch.compile
    with unittest.mock.patch.object(torch, "compile", lambda forward: original(forward, backend=count)):
        return parity.train(kind, dict(compile=True, **fields), steps), compiled


def _check(ranks, kind, world, fields, backend, steps):
    found, compiled = ranks(world, _train, kind, fields, backend, steps)[0]
    parity.assert_same(found, parity.reference(kind, steps=steps), 1e-5)
    assert compiled


@pytest.mark.slow
def test_what_lies_between_split_layers_is_compiled(ranks):
    # Without code generation, nor autograd's tracing, which take their time.
    _check(ranks, "gpt", 2, dict(tp=2, sequence_parallel=True), "eager", 2)


@pytest.mark.slow
def test_statistics_of_all_data_ranks_are_taken_between_compiled_graphs(ranks):
    _check(ranks, "resnet", 2, dict(zero=3), "eager", 2)


def test_layers_that_run_as_they_are_are_not_compiled_again_and_again(caplog):
    """Torch warns after 8 compilations of one function's code, and users can do nothing about ours."""

    def split(forward: Any, x: torch.Tensor) -> torch.Tensor:
        return forward(x)

    torch.compiler.reset()
    blocks = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(6)]
    for block in blocks:
        for layer in block:
            wrap_forward(layer, Role.SUMMED_OUTPUT, split)
    original = torch.compile
    with unittest.mock.patch.object(torch, "compile", lambda forward: original(forward, backend="eager")):
        compile_blocks(blocks, "none")
        x = expected = torch.ones(1, 2)
        for block in blocks:
            x = block(x)
            expected = nn.functional.linear(expected, block[0].weight, block[0].bias)
            expected = nn.functional.linear(expected, block[1].weight, block[1].bias)
    torch.testing.assert_close(x, expected)
    assert not [record for record in caplog.records if "recompile_limit" in record.getMessage()]


def _failing_compiler() -> str:
    def fail(graph: Any, inputs: Any) -> Any:
        raise TypeError("no truth value")

    original = torch.compile
    with unittest.mock.patch.object(torch, "compile", lambda forward: original(forward, backend=fail)):
        engine = parity.make_engine("gpt", dict(compile=True))
    with pytest.raises(RuntimeError) as error:
        engine.step(*parity.batch("gpt", 0))
    return str(error.value)


def test_a_compiler_that_fails_is_explained(ranks):
    (said,) = ranks(1, _failing_compiler)
    assert said.startswith(
        "torch.compile failed on a block of the model (BackendCompilerFailed: backend='fail' raised: TypeError"
    )
    assert "compile=False" in said and "TORCHDYNAMO_SUPPRESS_ERRORS=1" in said


def test_what_is_not_compiled_is_said():
    def block(role: Role) -> nn.Module:
        module = nn.Sequential(nn.Linear(2, 2))
        wrap_forward(module, role, lambda forward, x: forward(x))
        return module

    assert compile_blocks([block(Role.SUMMED_OUTPUT)], "none") == []
    assert compile_blocks([block(Role.LOCAL_SHAPES)], "none") == [
        "1 Sequential are not compiled: their code reshapes to sizes that tp changes"
    ]
    for recompute in ("selective", "full"):
        (sentence,) = compile_blocks([block(Role.SUMMED_OUTPUT)], recompute)
        assert f"under recompute={recompute!r} are not compiled" in sentence


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "world", "fields"),
    [
        ("llama", 4, dict(tp=2, zero=3, sequence_parallel=True)),
        ("gpt_neox", 2, dict(tp=2)),
        ("bloom", 2, dict(tp=2)),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_split_blocks_of_other_models_are_compiled(ranks, kind, world, fields):
    _check(ranks, kind, world, fields, "aot_eager", 2)


# -- the log --


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
