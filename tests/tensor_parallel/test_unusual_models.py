"""Blocks that are built in ways of their own: what of them is split, and that they train as one process does."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import parity
import tensorshard as ts
from tensorshard.tensor_parallel.apply.apply_table import apply_tensor_parallel
from tensorshard.tensor_parallel.search.check_table import check_tensor_table
from tensorshard.tensor_parallel.search.find_table import find_tensor_plan
from tensorshard.tensor_parallel.table.table import TensorTable
from toys import plain_loop
from unusual_models import BLOCKS, NormalizingLinear, Scan, batch, build

ADAMW = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1, eps=1e-4)
STEPS = 2

# What is expected of the blocks; all models have their embedding, their positions and their output layer split.
TABLES: dict[str, dict[str, str]] = {
    "own-forwards": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"},
    "latent": {
        "blocks.*.q": "colwise",
        "blocks.*.narrow": "colwise_gather(sum_grad)",
        "blocks.*.norm.weight": "replicate(sum_grad)",
        "blocks.*.wide": "slice(0)",
        "blocks.*.out": "rowwise",
    },
    "sinks": {
        "blocks.*.q": "colwise",
        "blocks.*.sinks": "slice(0)",
        "blocks.*.out": "rowwise",
        "blocks.*.experts": "sum",
        "blocks.*.experts.up": "slice(2)",
        "blocks.*.experts.up_bias": "slice(1)",
        "blocks.*.experts.down": "slice(1)",
        "blocks.*.experts.down_bias": "replicate(divided)",
    },
    "scan": {
        "blocks.*.enter": "packed_colwise(2)",
        "blocks.*.filter.weight": "slice(0)",
        "blocks.*.select": "rowwise(sum_grad)",
        "blocks.*.step.weight": "slice(0)",
        "blocks.*.decay": "slice(0)",
        "blocks.*.skip": "slice(0)",
        "blocks.*.leave": "rowwise",
    },
    "indexed-bias": {"blocks.*.q": "colwise_gather", "blocks.0.bias.0": "colwise", "blocks.0.bias.2": "rowwise"},
    "biased": {"blocks.0": "divide(features, input.bias.1)", "blocks.*.q": "colwise", "blocks.*.out": "rowwise"},
    "interleaved": {"blocks.*.qkv": "colwise_gather", "blocks.*.out": "colwise_gather"},
    "reads-layers": {"blocks.*.qkv.weight": "gather(0, 1)", "blocks.*.out.weight": "gather(0, 1)"},
    "recurrent": {"blocks.*.rnn.weight_ih_l0": "gather(0)", "blocks.*.rnn.weight_hh_l0": "gather(0)"},
    "parameters": {"blocks.*.qkv": "gather(1)", "blocks.*.out": "colwise_gather"},
}


@pytest.mark.slow_cases("scan", "recurrent", "indexed-bias")
@pytest.mark.parametrize("kind", BLOCKS)
def test_what_is_split(kind):
    found = find_tensor_plan(build(kind), 2, inputs=batch(0)[0])
    table = found.plan.to_dict()
    outside = {"embedding": "vocab", "positions": "vocab", "head": "colwise_gather"}
    assert {name: table.get(name) for name in {**outside, **TABLES[kind]}} == {**outside, **TABLES[kind]}
    assert found.split_share > 0.9


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _train(fields: dict[str, Any], kinds: list[str]) -> dict[str, tuple[list[float], dict[str, torch.Tensor]]]:
    results = {}
    for kind in kinds:
        samples = batch(0)[0]
        model = build(kind)
        engine = ts.parallelize(model, ts.Plan(**fields), optimizer=ADAMW, loss_fn=_loss, sample_inputs=samples)
        losses = [engine.step(*batch(step)).item() for step in range(STEPS)]
        results[kind] = (losses, engine.full_state_dict())
    return results


PLANS = {
    "tp": (dict(tp=2), list(BLOCKS)),
    "sequence": (dict(tp=2, sequence_parallel=True), ["own-forwards", "scan", "biased"]),
}


@pytest.mark.slow
@pytest.mark.slow_cases("tp")
@pytest.mark.parametrize("plan", PLANS)
def test_they_train_as_one_process_does(ranks, plan):
    for rank, found in enumerate(ranks(2, _train, *PLANS[plan])):
        for kind, (losses, state) in found.items():
            model = build(kind)
            steps = [[batch(step)] for step in range(STEPS)]
            expected = list(plain_loop(model, ADAMW(model.parameters()), steps, loss_fn=_loss))
            torch.testing.assert_close(
                losses, expected, rtol=1e-5, atol=1e-5, msg=lambda text, kind=kind: f"{kind}: {text}"
            )
            if rank == 0:
                parity.assert_same_state(state, model.state_dict(), 1e-5)


def test_a_fused_kernel_that_reads_a_row_layers_weight_is_refused(ranks):
    for said in ranks(1, _run_fused):
        assert "did not call leave" in said


def _run_fused() -> str:
    class Fused(Scan):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + super().forward(x) if not self.training else x @ self.leave.weight[:, :16]

    model = nn.Sequential(Fused())
    plan = TensorTable.from_dict({"0.filter.weight": "slice(0)", "0.enter": "packed_colwise(2)", "0.leave": "rowwise"})
    apply_tensor_parallel(model, plan, dist.group.WORLD)
    model.eval()(torch.zeros(2, 3, 16))
    try:
        model.train()(torch.zeros(2, 3, 16))
    except RuntimeError as error:
        return str(error)
    return ""


def test_weights_that_are_not_there_when_they_are_read_are_refused():
    with pytest.raises(ValueError, match="read outside of the forward in which it is put together"):
        table = TensorTable.from_dict({"blocks.*.qkv.weight": "gather(0)"})
        check_tensor_table(build("reads-layers"), table, 2, inputs=batch(0)[0])


def test_a_forward_that_needs_its_whole_weight_keeps_it():
    model = nn.Sequential(NormalizingLinear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    found = find_tensor_plan(model, 2, inputs=torch.zeros(2, 16))
    assert found.plan.to_dict() == {"0.weight": "gather(0)", "2": "colwise_gather"}
    assert "0 has a forward of its own" in found.alone["*"]
