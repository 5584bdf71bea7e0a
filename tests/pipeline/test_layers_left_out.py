"""Layers that are left out at random: all stages know which, in each step."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    OPTConfig,
    OPTForCausalLM,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
)

import tensorshard as ts
from rank_pool import RankError

ADAMW = partial(torch.optim.AdamW, lr=1e-3)
STEPS = 6


class LayerDrop(nn.Module):
    """Dropout between its layers comes before the draw that leaves one out."""

    def __init__(self, rate: float = 0.4) -> None:
        super().__init__()
        self.inputs, self.rate = nn.Linear(4, 8), rate
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inputs(x)
        for layer in self.layers:
            h = F.dropout(x, 0.2, self.training)
            if not self.training or torch.rand(()) >= self.rate:
                x = x + layer(h)
        return self.head(x)


_SMALL: dict[str, Any] = dict(vocab_size=32, max_position_embeddings=16)
MODELS = {
    "plain": LayerDrop,
    "opt": lambda: OPTForCausalLM(
        OPTConfig(
            hidden_size=16, ffn_dim=32, num_hidden_layers=4, num_attention_heads=2, word_embed_proj_dim=16,
            layerdrop=0.4, **_SMALL,
        )
    ),
    "bart": lambda: BartForConditionalGeneration(
        BartConfig(
            d_model=16, encoder_layers=3, decoder_layers=3, encoder_ffn_dim=32, decoder_ffn_dim=32,
            encoder_attention_heads=2, decoder_attention_heads=2, encoder_layerdrop=0.3, decoder_layerdrop=0.3,
            **_SMALL,
        )
    ),
    "wav2vec2": lambda: Wav2Vec2ForCTC(
        Wav2Vec2Config(
            vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
            conv_dim=(8, 8), conv_stride=(4, 2), conv_kernel=(4, 2), num_feat_extract_layers=2,
            num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, layerdrop=0.4, apply_spec_augment=False,
        )
    ),
}  # fmt: skip


def _built(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[kind]()


def _batches(kind: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = {"plain": (4, 4), "wav2vec2": (4, 128)}.get(kind)
    if shape is None:
        return [torch.randint(0, 32, (4, 8), generator=generator) for _ in range(STEPS)]
    return [torch.randn(shape, generator=generator) for _ in range(STEPS)]


def _inputs(kind: str, batch: torch.Tensor) -> Any:
    return {"plain": batch, "wav2vec2": {"input_values": batch}}.get(kind, {"input_ids": batch})


def _loss(output: Any, _: torch.Tensor) -> torch.Tensor:
    return (output if isinstance(output, torch.Tensor) else output.logits).square().mean()


def _train(kind: str, fields: dict[str, Any]) -> list[float]:
    first = _batches(kind)[0]
    engine = ts.parallelize(
        partial(_built, kind), ts.Plan(**fields), optimizer=ADAMW, loss_fn=_loss, sample_inputs=_inputs(kind, first)
    )
    losses = []
    for batch in _batches(kind):
        mine = batch.chunk(engine.mesh.dp_size)[engine.mesh.dp_rank]
        losses.append(engine.step(_inputs(kind, mine), mine).item())
    engine.evaluate(_inputs(kind, mine), mine)
    return losses


def _plain_loop(kind: str) -> list[float]:
    model, losses = _built(kind), []
    model.train()
    optimizer = ADAMW(model.parameters())
    with ts.same_randomness(model):
        for batch in _batches(kind):
            inputs = _inputs(kind, batch)
            loss = _loss(model(**inputs) if isinstance(inputs, dict) else model(inputs), batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, dict(pp=2, micro_batches=2)),
    "pp2-full": (2, dict(pp=2, micro_batches=2, recompute="full")),
    "pp2-looped": (2, dict(pp=2, micro_batches=4, pp_schedule="interleaved_1f1b")),
    "pp2-zero3": (4, dict(pp=2, micro_batches=2, zero=3)),
    "tp2": (2, dict(tp=2)),
    "zero3": (2, dict(zero=3)),
}


@pytest.mark.fast_cases("plain-pp2")
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", MODELS)
def test_training_is_that_of_one_process(ranks, kind, plan):
    world_size, fields = PLANS[plan]
    expected = _plain_loop(kind)
    assert ranks(world_size, _train, kind, fields)[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_by_rank_each_stage_would_leave_out_others(ranks):
    with pytest.raises(RankError, match=r"depends on values or random numbers|calls other units"):
        ranks(2, _train, "plain", dict(pp=2, micro_batches=2, random="by_rank"), group_timeout=30)
