"""An Engine whose plan offloads: the same weights as without, to the last bit."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import parity
import tensorshard as ts
from off_device import off_device
from tensorshard.comm.sharding import to_local

ADAMW = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)


class Uneven(nn.Module):
    """Tied, frozen and unused parameters, a module used twice, a number, and a matrix of several tiles."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 35)
        self.blocks = nn.ModuleList(nn.Linear(35, 35) for _ in range(2))
        self.wide = nn.Linear(35, 1001)
        self.narrow = nn.Linear(1001, 35, bias=False)
        self.frozen = nn.Linear(35, 35)
        self.frozen.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in (*self.blocks, self.blocks[0]):
            hidden = hidden + torch.tanh(block(hidden))
        hidden = self.frozen(hidden) + self.narrow(torch.relu(self.wide(hidden)))
        return (self.scale * hidden) @ self.embedding.weight.T


class WithoutNumbers(Uneven):
    """ZeRO 3 computes with a number in fp32, the other levels in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        del self.scale
        self.scale = 0.5


def _engine(fields: dict[str, Any]) -> ts.Engine:
    torch.manual_seed(3)
    loss = parity.loss_function("gpt")
    build = WithoutNumbers if fields.get("precision") == "bf16" and fields.get("zero") == 3 else Uneven
    return ts.parallelize(build, ts.Plan(**fields), optimizer=ADAMW, loss_fn=loss)


def _train(engine: ts.Engine, steps: range, norms: list[Any] | None = None) -> dict[str, torch.Tensor]:
    for step in steps:
        engine.step(*parity.shard(engine, *parity.batch("gpt", step)))
        if norms is not None:
            norms.append(engine.grad_norm)
    return engine.full_state_dict()


def _both(cases: list[dict[str, Any]], offload: dict[str, Any], steps: int = 3) -> list[str]:
    """The cases in which a weight or a norm differs from that without offload, updates finished in steps or behind."""
    differ = []
    for fields in cases:
        plain_norms: list[Any] = []
        plain = _train(_engine(fields), range(steps), plain_norms)
        for overlap in (False, True):
            norms: list[Any] = []
            more = {**offload, "buffer_memory": "512KiB", "overlap": overlap}
            found = _train(_engine({**fields, "offload": more}), range(steps), norms)
            same = list(plain) == list(found) and all(torch.equal(found[name], plain[name]) for name in plain)
            if not same or norms != plain_norms:
                differ.append(f"{fields}, overlap={overlap}: weights {same}, norms {plain_norms} and {norms}")
    return differ


ONE = [dict(precision="bf16", micro_batches=2, clip_grad_norm=0.5), dict(recompute="full")]
TWO = [
    dict(zero=0, precision="bf16", clip_grad_norm=0.5),
    dict(zero=1, micro_batches=2),
    dict(zero=2, precision="bf16", micro_batches=2, clip_grad_norm=0.5),
    dict(zero=3, micro_batches=2, clip_grad_norm=0.5),
    dict(zero=3, clip_grad_norm=0.5),
]


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "cases"), [(1, ONE), (2, TWO)])
def test_weights_are_the_same_to_the_last_bit(ranks, tmp_path, world_size, cases):
    offload = dict(optimizer="disk", gradients="disk", path=str(tmp_path))
    assert ranks(world_size, _both, cases, offload)[0] == []


def _both_off_device(cases: list[dict[str, Any]], offload: dict[str, Any]) -> list[str]:
    with off_device():
        return _both(cases, offload)


OFF_DEVICE = [*TWO[:2], dict(zero=2, precision="bf16", micro_batches=2, clip_grad_norm=0.5, reduce_dtype="bf16")]


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "cases"), [(1, [*ONE, dict(micro_batches=2)]), (2, OFF_DEVICE)])
def test_the_same_from_a_device_whose_memory_is_not_the_hosts(ranks, tmp_path, world_size, cases):
    offload = dict(optimizer="cpu", gradients="disk", path=str(tmp_path))
    assert ranks(world_size, _both_off_device, cases, offload)[0] == []


@pytest.mark.slow_cases("None")
@pytest.mark.parametrize("parameters", [None, pytest.param("disk", marks=pytest.mark.slow)])
def test_the_same_from_such_a_device_with_sharded_parameters(ranks, tmp_path, parameters):
    offload = dict(optimizer="cpu", gradients="cpu", parameters=parameters, path=str(tmp_path))
    cases = [dict(zero=3, micro_batches=2, clip_grad_norm=0.5), dict(zero=3, precision="bf16")]
    assert ranks(2, _both_off_device, cases[: 1 if parameters else 2], offload)[0] == []


PARAMETERS = [
    dict(zero=3, micro_batches=2, clip_grad_norm=0.5),
    dict(zero=3, precision="bf16", recompute="full"),
]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_same_with_parameters_on_disk(ranks, tmp_path, world_size):
    offload = dict(optimizer="disk", gradients="disk", parameters="disk", path=str(tmp_path))
    assert ranks(world_size, _both, PARAMETERS, offload)[0] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [dict(tp=2), dict(pp=2, micro_batches=2), dict(dp_replicate=2, micro_batches=2)],
    ids=["tp", "pp", "hybrid"],
)
def test_the_same_with_parameters_on_disk_and_other_axes(ranks, tmp_path, fields):
    fields = dict(zero=3, clip_grad_norm=1.1, **fields)
    offload = dict(
        optimizer="disk",
        gradients=None,
        parameters="disk",
        path=str(tmp_path),
        overlap="pp" in fields or "tp" in fields,
    )
    found = [ranks(4, parity.train, "gpt_tied", {**fields, **more})[0] for more in ({}, dict(offload=offload))]
    assert found[0]["losses"] == found[1]["losses"]
    for name, value in found[0]["state"].items():
        assert torch.equal(found[1]["state"][name], value), name


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["cpu", "disk"])
@pytest.mark.parametrize(("world_size", "cases"), [(1, ONE), (2, TWO)])
def test_the_same_after_20_steps(ranks, tmp_path, world_size, cases, tier):
    offload = dict(optimizer=tier, gradients=tier, path=str(tmp_path))
    assert ranks(world_size, _both, cases, offload, 20)[0] == []


@pytest.mark.slow
@pytest.mark.parametrize("fields", [dict(zero=1), dict(zero=3, micro_batches=2)])
def test_the_same_with_hybrid_sharding(ranks, tmp_path, fields):
    fields = dict(dp_replicate=2, clip_grad_norm=0.5, **fields)
    offload = dict(optimizer="disk", gradients="disk", path=str(tmp_path))
    assert ranks(4, _both, [fields], offload, 20)[0] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [dict(tp=2), dict(pp=2, micro_batches=2), dict(tp=2, pp=2, micro_batches=2)],
    ids=["tp", "pp", "tp and pp"],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_same_with_the_other_axes(ranks, tmp_path, fields, precision):
    fields = dict(precision=precision, clip_grad_norm=1.1, **fields)
    world_size = fields.get("tp", 1) * fields.get("pp", 1)
    offload = dict(optimizer="disk", gradients="disk", path=str(tmp_path), overlap=precision == "bf16")
    found = [ranks(world_size, parity.train, "gpt_tied", {**fields, **more})[0] for more in ({}, dict(offload=offload))]
    assert found[0]["losses"] == found[1]["losses"]
    for name, value in found[0]["state"].items():
        assert torch.equal(found[1]["state"][name], value), name


def _through_a_checkpoint_off_device(*given: Any) -> dict[str, torch.Tensor]:
    with off_device():
        return _through_a_checkpoint(*given)


@pytest.mark.slow
def test_checkpoints_of_such_a_device(ranks, tmp_path):
    offloaded = dict(offload=dict(optimizer="disk", gradients="cpu", path=str(tmp_path)))
    for number, fields in enumerate((dict(zero=2, precision="bf16"), dict(zero=3))):
        first, second = (fields, {**fields, **offloaded}) if number else ({**fields, **offloaded}, fields)
        expected = ranks(2, _through_a_checkpoint, fields, fields, str(tmp_path / f"plain{number}"))[0]
        found = ranks(2, _through_a_checkpoint_off_device, first, second, str(tmp_path / f"{number}"))[0]
        assert all(torch.equal(found[key], value) for key, value in expected.items()), fields


def _through_a_checkpoint(first: dict[str, Any], second: dict[str, Any], folder: str) -> dict[str, torch.Tensor]:
    engine = _engine(first)
    _train(engine, range(2))
    engine.save(folder)
    engine = _engine(second)
    engine.load(folder)
    shown = {name: p.detach().clone() for name, p in engine.sharded.masters().items() if engine.mesh.world_size == 1}
    weights = _train(engine, range(2, 4))
    assert not shown or not torch.equal(shown["wide.weight"], engine.sharded.masters()["wide.weight"])
    return weights


def test_checkpoints_are_read_by_offloaded_plans_and_others(ranks, tmp_path):
    offload = dict(offload=dict(optimizer="disk", gradients="cpu", path=str(tmp_path)))
    plain = dict(zero=2, precision="bf16", clip_grad_norm=0.5)
    expected = ranks(1, _through_a_checkpoint, plain, plain, str(tmp_path / "plain"))[0]
    for name, first, second in (("to", plain, offload), ("from", offload, plain)):
        found = ranks(1, _through_a_checkpoint, {**plain, **first}, {**plain, **second}, str(tmp_path / name))[0]
        assert all(torch.equal(found[key], value) for key, value in expected.items()), name


def test_checkpoints_with_parameters_on_disk(ranks, tmp_path):
    offloaded = dict(zero=3, offload=dict(optimizer="disk", parameters="disk", path=str(tmp_path)))
    expected = ranks(1, _through_a_checkpoint, dict(zero=2), dict(zero=2), str(tmp_path / "plain"))[0]
    for name, first, second in (("to", dict(zero=2), offloaded), ("from", offloaded, dict(zero=2))):
        found = ranks(1, _through_a_checkpoint, first, second, str(tmp_path / name))[0]
        assert all(torch.equal(found[key], value) for key, value in expected.items()), name


def _refused(fields: dict[str, Any]) -> str:
    try:
        _engine(fields)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing was refused"


def _refused_off_device(fields: dict[str, Any]) -> str:
    with off_device():
        return _refused(fields)


def test_an_optimizer_off_such_a_device_without_its_gradients_is_refused(ranks):
    [found] = ranks(1, _refused_off_device, dict(offload=dict(optimizer="cpu")))
    assert "offload.gradients=None was given with offload.optimizer='cpu' on GPUs" in found


def _part_off_device(offload: str | None) -> dict[str, torch.Tensor]:
    """An optimizer that is given a part of the parameters; the norm is that of all gradients."""
    torch.manual_seed(3)
    plan = ts.Plan(micro_batches=2, clip_grad_norm=0.5, offload=offload)
    with off_device():
        engine = ts.parallelize(
            Uneven, plan, optimizer=lambda given: ADAMW(list(given)[1:]), loss_fn=parity.loss_function("gpt")
        )
        norms: list[Any] = []
        return {**_train(engine, range(2), norms), "norms": torch.tensor(norms)}


def test_what_no_optimizer_updates_counts_in_the_norm_off_such_a_device(ranks):
    plain, found = (ranks(1, _part_off_device, offload)[0] for offload in (None, "cpu"))
    assert all(torch.equal(found[name], value) for name, value in plain.items())


def _train_off_device(fields: dict[str, Any]) -> Any:
    with off_device():
        return parity.train("gpt_tied", fields)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [dict(tp=2, zero=0), dict(pp=2, micro_batches=2)], ids=["tp", "pp"])
def test_the_same_from_such_a_device_with_other_axes(ranks, fields):
    fields = dict(precision="bf16", clip_grad_norm=1.1, **fields)
    found = [ranks(2, _train_off_device, {**fields, **more})[0] for more in ({}, dict(offload="cpu"))]
    assert found[0]["losses"] == found[1]["losses"]
    for name, value in found[0]["state"].items():
        assert torch.equal(found[1]["state"][name], value), name


def test_a_folder_that_one_rank_cannot_use_stops_all(ranks, tmp_path):
    found = ranks(2, _refused, dict(offload=dict(optimizer="disk", path=str(tmp_path / "nothing"))))
    assert all("does not exist; set offload.path" in message for message in found), found


def _too_small(folder: str) -> str:
    import errno
    import os

    fallocate = os.posix_fallocate
    if torch.distributed.get_rank() == 1:

        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        os.posix_fallocate = full  # type: ignore[assignment]
    try:
        return _refused(dict(zero=3, offload=dict(optimizer="cpu", parameters="disk", path=folder)))
    finally:
        os.posix_fallocate = fallocate


def test_a_disk_that_is_too_small_for_one_ranks_parameters_stops_all(ranks, tmp_path):
    found = ranks(2, _too_small, str(tmp_path))
    assert all("bytes for this rank, and after the first 0" in message for message in found), found


def _fails(fields: dict[str, Any], folder: str, evaluate: bool = False) -> str:
    import errno
    import os

    engine = _engine({**fields, "offload": {**fields["offload"], "path": folder}})
    _train(engine, range(1))
    if engine.mesh.rank == 1:
        preadv = os.preadv

        def fail(*_: Any) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        os.preadv = fail  # type: ignore[assignment]
    try:
        if evaluate:
            engine.evaluate(*parity.shard(engine, *parity.batch("gpt", 1)))
        _train(engine, range(1, 2))
    except (OSError, RuntimeError) as error:
        return str(error)
    finally:
        if engine.mesh.rank == 1:
            os.preadv = preadv
    return "nothing failed"


@pytest.mark.parametrize(
    ("fields", "evaluate"),
    [
        (dict(zero=2, offload=dict(optimizer="disk")), False),
        (dict(zero=2, offload=dict(optimizer="disk", overlap=True)), False),
        (dict(zero=3, offload=dict(optimizer="cpu", parameters="disk")), False),
        (dict(zero=3, offload=dict(optimizer="cpu", parameters="disk")), True),
    ],
    ids=["states", "states, behind the step", "parameters", "parameters in evaluation"],
)
def test_a_disk_that_fails_on_one_rank_stops_all_with_its_path(ranks, tmp_path, fields, evaluate):
    found = ranks(2, _fails, fields, str(tmp_path), evaluate)
    assert all(f"scratch file in '{tmp_path}' could not be read" in message for message in found), found
    assert "failed on rank 1" in found[0]


@pytest.mark.parametrize(("fields", "parameters"), [(dict(precision="bf16", zero=2), None), (dict(zero=3), "disk")])
def test_a_loop_of_ones_own_sees_finished_updates(ranks, tmp_path, fields, parameters):
    expected, found = (
        ranks(1, _own_loop, dict(clip_grad_norm=0.5, **fields, **more))[0]
        for more in (
            {},
            dict(offload=dict(optimizer="disk", gradients="disk", parameters=parameters, path=str(tmp_path))),
        )
    )
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def _own_loop_off_device(fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    with off_device():
        return _own_loop(fields)


def test_a_loop_of_ones_own_off_the_device(ranks):
    fields = dict(clip_grad_norm=0.5, zero=2, precision="bf16")
    expected = ranks(1, _own_loop, fields)[0]
    found = ranks(1, _own_loop_off_device, {**fields, "offload": "cpu"})[0]
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def _own_loop(fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    engine = _engine(fields)
    loss_fn = parity.loss_function("gpt")
    for step in range(2):
        inputs, targets = parity.batch("gpt", step)
        engine.backward(loss_fn(engine.model(inputs), targets))
        engine.optimizer.step()
        seen = {name: to_local(p.detach()).clone() for name, p in engine.model.named_parameters()}
        seen.update(
            {f"grad {n}": to_local(p.grad).clone() for n, p in engine.model.named_parameters() if p.grad is not None}
        )
        engine.optimizer.zero_grad()
        with torch.no_grad():
            engine.model.wide.bias.mul_(2.0)  # what is written between steps counts
            seen["loss"] = engine.evaluate(inputs, targets)
            seen["output"] = engine.model(inputs)
    return seen
