"""Steps of an Engine on fake tensors of a device type of its own, "pretended", which torch keeps apart from the CPU.

An operation of tensors that are on two devices fails, and so does a gradient that is not where its parameter is, and a
collective of a tensor on the CPU, which NCCL does not take. Run as a script, since a process has one such device type
for good. Prints a line for each plan.
"""

import sys
import types
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import tensorshard as ts
from tensorshard.comm import collectives, groups
from tensorshard.comm.collectives import broadcast_, on_group_device
from tensorshard.compat import group_sharded
from tensorshard.engine import manual_forwards, pipeline_step, step
from tensorshard.parallelize import build, stages
from tensorshard.pipeline.run import cut_cache
from tensorshard.predict.estimate import fake_world
from tensorshard.torch_private import process_groups
from tensorshard.torch_private.fake_tensors import FakeTensorMode
from tensorshard.torch_private.process_groups import group_device

NAME = "pretended"
OFFLOADED: list[tuple[int, dict[str, Any]]] = [
    (1, dict(clip_grad_norm=1.0)),
    (1, dict(precision="bf16", micro_batches=2, clip_grad_norm=1.0)),
    (2, dict(zero=0, micro_batches=2)),
    (2, dict(zero=1)),
    (2, dict(zero=2, micro_batches=2, precision="bf16", clip_grad_norm=1.0)),
    (2, dict(zero=3, micro_batches=2, clip_grad_norm=1.0)),
    (2, dict(zero=3, precision="bf16")),
    (2, dict(pp=2, micro_batches=2)),
]
PLANS: list[tuple[int, dict[str, Any]]] = [
    (2, dict(zero=0, micro_batches=2)),
    (2, dict(zero=1, clip_grad_norm=1.0)),
    (2, dict(zero=1, precision="fp16")),
    (2, dict(zero=3, micro_batches=2, clip_grad_norm=1.0)),
    (2, dict(zero=3, logits="tiled")),
    (4, dict(zero=1, dp_replicate=2, dp_shard=2)),
    (2, dict(pp=2, micro_batches=4)),
    (2, dict(pp=2, micro_batches=4, pp_schedule="zbv")),
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

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)


def _tensor(make: Any, values: Any, *args: Any, device: Any = None, **options: Any) -> torch.Tensor:
    """``torch.tensor``, which makes real tensors first, and there are none on the device."""
    made: torch.Tensor = make(values, *args, **options)
    if device is None or torch.device(device).type != NAME:
        return made
    return torch.zeros(made.shape, dtype=made.dtype, device=device)


def _one_by_one(ops: list[dist.P2POp]) -> list[Any]:
    """``batch_isend_irecv``, which asks the group for a backend of the device."""
    peers = [{"group_dst" if op.op is dist.isend else "group_src": op.group_peer} for op in ops]
    return [op.op(op.tensor, group=op.group, **peer) for op, peer in zip(ops, peers, strict=True)]


class _NCCL(TorchDispatchMode):
    """Refuses collectives, sends and receives of tensors that are not on the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            for tensor in tree_leaves(args):
                if isinstance(tensor, torch.Tensor) and tensor.device.type != NAME:
                    raise RuntimeError(f"NCCL was given a tensor {list(tensor.shape)} on {tensor.device} by {func}")
        return func(*args, **(kwargs or {}))


def _pretend(stack: ExitStack, world_size: int) -> None:
    replaced: list[tuple[Any, str, Any]] = [
        (torch, "tensor", partial(_tensor, torch.tensor)),
        (dist, "batch_isend_irecv", _one_by_one),
        (build, "as_device", lambda device: device),
        (build, "join_world", lambda *_, **__: None),
        (build, "kept_random_state", lambda _: nullcontext()),
        (build, "check_supported", lambda *_: None),
        (cut_cache, "_autocast", lambda _: None),
        *((module, "backend_name", lambda *_: NAME) for module in (collectives, process_groups)),  # torch has none
        *((module, "autocast", lambda *_: nullcontext()) for module in (step, pipeline_step, stages, manual_forwards)),
    ]
    for module, name, value in replaced:
        stack.enter_context(mock.patch.object(module, name, value))
    random = build.EngineRandom
    on_cpu = mock.patch.object(
        build, "EngineRandom", lambda seed, place, _, **more: random(seed, place, torch.device("cpu"), **more)
    )
    stack.enter_context(on_cpu)
    stack.enter_context(fake_world(world_size - 1, world_size, "fake"))
    stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
    stack.enter_context(_NCCL())


def _offload(number: int) -> ts.Offload:
    return ts.Offload(
        optimizer="cpu", gradients="cpu", activations="cpu" if number % 2 else None, overlap=number % 3 == 0
    )


def _steps(world_size: int, fields: dict[str, Any], offload: ts.Offload | None) -> None:
    device = torch.device(NAME, 0)
    home = NAME if offload is None else "cpu"  # of master weights
    with ExitStack() as stack:
        _pretend(stack, world_size)
        optimizer = partial(torch.optim.AdamW, lr=1e-3)
        plan = ts.Plan(offload=offload, **fields)
        sample = torch.zeros(2, 8, dtype=torch.long)
        engine = build.build_engine(
            Model, plan, optimizer=optimizer, loss_fn=_loss, device=device, sample_inputs=sample
        )
        tokens = torch.zeros(4, 8, dtype=torch.long, device=device)
        for _ in range(2):
            engine.step(tokens, tokens)
        if plan.pp == 1:
            for _ in range(plan.micro_batches):
                engine.backward(_loss(engine.model(tokens), tokens))
            for name, parameter in engine.model.named_parameters():
                if parameter.grad is not None:  # numbers stay
                    found = {parameter.device.type, parameter.grad.device.type}
                    assert found == {home if parameter.dim() else NAME}, f"{name} is on {found}"
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        states = {v.device.type for state in engine.optimizer.state.values() for v in state.values() if v.dim()}
        assert states <= {home}, states
        engine.evaluate(tokens, tokens)
        full = engine.full_state_dict()
        assert {value.device.type for value in full.values()} <= {"cpu"}


def _unscales() -> None:
    """GradScaler with offload: gradients in the host's memory, and its flag on the device."""
    with ExitStack() as stack:
        _pretend(stack, 1)
        device = torch.device(NAME, 0)
        gradients = [torch.ones(3), torch.ones(2, device=device)]
        unscaled = []

        def unscale(given: list[torch.Tensor], found: torch.Tensor, inverse: torch.Tensor) -> None:
            unscaled.extend(given)
            devices = {tensor.device.type for tensor in (*given, found, inverse)}
            assert len(devices) == 1, f"unscaled on {devices}"

        stack.enter_context(mock.patch.object(group_sharded, "unscale_", unscale))
        parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        flag, inverse = torch.zeros(1, device=device), torch.ones((), device=device)
        found = group_sharded._unscaler([])(None, optimizer, inverse, flag, False)
        assert len(unscaled) == 2 and found == {device: flag}


def _layers_on_the_cpu() -> None:
    """In a world of NCCL alone, parallel layers that are built on the CPU send through the device."""
    with ExitStack() as stack:
        stack.enter_context(fake_world(0, 2, "fake"))
        groups.init_process_group(device_type="cpu")
        on_device = property(lambda _: [torch.device(NAME)])
        stack.enter_context(mock.patch.object(dist.ProcessGroup, "_device_types", on_device))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_NCCL())
        whole = torch.ones(3, 4)
        with on_group_device(whole, groups.get_group()) as sent:
            assert sent.device.type == NAME
        broadcast_(whole.t(), groups.get_group())
        assert group_device(groups.get_group(), torch.device("cpu")).type == NAME
        groups.destroy_process_group()


def _check(what: Any, function: Any, *args: Any) -> bool:
    try:
        function(*args)
    except Exception as error:
        print("fails:", what, repr(error)[:400])
        return False
    print("works:", what)
    return True


def main() -> None:
    _setup_privateuseone_for_python_backend(NAME, _Module(NAME))
    works = [
        _check((size, fields, "offloaded"), _steps, size, fields, _offload(number))
        for number, (size, fields) in enumerate(OFFLOADED)
    ]
    works += [_check((size, fields), _steps, size, fields, None) for size, fields in PLANS]
    works += [_check(function.__name__, function) for function in (_unscales, _layers_on_the_cpu)]
    sys.exit(not all(works))


if __name__ == "__main__":
    main()
