"""Stock configs of transformers ask for a cache of keys and values, which training must neither fill nor trip over."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import parity
import seeds
import tensorshard as ts
from log_lines import logged
from toys import plain_loop

ADAMW = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1, eps=1e-4)


def _llama(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32, **options,
        )
    )  # fmt: skip


def _t5(**options: Any) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0, **options)
    )


def _bart(**options: Any) -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    sizes = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 2), ("ffn_dim", 48))}
    heads = {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
    return BartForConditionalGeneration(
        BartConfig(vocab_size=61, d_model=32, max_position_embeddings=32, dropout=0.0, **sizes, **heads, **options)
    )


def _gemma3(**options: Any) -> nn.Module:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=32, sliding_window=8, **options,
        )
    )  # fmt: skip


MODELS = {"llama": _llama, "t5": _t5, "bart": _bart, "gemma3": _gemma3}


def _build(kind: str, **options: Any) -> nn.Module:
    seeds.seed(3)
    return MODELS[kind](**options)


def _batch(kind: str, step: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    tokens = torch.randint(0, 61, (4, 9), generator=torch.Generator().manual_seed(step))
    inputs = {"input_ids": tokens[:, :-1]}
    if kind in ("t5", "bart"):
        inputs["decoder_input_ids"] = tokens[:, :-1].flip(1)
    return inputs, tokens[:, 1:].contiguous()


def _loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


def _train(kind: str, fields: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor], bool]:
    model = _build(kind)
    config = model.config
    sample = _batch(kind, 0)[0] if fields.get("pp", 1) > 1 else None
    engine = ts.parallelize(model, ts.Plan(**fields), optimizer=ADAMW, loss_fn=_loss, sample_inputs=sample)
    dp = engine.mesh
    losses = []
    for step in range(3):
        inputs, targets = _batch(kind, step)
        mine = {name: value.chunk(dp.dp_size)[dp.dp_rank] for name, value in inputs.items()}
        losses.append(engine.step(mine, targets.chunk(dp.dp_size)[dp.dp_rank]).item())
    return losses, engine.full_state_dict(), config.use_cache


def _check(kind: str, results: list[Any]) -> None:
    model = _build(kind, use_cache=False)
    steps = [[_batch(kind, step)] for step in range(3)]
    expected = list(plain_loop(model, ADAMW(model.parameters()), steps, loss_fn=_loss))
    for losses, state, use_cache in results:
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
        parity.assert_same_state(state, {n: v for n, v in model.state_dict().items() if n in state}, 1e-5)
        assert use_cache is True  # as the user had it


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("kind", MODELS)
def test_blocks_are_recomputed_without_a_cache(ranks, kind, mode):
    _check(kind, ranks(1, _train, kind, dict(recompute=mode)))


@pytest.mark.slow_cases("t5-{'tp': 2}", "bart-{'tp': 2}")
@pytest.mark.parametrize("fields", [dict(tp=2), dict(pp=2, micro_batches=2)], ids=str)
@pytest.mark.parametrize("kind", ["llama", "t5", "bart"])
def test_stock_configs_are_split_and_cut(ranks, kind, fields):
    _check(kind, ranks(2, _train, kind, fields))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["t5", "bart", "gemma3"])
def test_stock_configs_are_split_and_cut_at_once(ranks, kind):
    _check(kind, ranks(4, _train, kind, dict(pp=2, tp=2, micro_batches=2)))


def _said(**options: Any) -> tuple[ts.Engine, list[str]]:
    """An engine, and what the log said of caches when it was made."""
    with logged() as lines:
        engine = ts.parallelize(_build("llama", **options), ts.Plan(recompute="full"), optimizer=ADAMW, loss_fn=_loss)
    return engine, [line for line in lines if "use_cache" in line]


def _calls() -> dict[str, Any]:
    engine, said = _said()
    inputs, targets = _batch("llama", 0)
    engine.step(inputs, targets)
    found: dict[str, Any] = {"said": said, "predict": engine.predict(inputs).past_key_values is not None}
    before = engine.evaluate(inputs, targets)
    # A loop of one's own: recomputed blocks would otherwise fill the cache twice.
    output = engine.model(**inputs)
    found["own loop"] = output.past_key_values is not None
    _loss(output, targets).backward()
    engine.optimizer.step()
    found["trained"] = bool(engine.evaluate(inputs, targets) < before)
    tokens = engine.model.generate(inputs["input_ids"][:1], max_new_tokens=4, do_sample=False, pad_token_id=0)
    return found | {"generated": tuple(tokens.shape)}


def test_generation_has_its_cache_and_training_has_none(ranks):
    [found] = ranks(1, _calls)
    [line] = found.pop("said")
    assert line.startswith("config.use_cache is off within step and evaluate")
    assert found == {"predict": True, "own loop": False, "trained": True, "generated": (1, 12)}


def _said_without() -> list[str]:
    return _said(use_cache=False)[1]


def test_a_model_without_one_is_told_nothing(ranks):
    assert ranks(1, _said_without) == [[]]
