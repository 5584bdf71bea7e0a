"""Checkpoints that other programs read by torch.distributed.checkpoint alone, without anything of tensorshard."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import tensorshard as ts
from parity import assert_same_state
from tensorshard.weights.files.checkpoint_files import read_metadata

VOCABULARY = 11
PLANS: dict[str, dict[str, Any]] = {
    "zero3": dict(zero=3),
    "zero0": dict(zero=0),
    "zero1": dict(zero=1, precision="bf16"),
    "zero2": dict(zero=2),
    "offload": dict(zero=2, offload="cpu"),
    "tp": dict(tp=2),
    "pp": dict(pp=2, micro_batches=2),
}


class _Net(nn.Module):
    """Tied weights, a buffer, blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 14), nn.GELU(), nn.Linear(14, 6)) for _ in range(2)])
        self.register_buffer("scale", torch.full((6,), 1.5))
        self.head = nn.Linear(6, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x * self.scale)


def _net() -> _Net:
    torch.manual_seed(0)
    return _Net()


def _loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def _adamw(named_parameters: Any) -> torch.optim.AdamW:
    named = list(named_parameters)
    groups = [
        {"params": [p for name, p in named if "bias" not in name], "weight_decay": 0.1},
        {"params": [p for name, p in named if "bias" in name], "weight_decay": 0.0, "lr": 0.02},
    ]
    return torch.optim.AdamW(groups, lr=0.01, eps=1e-4)


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (4, 5), generator=torch.Generator().manual_seed(step))
    return ids, (ids * 3 + 1) % VOCABULARY


def _engine(fields: dict[str, Any]) -> ts.Engine:
    sample = _batch(0)[0][:2] if fields.get("pp", 1) > 1 else None
    return ts.parallelize(_net(), ts.Plan(**fields), optimizer=_adamw, loss_fn=_loss, sample_inputs=sample)


def _step(engine: ts.Engine, step: int) -> float:
    return engine.step(*(part.chunk(engine.mesh.dp_size)[engine.mesh.dp_rank] for part in _batch(step))).item()


def _writing(folder: Path, fields: dict[str, Any]) -> tuple[Any, float, Any, list[str]]:
    """What was written, the loss of the step after it, the weights after that, and what is refused."""
    engine = _engine(fields)
    for step in range(2):
        _step(engine, step)
    engine.save(folder / "step-2", format="dcp", extra={"tokens": 40})
    written = engine.full_state_dict()
    refusals = []
    for path, options in (
        ("step-2", dict(format="dcp")), ("other", dict(format="torch")), ("other", dict(format="dcp", background=True)),
        ("other", dict(format="dcp", trained_only=True)), ("other", dict(format="dcp", extra=[1])),
    ):  # fmt: skip
        with pytest.raises((ValueError, TypeError, FileExistsError)) as refusal:
            engine.save(folder / path, **options)
        refusals.append(str(refusal.value))
    with pytest.raises(ValueError, match="the URL 's3://bucket/x': such folders are written to a file system"):
        engine.save("s3://bucket/x", format="dcp")
    return written, _step(engine, 2), engine.full_state_dict(), refusals


def _plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    loss = _loss(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _read_plainly(folder: Path, model: nn.Module, *, flat: bool) -> torch.optim.AdamW:
    """What torch's own calls do; with `flat`, as torchtitan has the optimizer's state."""
    optimizer = _adamw(model.named_parameters())
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)  # adds options, as torchtitan's does
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, states = get_state_dict(model, optimizer, options=options)
    state = {**weights, "optimizer": states, "step": 0, "extra": {"tokens": 0}}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict={name: state[name] for name in weights},
        optim_state_dict=state["optimizer"],
        options=options,
    )
    assert state["step"] == 2 and state["extra"] == {"tokens": 40}
    return optimizer


@pytest.mark.fast_cases("zero3")
@pytest.mark.parametrize("plan", PLANS)
def test_torch_alone_reads_them_and_goes_on(ranks, tmp_path, plan):
    written, loss, after, refusals = ranks(2, _writing, tmp_path, PLANS[plan])[0]
    tolerance = 2e-2 if "precision" in PLANS[plan] else 1e-5
    for flat in (False, True):
        model = _net()
        optimizer = _read_plainly(tmp_path / "step-2", model, flat=flat)
        assert all(torch.equal(value, written[name]) for name, value in model.state_dict().items())
        assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.02]
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
        assert _plain_step(model, optimizer, _batch(2)) == pytest.approx(loss, rel=tolerance)
        assert_same_state(dict(model.state_dict()), after, tolerance)
    for refusal, words in zip(
        refusals,
        ("step-2 is there already and is not overwritten", "format='torch'; it must be 'tensorshard'",
         "format='dcp' and background=True", "format='dcp' and trained_only=True", "extra is a list"),
        strict=True,
    ):  # fmt: skip
        assert words in refusal
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


def _under_fsdp2(folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
    model = _net()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = _read_plainly(folder, model, flat=True)
    share = tuple(part.chunk(2)[dist.get_rank()] for part in _batch(2))
    loss = torch.tensor(_plain_step(model, optimizer, share))
    dist.all_reduce(loss)
    return loss.item() / 2, {name: value.detach().full_tensor() for name, value in model.named_parameters()}


@pytest.mark.slow
def test_fsdp2_reads_them(ranks, tmp_path):
    _, loss, after, _ = ranks(2, _writing, tmp_path, PLANS["tp"])[0]
    found, weights = ranks(2, _under_fsdp2, tmp_path / "step-2")[0]
    assert found == pytest.approx(loss, rel=1e-5)
    assert_same_state(weights, {name: after[name] for name in weights}, 1e-5)


def _reading_again(folder: Path, fields: dict[str, Any]) -> tuple[dict[str, Any], int, float, Any]:
    engine = _engine(fields)
    extra = engine.load(folder / "step-2")
    return extra, engine.step_count, _step(engine, 2), engine.full_state_dict()


@pytest.mark.slow
def test_the_engine_reads_them_again_under_another_plan(ranks, tmp_path):
    _, loss, after, _ = ranks(2, _writing, tmp_path, PLANS["pp"])[0]
    extra, steps, found, weights = ranks(2, _reading_again, tmp_path, PLANS["zero3"])[0]
    assert extra["extra"] == {"tokens": 40} and steps == 2
    assert found == pytest.approx(loss, rel=1e-5)
    assert_same_state(weights, after, 1e-5)


def _replacing(folder: Path) -> str:
    engine = _engine(dict(zero=1))
    (folder / "mine").mkdir(exist_ok=True)
    (folder / "mine" / "notes.txt").touch()
    engine.save(folder / "last", format="dcp")
    _step(engine, 0)
    engine.save(folder / "last", format="dcp", overwrite=True)
    with pytest.raises(FileExistsError) as refusal:
        engine.save(folder / "mine", format="dcp", overwrite=True)
    return str(refusal.value)


def test_older_folders_are_replaced_and_others_are_not(ranks, tmp_path):
    refusal = ranks(1, _replacing, tmp_path)[0]
    assert "mine is there already and is not a folder of torch.distributed.checkpoint" in refusal
    assert "optimizer.state.embed.weight.exp_avg" in read_metadata(tmp_path / "last").state_dict_metadata
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "mine"]
