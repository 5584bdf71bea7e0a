"""Steps of an Engine on fake tensors of a device type of its own, "pretended", which torch keeps apart from the CPU.

An operation of tensors that are on two devices fails, and so does a gradient that is not where its parameter is. Run as
a script, since a process has one such device type for good. Prints a line for each plan.
"""

import sys
import types
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import tensorshard as ts
from tensorshard.engine import manual_forwards, step
from tensorshard.parallelize import build
from tensorshard.predict.estimate import fake_world
from tensorshard.torch_private.fake_tensors import FakeTensorMode

NAME = "pretended"
PLANS: list[tuple[int, dict[str, Any]]] = [
    (1, dict(clip_grad_norm=1.0)),
    (1, dict(precision="bf16", micro_batches=2, clip_grad_norm=1.0)),
    (2, dict(zero=0, micro_batches=2)),
    (2, dict(zero=1)),
    (2, dict(zero=2, micro_batches=2, precision="bf16", clip_grad_norm=1.0)),
    (2, dict(zero=3, micro_batches=2, clip_grad_norm=1.0)),
    (2, dict(zero=3, precision="bf16")),
]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 640), nn.GELU(), nn.Linear(640, 32)) for _ in range(2))
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return (self.scale * self.frozen(hidden)) @ self.embedding.weight.T


def _loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


class _Stream(torch.cpu.Stream):
    stream_id = device_index = device_type = 0  # which FSDP2 asks for, from torch 2.15 on


class _Module(types.ModuleType):
    """What torch asks of a device: its answers are those of the CPU."""

    def current_stream(self, device: Any = None) -> _Stream:
        return _Stream()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def is_initialized(self) -> bool:
        return True

    is_available = is_initialized

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0


def _tensor(make: Any, values: Any, *args: Any, device: Any = None, **options: Any) -> torch.Tensor:
    """``torch.tensor``, which makes real tensors first, and there are none on the device."""
    made: torch.Tensor = make(values, *args, **options)
    if device is None or torch.device(device).type != NAME:
        return made
    return torch.zeros(made.shape, dtype=made.dtype, device=device)


def _pretend(stack: ExitStack, world_size: int) -> None:
    replaced: list[tuple[Any, str, Any]] = [
        (torch, "tensor", partial(_tensor, torch.tensor)),
        (build, "as_device", lambda device: device),
        (build, "join_world", lambda *_, **__: None),
        (build, "kept_random_state", lambda _: nullcontext()),
        (build, "check_supported", lambda *_: None),
        (step, "autocast", lambda *_: nullcontext()),
        (manual_forwards, "autocast", lambda *_: nullcontext()),
    ]
    for module, name, value in replaced:
        stack.enter_context(mock.patch.object(module, name, value))
    streams = build.RandomStreams
    on_cpu = mock.patch.object(build, "RandomStreams", lambda seed, _: streams(seed, torch.device("cpu")))
    stack.enter_context(on_cpu)
    stack.enter_context(fake_world(0, world_size, "fake"))
    stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))


def _steps(world_size: int, fields: dict[str, Any], activations: str | None, overlap: bool) -> None:
    device = torch.device(NAME, 0)
    offload = ts.Offload(optimizer="cpu", gradients="cpu", activations=activations, overlap=overlap)
    with ExitStack() as stack:
        _pretend(stack, world_size)
        optimizer = partial(torch.optim.AdamW, lr=1e-3)
        plan = ts.Plan(offload=offload, **fields)
        engine = build.build_engine(Model, plan, optimizer=optimizer, loss_fn=_loss, device=device)
        tokens = torch.zeros(4, 8, dtype=torch.long, device=device)
        for _ in range(2):
            engine.step(tokens, tokens)
        for _ in range(fields.get("micro_batches", 1)):
            engine.backward(_loss(engine.model(tokens), tokens))
        for name, parameter in engine.model.named_parameters():
            if parameter.grad is not None:  # numbers stay
                found = {parameter.device.type, parameter.grad.device.type}
                assert found == {"cpu" if parameter.dim() else NAME}, f"{name} is on {found}"
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        states = {v.device.type for state in engine.optimizer.state.values() for v in state.values() if v.dim()}
        assert states == {"cpu"}, states
        engine.evaluate(tokens, tokens)
        full = engine.full_state_dict()
        assert {value.device.type for value in full.values()} == {"cpu"}


def main() -> None:
    _setup_privateuseone_for_python_backend(NAME, _Module(NAME))
    failed = False
    for number, (world_size, fields) in enumerate(PLANS):
        try:
            _steps(world_size, fields, "cpu" if number % 2 else None, overlap=number % 3 == 0)
            print("works:", world_size, fields)
        except Exception as error:
            failed = True
            print("fails:", world_size, fields, repr(error)[:400])
    sys.exit(failed)


if __name__ == "__main__":
    main()
