"""What estimates say of work, traffic and time, against formulas; and the hardware that they know."""

from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import tensorshard as ts
from tensorshard.models import GPT, next_token_loss
from tensorshard.predict.hardware import (
    THIS_MACHINE,
    Link,
    Rates,
    find_hardware,
    known_hardware,
    save_measured,
)
from tensorshard.predict.operation_ledger import (
    BACKWARD,
    FORWARD,
    UPDATE,
    Kernel,
    OperationLedger,
    Operations,
    Transfer,
)
from tensorshard.predict.rank_estimate import CATEGORIES, RankEstimate
from tensorshard.predict.step_time import kernel_time, link_of, step_time, transfer_time

LAYERS, WIDTH, HEADS, LENGTH, VOCABULARY, BATCH = 2, 32, 2, 16, 64, 4
TABLE = {
    **{f"blocks.*.attention.{name}": "colwise" for name in ("query", "key", "value")},
    "blocks.*.attention.output": "rowwise",
    "blocks.*.mlp.up": "colwise",
    "blocks.*.mlp.down": "rowwise",
}
RATES = Rates(
    {"float32": 1e12},
    1e12,
    (1.0, 1.0),
    (1.0, 1.0),
    launch=0.0,
    asynchronous=True,
    devices_per_node=4,
    within_node=Link(100e9, 1e-6),
    between_nodes=Link(10e9, 1e-5),
    host_bandwidth=1e10,
)


def _gpt(world: int, **fields: Any) -> ts.Estimate:
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    return ts.estimate(
        partial(GPT, VOCABULARY, LENGTH, LAYERS, HEADS, WIDTH),
        ts.Plan(**fields),
        world_size=world,
        inputs=tokens,
        targets=tokens,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        loss_fn=next_token_loss,
        hardware="a100-80",
    )


class _Block(nn.Module):
    """The layer of Korthikanti et al. 2022, with masks of one byte, as CUDA's dropout keeps them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.layer_norm(x, x.shape[-1:])
        q, k, v = (
            layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2).flatten(0, 1) for layer in (self.q, self.k, self.v)
        )
        weights = _dropout((q * 0.1 @ k.mT).softmax(-1))
        mixed = (weights @ v).unflatten(0, (-1, self.heads)).transpose(1, 2).flatten(2)
        x = x + _dropout(self.out(mixed))
        return x + _dropout(self.down(F.gelu(self.up(F.layer_norm(x, x.shape[-1:])))))


def _dropout(x: torch.Tensor) -> torch.Tensor:
    return torch.native_dropout(x, 0.1, True)[0]


class _Layers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.layers = nn.ModuleList(_Block(64, 8) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def _kept(layers: int) -> int:
    """Bytes of activations at the end of forward, where gradients and temporaries of backward have no part."""
    found = ts.estimate(
        partial(_Layers, layers),
        ts.Plan(zero=0, precision="bf16"),
        world_size=1,
        inputs=torch.zeros(2, 64, 64),
        targets=torch.zeros(2, 64, 64),
        optimizer=partial(torch.optim.SGD, lr=1e-3),
        loss_fn=lambda output, targets: output.square().mean(),
    )
    [rank] = found.ranks
    return max(nbytes for phase, nbytes in rank.timeline if phase == "forward") - rank.by_category["parameters"]


def _numbers() -> dict[str, Any]:
    """All that is asked of estimates here, in one process."""
    if dist.is_initialized():
        dist.destroy_process_group()
    alone, sharded, split = _gpt(1, zero=0), _gpt(16, zero=3), _gpt(2, tp=2, tp_plan=TABLE, tp_check=False)
    offloaded = _gpt(2, zero=3, offload="disk", clip_grad_norm=1.0)
    return {
        "flops": alone.ranks[0].flops,
        "alone": alone.ranks[0].by_category,
        "sharded": sharded.ranks[0].by_category,
        "gathers": sharded.ranks[0].traffic["dp_shard"],
        "tp": split.ranks[0].traffic["tp"],
        "in parts": _gpt(1, zero=0, micro_batches=4).ranks[0].flops,
        "stages": _gpt(2, pp=2, micro_batches=4),
        "layers": [_kept(2), _kept(3)],
        "text": offloaded.describe(),
        "offloaded": offloaded.ranks[0],
        "time": (sharded.step_time, sharded.samples_per_second, sharded.time_by_category),
    }


@pytest.mark.slow
def test_estimates_agree_with_formulas(ranks):
    found = ranks(1, _numbers)[0]
    model = GPT(VOCABULARY, LENGTH, LAYERS, HEADS, WIDTH)
    parameters = sum(p.numel() for p in model.parameters())
    looked_up = model.embedding.weight.numel() + model.positions.weight.numel()
    tokens = BATCH * LENGTH
    # Two products forward, and five backward, for these compute the scores once more.
    attention = LAYERS * 14 * tokens * LENGTH * WIDTH
    matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1) - looked_up
    assert found["flops"] == pytest.approx(6 * matrices * tokens + attention, rel=0.02)
    assert found["in parts"] == found["flops"]  # three micro-batches are run, and scaled
    stages = found["stages"]
    assert sum(rank.flops for rank in stages.ranks) == found["flops"]
    assert [rank.traffic["pp"]["send"].count for rank in stages.ranks] == [4, 4]
    assert stages.time_by_category["bubble"] > 0
    # Of each block two sums forward, and backward those of the inputs' gradients of queries, keys, values and the MLP:
    # a table without check does not say which of them share an input. Beside them the norm's and the loss's.
    assert found["tp"]["all_reduce"].nbytes == pytest.approx(LAYERS * 6 * tokens * WIDTH * 4, rel=0.01)
    moved = (found["gathers"]["all_gather"].nbytes + found["gathers"]["reduce_scatter"].nbytes) / (4 * parameters)
    assert 2 <= moved <= 3.02  # gathered twice, and reduced once; the root's unit is gathered once
    # ZeRO (Rajbhandari et al. 2020): all model states are divided by the number of ranks.
    assert found["alone"]["parameters"] == pytest.approx(4 * parameters, rel=0.01)
    assert found["alone"]["optimizer states"] == pytest.approx(8 * parameters, rel=0.01)
    assert found["sharded"]["parameters"] == pytest.approx(4 * parameters / 16, rel=0.01)
    assert found["sharded"]["optimizer states"] == pytest.approx(8 * parameters / 16, rel=0.01)
    s, b, h, a = 64, 2, 64, 8
    two, three = found["layers"]
    assert three - two == pytest.approx(34 * s * b * h + 5 * a * s * s * b, rel=0.05)
    step, rate, categories = found["time"]
    assert 0 < step.low < step.seconds < step.high and sum(categories.values()) == pytest.approx(step.seconds)
    assert rate == pytest.approx(16 * BATCH / step.seconds)
    offloaded = found["offloaded"]
    assert "of which a step moves" in found["text"] and "not validated" in found["text"]
    assert offloaded.by_category["optimizer states"] < 1000  # the counts of steps
    blocks = sum(-(-4 * p.numel() // 2 // 4096) * 4096 for p in model.parameters())  # of half of each, in fp32
    assert offloaded.disk_bytes == 4 * blocks  # two states, the gradient, and the master, which is the shard
    # Each is written, and read; the shards are read in forward, too, and those of blocks in backward.
    assert 9 * blocks < offloaded.disk_traffic <= 10 * blocks


def _rank(stage: int, forward: float, *transfers: Transfer) -> RankEstimate:
    kernels = {
        Kernel(FORWARD, "aten.mm", "float32", int(forward * 1e12), 0): 8,
        Kernel(BACKWARD, "aten.mm", "float32", int(2 * forward * 1e12), 0): 8,
        Kernel(UPDATE, "aten.add_", "float32", 0, int(1e12)): 1,
    }
    operations = Operations()
    operations.kernels.update(kernels)
    operations.transfers.update(dict.fromkeys(transfers, 1))
    return RankEstimate(stage, stage, 0, 0, 0, dict.fromkeys(CATEGORIES, 0), "forward", [], [], [], operations)


def test_the_bubble_is_that_of_the_schedule():
    plan = ts.Plan(pp=4, micro_batches=8).resolve(4)
    found = step_time([_rank(stage, 0.5) for stage in range(4)], plan, 4, RATES)
    assert found.by_category["bubble"] / (found.seconds - 1) == pytest.approx(3 / (8 + 3))
    assert found.by_category["compute"] == pytest.approx(8 * 1.5) and found.by_category["optimizer"] == pytest.approx(1)


def test_transfers_are_hidden_behind_kernels_where_the_engine_does():
    plan = ts.Plan(zero=3).resolve(4)
    gather = Transfer(FORWARD, "dp_shard", "all_gather", int(100e9), 4, overlaps=True)
    assert gather.sent == pytest.approx(75e9)
    one = transfer_time(gather, plan, 4, RATES)
    assert one == pytest.approx(0.75, rel=1e-4)
    alone, hidden = (
        step_time([_rank(0, 0.5, transfer)], plan, 4, RATES).by_category["exposed communication"]
        for transfer in (Transfer(FORWARD, "dp_shard", "all_gather", int(100e9), 4), gather)
    )
    assert alone == pytest.approx(one) and hidden == pytest.approx(one)  # the first of a step is always seen
    both = _rank(0, 0.5)
    both.operations.transfers[gather] = 4
    assert step_time([both], plan, 4, RATES).by_category["exposed communication"] == pytest.approx(one)


def test_the_roofline_and_the_links():
    assert kernel_time(Kernel(FORWARD, "mm", "float32", int(2e12), int(1e12)), RATES) == pytest.approx(2)
    assert kernel_time(Kernel(FORWARD, "mm", "float32", int(1e12), int(3e12)), RATES) == pytest.approx(3)
    plan = ts.Plan(tp=4, zero=1).resolve(16)
    assert link_of("tp", 4, plan, 16, RATES) == RATES.within_node
    assert link_of("dp_shard", 4, plan, 16, RATES).bandwidth == 10e9  # one of each node
    assert link_of("world", 16, plan, 16, RATES).bandwidth == 40e9  # over the adapters of all four


def _sends(zero: int) -> set[tuple[str, bool, str]]:
    """Axis, whether it overlaps, and what it is part of, of all sends in a step of a CPU rank of four, with a batch
    normalization."""
    if dist.is_initialized():
        dist.destroy_process_group()
    found = ts.estimate(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)),
        ts.Plan(zero=zero),
        world_size=4,
        inputs=torch.zeros(2, 4),
        targets=torch.zeros(2, dtype=torch.long),
        optimizer=partial(torch.optim.SGD, lr=1e-3),
        loss_fn=F.cross_entropy,
        device="cpu",
    )
    transfers = found.ranks[0].operations.transfers
    return {(t.axis, t.overlaps, t.part_of) for t in transfers if t.collective == "send"}


def test_sends_know_their_collective(ranks):
    sends = ranks(1, _sends, 1)[0]
    assert ("dp_shard", True, "reduce_scatter") in sends  # of gradients, while backward goes on
    assert ("dp_shard", False, "all_reduce") in sends  # of the loss and of the batch normalization


def test_a_batch_normalization_is_waited_for_where_gradients_are_not(ranks):
    sends = ranks(1, _sends, 3)[0]
    assert {("dp_shard", True, "all_gather"), ("dp_shard", True, "reduce_scatter")} < sends
    assert ("dp_shard", False, "all_reduce") in sends


def _kernels(ledger: OperationLedger) -> list[Kernel]:
    ledger.end_step()
    return list(ledger._counts.kernels)


def test_recurrent_layers_count_their_products_and_weights():
    layer, steps, samples = nn.LSTM(8, 16), 5, 3
    with OperationLedger() as ledger:
        ledger.begin_step(lambda: FORWARD)
        layer(torch.zeros(steps, samples, 8))[0].sum().backward()
    kernels = {kernel.name: kernel for kernel in _kernels(ledger) if kernel.flops}
    forward = kernels["aten.mkldnn_rnn_layer"]
    weights = 4 * 16 * (8 + 16)
    assert forward.flops == 2 * steps * samples * weights
    assert forward.nbytes > 4 * (weights + (steps - 1) * 4 * 16 * 16)  # the states' matrix, in every step
    assert kernels["aten.mkldnn_rnn_layer_backward"].flops == 2 * forward.flops


def test_products_in_place_count_as_products():
    a, b, total = torch.zeros(6, 4), torch.zeros(4, 8), torch.zeros(6, 8)
    with OperationLedger() as ledger:
        ledger.begin_step(lambda: FORWARD)
        torch.addmm(total, a, b)
        total.addmm_(a, b)
    flops = {kernel.name: kernel.flops for kernel in _kernels(ledger)}
    assert flops == {"aten.addmm": 2 * 6 * 4 * 8, "aten.addmm_": 2 * 6 * 4 * 8}


def test_hardware_is_found_by_its_name(tmp_path, monkeypatch):
    names = known_hardware()
    expected = {"h200", "h100", "a100-80", "a100-40", "v100-16", "v100-32", "rtx-3090", "rtx-4090", "titan-xp"}
    assert expected <= set(names)
    for name in names:
        rates = find_hardware(name).rates
        assert {"float32", "bfloat16", "float16"} <= set(rates.flops) and rates.within_node.bandwidth > 1e9
    monkeypatch.setenv("TENSORSHARD_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="run 'tensorshard check'"):
        find_hardware(THIS_MACHINE)
    save_measured(1 << 30, 0, RATES, "a test")
    found = find_hardware(THIS_MACHINE)
    assert found.rates == RATES and found.is_measured and found.context == 0
    (tmp_path / f"{THIS_MACHINE}.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be read"):
        find_hardware(THIS_MACHINE)


def _of_many_rows(runs_all: bool) -> ts.Estimate:
    """A language model whose logits are taken in several runs of rows, each of them in tiles."""
    tokens = torch.zeros(12, 128, dtype=torch.long)
    all_turns = mock.patch("tensorshard.predict.watched_steps.sample_loops", lambda _: nullcontext())
    with all_turns if runs_all else nullcontext():
        return ts.estimate(
            partial(GPT, 70_000, 128, 1, 2, 16),
            ts.Plan(zero=0, logits="tiled"),
            world_size=1,
            inputs=tokens,
            targets=tokens,
            optimizer=partial(torch.optim.SGD, lr=0.1),
            loss_fn=next_token_loss,
        )


def test_loops_within_loops_count_what_they_leave_out():
    if dist.is_initialized():
        dist.destroy_process_group()
    counted, run = _of_many_rows(False).ranks[0], _of_many_rows(True).ranks[0]
    assert counted.flops == run.flops
    assert counted.memory_traffic == pytest.approx(run.memory_traffic, rel=1e-3)
    assert counted.peak_allocated == run.peak_allocated


def _of_many_classes(device: str, **fields: Any) -> RankEstimate:
    if dist.is_initialized():
        dist.destroy_process_group()
    tokens = torch.zeros(16, 128, dtype=torch.long)
    model, adamw = partial(GPT, 65_536, 128, 1, 2, 16), partial(torch.optim.AdamW, lr=1e-3)
    given = {"inputs": tokens, "targets": tokens, "optimizer": adamw, "loss_fn": next_token_loss}
    return ts.estimate(model, ts.Plan(**fields), world_size=2, device=device, **given).ranks[0]


@pytest.mark.slow
def test_logits_are_computed_in_the_tiles_of_the_device_that_is_estimated():
    on_gpu, on_cpu = (_of_many_classes(device, logits="tiled") for device in ("cuda", "cpu"))
    assert sum(on_gpu.operations.kernels.values()) < sum(on_cpu.operations.kernels.values()) / 4
    assert on_gpu.peak_allocated > on_cpu.peak_allocated + (256 << 20)
    assert abs(on_gpu.flops / on_cpu.flops - 1) < 0.01


@pytest.mark.slow
def test_zero_2_reduces_in_every_micro_batch():
    def sent(count: int) -> int:
        found = _of_many_classes("cuda", zero=2, micro_batches=count, logits="whole").operations
        return sum(count for transfer, count in found.transfers.items() if transfer.collective == "reduce_scatter")

    assert sent(8) == 8 * sent(1) > 0
