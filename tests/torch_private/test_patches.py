"""What is put in the place of torch's functions is called: a name may stay, and be called no more."""

import ast
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import tensorshard as ts
from tensorshard.context_parallel.context_group import Activation, activated
from tensorshard.engine.guards.own_collectives import models_collectives
from tensorshard.pipeline.run.schedule_runner import actions
from tensorshard.torch_private import fake_tensors, modules, optimizers, pipelining, process_groups
from tensorshard.torch_private.patches import replaced
from tensorshard.torch_private.recomputation import function_calls

ROOT = Path(ts.__file__).parent


@contextmanager
def _world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class _Calls(nn.Module):
    """Makes the collectives that models make."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both, tensor = torch.cat([x, x]), x.clone()
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
        dist.reduce(tensor, 0)
        dist.all_gather([tensor, tensor], x)
        dist.all_gather_into_tensor(both, x)
        dist.reduce_scatter(tensor, [x, x])
        dist.reduce_scatter_tensor(tensor, both)
        dist.all_to_all_single(both, both.clone())
        dist.all_to_all([tensor, tensor], [x, x])
        dist.gather(x, [tensor, tensor], 0)
        dist.scatter(tensor, [x, x], 0)
        dist.barrier()
        return tensor


def _a_models_collectives() -> None:
    seen = []

    def note(name: str, call: Callable[[], Any], *_: Any) -> Any:
        seen.append(name)
        return call()

    with process_groups.fake_world(0, 2), models_collectives(note):
        _Calls()(torch.ones(2))
    assert len(seen) == 12, seen


def _a_derivative_in_a_loss() -> None:
    def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x = batch[0].requires_grad_()
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return (y - batch[1]).square().mean() + slope.square().mean()

    engine = ts.parallelize(
        partial(nn.Linear, 4, 2),
        ts.Plan(micro_batches=2),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        loss_fn=loss_fn,
    )
    engine.step((torch.ones(4, 4), torch.ones(4, 2)))
    dist.destroy_process_group()


def _torchshards_patches() -> None:
    with _world():
        ts.distributed.init_process_group()
        try:
            model = nn.Linear(4, 2)
            DistributedDataParallel(model)
            optimizer = torch.optim.AdamW(model.parameters())
            scaler = torch.amp.GradScaler("cpu")
            scaler.scale(model(torch.ones(2, 4)).sum()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.load_state_dict(optimizer.state_dict())
            from torch.distributed.optim import ZeroRedundancyOptimizer

            ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1)
        finally:
            ts.distributed.destroy_process_group()


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 2 * grads[0]


def _work_for_a_group() -> None:
    with activated(Activation(None)):
        x = torch.arange(3.0).requires_grad_()
        checkpoint(_Twice.apply, x, use_reentrant=False).sum().backward()


def _messages_of_a_fake_world() -> None:
    with process_groups.fake_world(0, 2):
        dist.send(torch.ones(1), 1)
        dist.recv(torch.ones(1), 1)
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(1), 1)]):
            work.wait()


def _a_stage_that_prepares() -> None:
    pauses: list[None] = []
    with _world(), pipelining.while_stages_prepare(pauses):
        stage = PipelineStage(nn.Linear(4, 4), 0, 1, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
        schedule.step(torch.ones(4, 4), target=torch.ones(4, 4))


def _a_schedule() -> None:
    actions("interleaved_1f1b", ranks=2, stages_per_rank=2, micro_batches=4)


def _clipping() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    seen: list[Any] = []
    with optimizers.watched_clipping(seen.append):
        nn.utils.clip_grad_norm_([weight], 1.0)
    assert len(seen) == 1


def _unscaling() -> None:
    weight, scaler = nn.Parameter(torch.ones(2)), torch.amp.GradScaler("cpu")

    def unscale(*_: Any) -> dict[torch.device, torch.Tensor]:
        return {torch.device("cpu"): torch.zeros(1)}

    optimizers.set_unscaling(scaler, unscale)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(torch.optim.SGD([weight], lr=0.1))


def _a_truncated_normal() -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def drawn(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs)

        return drawn

    with modules.truncated_normal_replaced(make):
        nn.init.trunc_normal_(torch.empty(4))


def _a_grouped_product() -> None:
    with fake_tensors.grouped_products_of_any_dtype(), fake_tensors.FakeTensorMode():
        offsets = torch.ones(2, dtype=torch.int32)
        torch.nn.functional.grouped_mm(torch.ones(4, 8), torch.ones(2, 8, 16), offs=offsets)


_APPLY = "_code_that_asks.<locals>.apply" if function_calls.sees_bound else "_ask"
_DDP = "leaving_split_parameters_alone.<locals>.__init__"
# What runs, the file that replaces something (how often), and which functions of ours must have been called then.
PATCHES: dict[str, tuple[Callable[[], None], str, int, list[str]]] = {
    "a model's collectives": (
        _a_models_collectives,
        "engine/guards/own_collectives.py",
        1,
        ["models_collectives.<locals>.watched.<locals>.called"],
    ),
    "a derivative in a loss": (
        _a_derivative_in_a_loss,
        "engine/loss_with_model.py",
        1,
        ["LossWithModelRunner._looking_for_derivatives.<locals>.noting.<locals>.noted"],
    ),
    "TorchShard's": (
        _torchshards_patches,
        "distributed/torch_patches.py",
        1,
        [
            *(_DDP, "taking_own_shards.<locals>.load_state_dict", "with_split_parameters.<locals>.__init__"),
            *("agreeing_on_overflows.<locals>.unscale", "norm_of_all_shards.<locals>.total_norm"),
        ],
    ),
    "cp": (
        _work_for_a_group,
        "context_parallel/context_group.py",
        1,
        ["_cutting.<locals>.arange", _APPLY, "_repeating.<locals>.generator"],
    ),
    "messages of a fake world": (
        _messages_of_a_fake_world,
        "torch_private/process_groups.py",
        2,
        ["_kept_while_sent.<locals>.keeping.<locals>.transferred"],
    ),
    "a stage that prepares": (
        _a_stage_that_prepares,
        "torch_private/pipelining.py",
        3,
        ["while_stages_prepare.<locals>.pausing.<locals>.paused"],
    ),
    "a schedule": (
        _a_schedule,
        "torch_private/pipelining.py",
        3,
        ["without_messages.<locals>.prepare_nothing"],
    ),
    "a truncated normal": (
        _a_truncated_normal,
        "torch_private/modules.py",
        1,
        ["_a_truncated_normal.<locals>.make.<locals>.drawn"],
    ),
    "clipping": (_clipping, "torch_private/optimizers.py", 0, ["watched_clipping.<locals>.watched"]),
    "unscaling": (_unscaling, "torch_private/optimizers.py", 0, ["_unscaling.<locals>.unscale"]),
    "a grouped product": (
        _a_grouped_product,
        "torch_private/fake_tensors.py",
        0,
        ["grouped_products_of_any_dtype.<locals>.product"],
    ),
}


@pytest.mark.parametrize("name", PATCHES)
def test_what_is_put_in_place_is_called(name):
    run, _, _, functions = PATCHES[name]
    called: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            called.add(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    assert set(functions) <= called, f"torch {torch.__version__} does not call {sorted(set(functions) - called)}"


def test_all_that_is_replaced_is_in_the_table():
    places: dict[str, int] = {}
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "replaced":
                file = path.relative_to(ROOT).as_posix()
                places[file] = places.get(file, 0) + 1
    assert places == {file: count for _, file, count, _ in PATCHES.values() if count}


def test_what_somebody_else_has_put_there_stays():
    class Owner:
        value = 1

    with replaced(Owner, "value", lambda value: value + 1):
        assert Owner.value == 2
    assert Owner.value == 1
    with replaced(Owner, "value", lambda value: value + 1):
        Owner.value = 7
    assert Owner.value == 7
