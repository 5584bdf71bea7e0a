"""Facts about a model from one forward on fake tensors."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tensorshard as ts
from tensorshard.predict.search.model_facts import model_facts


def test_a_mixture_of_experts_in_fp32_has_facts():
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2)
    config = transformers.MixtralConfig(vocab_size=64, num_hidden_layers=2, num_local_experts=4, **sizes)
    tokens = {"input_ids": torch.zeros(2, 8, dtype=torch.long)}
    facts = model_facts(partial(transformers.MixtralForCausalLM, config), tokens, 2)
    assert facts is not None and facts.blocks == 2
    assert (
        facts.expert_parts == (1, 2, 4)
        and 0.5 < facts.expert_share[0] < facts.expert_share[1] < facts.expert_share[2] == 1
    )


class Mistaken(nn.Module):
    """One whose product has the wrong shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def test_a_mistake_is_said_once_and_not_logged(caplog):
    if dist.is_initialized():
        dist.destroy_process_group()
    inputs, targets = torch.zeros(4, 7), torch.zeros(4, dtype=torch.long)
    given: Any = {"optimizer": partial(torch.optim.SGD, lr=0.1), "loss_fn": nn.functional.cross_entropy}
    assert model_facts(Mistaken, inputs, 4) is None
    with pytest.raises(RuntimeError, match="same reduction dim"):
        ts.estimate(Mistaken, ts.Plan(), world_size=2, inputs=inputs, targets=targets, **given)
    assert not [record for record in caplog.records if "fake_tensor" in record.name]
