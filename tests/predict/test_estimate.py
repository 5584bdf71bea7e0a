"""Estimates on fake tensors: what a real run's ledger says, what it is made of, and what is refused."""

import sys
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import parity
import pretrained_models
import tensorshard as ts
from tensorshard.models import GPT, next_token_loss
from tensorshard.plan.storage import DeviceStorage
from tensorshard.predict.rank_estimate import CATEGORIES, OPTIMIZER, RankEstimate, summarize
from tensorshard.predict.watched_steps import watch_steps
from tensorshard.torch_private.process_groups import fake_world

# A real collective holds what it moves until it is waited for, that of a fake group is over at once: of a tiny model
# that is a few percent.
NEAR = 0.05
ADAMW = partial(torch.optim.AdamW, lr=1e-3)
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero 0": (2, dict(zero=0)),
    "zero 1, bf16": (2, dict(zero=1, precision="bf16")),
    "zero 2, two micro-batches": (2, dict(zero=2, micro_batches=2)),
    "zero 3": (2, dict(zero=3)),
    "zero 3, recompute": (2, dict(zero=3, recompute="full")),
    "tp": (2, dict(tp=2)),
    "pp": (2, dict(pp=2, micro_batches=2, clip_grad_norm=1.0)),
}


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(4, 12, dtype=torch.long), torch.zeros(4, 12, dtype=torch.long)


def _measured(fields: dict[str, Any]) -> RankEstimate:
    """The ledger of this rank's real steps."""

    def build() -> ts.Engine:
        return ts.parallelize(
            partial(parity.build, "gpt"), ts.Plan(**fields), optimizer=ADAMW, loss_fn=parity.loss_function("gpt")
        )

    ledger, known, engine = watch_steps(build, _batch)
    return summarize(
        ledger, known, rank=dist.get_rank(), stage=engine.mesh.index("pp"), device_bytes=0, storage=DeviceStorage()
    )


def _estimated(world: int, fields: dict[str, Any], model: str = "gpt") -> ts.Estimate:
    if dist.is_initialized():  # a process of the tests' pool has a world of its own
        dist.destroy_process_group()
    inputs, targets = _batch()
    return ts.estimate(
        partial(parity.build, model),
        ts.Plan(**fields),
        world_size=world,
        inputs=inputs,
        targets=targets,
        optimizer=ADAMW,
        loss_fn=parity.loss_function(model),
        hardware="titan-xp",
        device="cpu",
    )


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_it_says_what_the_ledger_of_a_real_run_says(ranks, plan):
    world, fields = PLANS[plan]
    measured = ranks(world, _measured, fields)
    estimated = ranks(1, _estimated, world, fields)[0]
    for rank in estimated.ranks:
        real = measured[rank.rank]
        assert abs(rank.peak_allocated - real.peak_allocated) <= NEAR * real.peak_allocated
        assert rank.phase == real.phase and rank.stage == real.stage
        for category in CATEGORIES:
            assert abs(rank.by_category[category] - real.by_category[category]) <= NEAR * real.peak_allocated, category
        assert sum(rank.by_category.values()) == rank.peak_allocated


class Experts(torch.nn.Module):
    """Products of groups of tokens with the weights of their experts, in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, 8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ends = torch.tensor([2, 6], dtype=torch.int32)
        return torch.nn.functional.grouped_mm(x, self.weight, offs=ends)


def _of_experts() -> tuple[int, int, int]:
    loss = torch.nn.functional.mse_loss
    batch = torch.zeros(6, 8), torch.zeros(6, 4)
    ledger, known, _ = watch_steps(
        lambda: ts.parallelize(Experts, ts.Plan(), optimizer=ADAMW, loss_fn=loss), lambda: batch
    )
    real = summarize(ledger, known, rank=0, stage=0, device_bytes=0, storage=DeviceStorage())
    dist.destroy_process_group()
    found = ts.estimate(
        Experts, ts.Plan(), world_size=1, inputs=batch[0], targets=batch[1], optimizer=ADAMW, loss_fn=loss, device="cpu"
    )
    return real.peak_allocated, found.largest.peak_allocated, found.largest.flops


def test_products_of_experts_in_fp32(ranks):
    real, estimated, flops = ranks(1, _of_experts)[0]
    assert estimated == pytest.approx(real, rel=NEAR)
    assert flops == 2 * 2 * 6 * 8 * 4  # forward, and the weights' gradient; the inputs need none


def _described() -> tuple[str, bool, bool]:
    found = _estimated(2, dict(pp=2, micro_batches=2))
    return found.describe(), found.fits(), found.fits("1MiB")


def test_it_is_described(ranks):
    text, fits, fits_little = ranks(1, _described)[0]
    assert fits and not fits_little
    assert text.startswith("fits: ") and "stage" in text and "activations" in text and "not validated" in text
    table = text[text.index("stage  rank") :]
    assert all(len(line) <= 80 for line in table.splitlines())


class _Squares(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale).square()  # the line that is looked for


def _line_of_the_largest() -> str:
    dist.destroy_process_group()
    batch = torch.zeros(1000, 4)
    found = ts.estimate(
        _Squares(),
        ts.Plan(),
        world_size=2,
        inputs=batch,
        targets=batch,
        optimizer=ADAMW,
        loss_fn=torch.nn.functional.mse_loss,
    )
    return next(tensor.line for tensor in found.largest.largest if tensor.category == "activations")


def test_the_line_of_code_that_made_a_tensor_is_told(ranks):
    name, number = ranks(1, _line_of_the_largest)[0].split(":")
    assert name == "test_estimate.py"
    assert "the line that is looked for" in Path(__file__).read_text(encoding="utf-8").splitlines()[int(number) - 1]


def _leaves_the_module_alone() -> bool:
    dist.destroy_process_group()
    model = torch.nn.Linear(8, 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = sys.excepthook
    ts.estimate(
        model,
        ts.Plan(),
        world_size=4,
        inputs=torch.zeros(2, 8),
        targets=torch.zeros(2, 4),
        optimizer=ADAMW,
        loss_fn=torch.nn.functional.mse_loss,
    )
    assert sys.excepthook is report  # torch's of a world writes the rank before each line of an error
    return all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_module_is_left_as_it_is(ranks):
    assert ranks(1, _leaves_the_module_alone)[0]


def _refusal(plan: dict[str, Any], **changed: Any) -> str:
    if not changed.pop("joined", False):
        dist.destroy_process_group()
    arguments = {
        "world_size": 4, "inputs": torch.zeros(2, 8), "targets": torch.zeros(2, 4), "optimizer": ADAMW,
        "loss_fn": torch.nn.functional.mse_loss, **changed,
    }  # fmt: skip
    try:
        ts.estimate(torch.nn.Linear(8, 4), ts.Plan(tp=2, **plan), **arguments)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("plan", "changed", "said"),
    [
        ({}, dict(world_size=3), "3"),
        ({}, dict(hardware="a100"), "did you mean 'a100-80' or 'a100-40'?"),
        ({}, dict(device="tpu"), "device is 'tpu'"),
        ({}, dict(joined=True), "in a process group already"),
    ],
)
def test_refusals(ranks, plan, changed, said):
    assert said in ranks(1, partial(_refusal, plan, **changed))[0]


_OFFLOADED = dict(
    zero=3,
    offload=ts.Offload(
        optimizer="disk", gradients="disk", parameters="disk", activations="disk", buffer_memory="512KiB"
    ),
)
_LARGER = partial(GPT, vocab_size=64, context_length=32, num_layers=3, num_heads=4, width=128)


def _larger_batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(4, 32, dtype=torch.long), torch.zeros(4, 32, dtype=torch.long)


def _measured_offload() -> RankEstimate:
    def build() -> ts.Engine:
        return ts.parallelize(_LARGER, ts.Plan(**_OFFLOADED), optimizer=ADAMW, loss_fn=next_token_loss)

    ledger, known, engine = watch_steps(build, _larger_batch)
    return summarize(ledger, known, rank=dist.get_rank(), stage=0, device_bytes=0, storage=engine.storage)


def _estimated_offload() -> RankEstimate:
    dist.destroy_process_group()
    inputs, targets = _larger_batch()
    plan = ts.Plan(**_OFFLOADED)
    return ts.estimate(
        _LARGER,
        plan,
        world_size=2,
        inputs=inputs,
        targets=targets,
        optimizer=ADAMW,
        loss_fn=next_token_loss,
        device="cpu",
    ).largest


@pytest.mark.slow
def test_what_is_offloaded(ranks):
    """Parameters and activations, too. What is under way to the disk is in buffers, which a real ledger sees."""
    real, estimated = ranks(2, _measured_offload)[0], ranks(1, _estimated_offload)[0]
    assert abs(real.peak_allocated - estimated.peak_allocated) <= 1 << 19
    assert estimated.disk_traffic == real.disk_traffic > 2 * real.disk_bytes
    assert 0 < estimated.disk_bytes <= real.disk_bytes  # space comes back when what was written to it has arrived


def _estimated_for_gpus(plans: list[ts.Plan]) -> list[RankEstimate]:
    dist.destroy_process_group()
    inputs, targets = _larger_batch()
    given = dict(inputs=inputs, targets=targets, optimizer=ADAMW, loss_fn=next_token_loss, hardware="h100")
    return [ts.estimate(_LARGER, plan, world_size=1, **given).largest for plan in plans]


def _of_files(directory: Path) -> tuple[int, int, ts.Plan]:
    dist.destroy_process_group()
    model = ts.from_pretrained(directory)
    tokens = torch.zeros(2, 8, dtype=torch.long)
    options: dict[str, Any] = dict(world_size=2, inputs=tokens, targets=tokens, loss_fn=pretrained_models.token_loss)
    options |= dict(optimizer=partial(torch.optim.AdamW, lr=1e-3), hardware="h100")
    estimates = [ts.estimate(given, ts.Plan(zero=3), **options) for given in (model, model.build)]
    best = ts.find_plans(model, fixed={"tp": 1, "pp": 1}, top=1, **options).best
    return estimates[0].largest.peak_allocated, estimates[1].largest.peak_allocated, best.plan


@pytest.mark.slow
def test_a_model_in_files_is_estimated_as_its_constructor(ranks, tmp_path):
    pretrained_models.write("llama", tmp_path)
    ((peak, constructors, best),) = ranks(1, _of_files, tmp_path)
    assert peak == constructors > 0 and best.tp == 1


@pytest.mark.slow
def test_what_is_offloaded_from_gpus(ranks):
    """Two states, a gradient and a master of fp32 are the host's, where the CPU's fp32 parameters are the masters."""
    plans = [
        ts.Plan(precision=p, offload=o, micro_batches=2)
        for p in ("fp32", "bf16")
        for o in (None, ts.Offload(optimizer="cpu", gradients="cpu", buffer_memory="512KiB"))
    ]
    plain, offloaded, plain_16, offloaded_16 = ranks(1, _estimated_for_gpus, plans)[0]
    numel = sum(p.numel() for p in _LARGER().parameters())
    for each in (offloaded, offloaded_16):
        assert 16 * numel <= each.host_bytes - (512 << 10) <= 17 * numel
        assert each.disk_bytes == plain.host_bytes == 0
    assert plain.peak_allocated - offloaded.peak_allocated >= 8 * numel
    assert plain_16.peak_allocated - offloaded_16.peak_allocated >= 12 * numel
    assert offloaded.host_traffic - offloaded_16.host_traffic > 1.9 * numel  # weights come back in 16 bits


def test_states_stay_on_the_device_where_activations_alone_leave_it(ranks):
    plans = [ts.Plan(), ts.Plan(offload=ts.Offload(activations="cpu", buffer_memory="512KiB"))]
    plain, moved = ranks(1, _estimated_for_gpus, plans)[0]
    numel = sum(p.numel() for p in _LARGER().parameters())
    assert moved.by_category[OPTIMIZER] == plain.by_category[OPTIMIZER] >= 8 * numel


def _kept_by_a_send() -> list[bool]:
    dist.destroy_process_group()
    with fake_world(0, 2):
        tensor = torch.zeros(3)
        reference = weakref.ref(tensor)
        work = dist.isend(tensor, 1)
        del tensor
        work.wait()
        kept = reference() is not None
        del work
        return [kept, reference() is not None]


def test_a_send_keeps_its_tensor_as_long_as_somebody_has_it(ranks):
    """As those of Gloo and NCCL do, of which torch's schedules keep some for most of a step."""
    assert ranks(1, _kept_by_a_send)[0] == [True, False]


def _stack(width: int) -> torch.nn.Module:
    return torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(width, width, bias=False)) for _ in range(6)])


@pytest.mark.parametrize(
    ("width", "fields", "messages"),
    [
        pytest.param(1024, dict(zero=2), 2, id="small layers, two of them"),
        pytest.param(24000, dict(zero=2), 1, id="huge layers, one"),
        pytest.param(24000, dict(zero=1, dp_replicate=2), 1, id="of a hybrid"),
        pytest.param(24001, dict(zero=1), 1, id="gathers of what cannot be cut evenly"),
    ],
)
def test_messages_under_way_are_bounded_by_their_bytes(ranks, width, fields, messages):
    """Beside weights, and shards of gradients, there are messages under way and one layer's gradient, from the first
    step on."""
    (peak,) = ranks(1, _peak_of_layers, width, fields)
    assert 6 + messages + 1 <= peak < 6 + messages + 1.3


def _peak_of_layers(width: int, fields: dict[str, Any]) -> float:
    dist.destroy_process_group()
    batch = torch.zeros(1, width)
    sgd = partial(torch.optim.SGD, lr=0.1)
    loss_fn = torch.nn.functional.mse_loss
    plan = ts.Plan(**fields)
    model = partial(_stack, width)
    estimate = ts.estimate(
        model, plan, world_size=64, inputs=batch, targets=batch, optimizer=sgd, loss_fn=loss_fn, hardware="h100"
    )
    return estimate.ranks[0].peak_allocated / (4 * width**2)
