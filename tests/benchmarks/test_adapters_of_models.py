"""LoRA on 12 models of the benchmark: what one process computes, on a base that stays as it is, bit for bit."""

from functools import partial
from typing import Any

import pytest
import torch
from benchmarks.models.case import Case
from benchmarks.models.registry import find_cases
from torch import nn

import tensorshard as ts
from parity import assert_same_state

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")

MODELS = (
    "Llama", "Mistral", "Qwen3", "Gemma 2", "Phi-3", "GPT-2", "GPT-NeoX", "OPT", "Mixtral", "BERT", "T5", "ViT",
)  # fmt: skip
PLANS: dict[str, dict[str, Any]] = {
    "zero1": dict(zero=1),
    "zero3": dict(zero=3),
    "tp": dict(tp=2),
    "pp": dict(pp=2, micro_batches=2),
    "bf16": dict(zero=3, precision="bf16"),
    "recompute": dict(zero=1, recompute="full"),
}
ADAMW = partial(torch.optim.AdamW, lr=1e-3, eps=1e-3)
STEPS, SAMPLES = 20, 4


def _case(name: str) -> Case:
    return find_cases()[f"transformers/{name}"]


def _made(name: str) -> nn.Module:
    torch.manual_seed(0)
    base = _case(name).build()
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    return peft.get_peft_model(base, config)


def _batches(name: str, ranks: int, rank: int) -> list[Any]:
    """Each step's inputs and targets of a data rank."""
    drawn = [_case(name).batch(SAMPLES, torch.Generator().manual_seed(step)) for step in range(STEPS)]

    def share(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: share(value) for key, value in part.items()}
        return part.chunk(ranks)[rank] if isinstance(part, torch.Tensor) else type(part)(map(share, part))

    return [(share(inputs), share(targets)) for inputs, targets in drawn]


def _train(name: str, fields: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Losses, the full state, and this rank's whole parameters."""
    model = _made(name)
    sample = _batches(name, 1, 0)[0][0]
    loss_fn = _case(name).loss
    engine = ts.parallelize(model, ts.Plan(**fields), optimizer=ADAMW, loss_fn=loss_fn, sample_inputs=sample)
    losses = [engine.step(*batch).item() for batch in _batches(name, engine.mesh.dp_size, engine.mesh.dp_rank)]
    sharded = engine.sharded
    sharded.finish_gather()
    whole = {n: p.detach().clone() for n, p in sharded.shown_parameters().items() if not sharded.is_part(n)}
    return losses, engine.full_state_dict(), whole


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_adapters_are_those_of_one_process(ranks, name, plan):
    precision = PLANS[plan].get("precision", "fp32")
    expected, state_alone, _ = ranks(1, _train, name, dict(precision=precision))[0]
    results = ranks(2, _train, name, PLANS[plan])
    losses, state, whole = results[0]
    assert losses == pytest.approx(expected, rel=1e-5 if precision == "fp32" else 2e-2)
    if precision == "fp32":
        assert_same_state(state, state_alone, 1e-5)
    frozen = {n: p for n, p in _made(name).named_parameters() if not p.requires_grad}
    assert not [n for n, value in frozen.items() if not torch.equal(state[n], value)]
    assert not [n for n in whole.keys() & results[1][2].keys() if not torch.equal(whole[n], results[1][2][n])]
