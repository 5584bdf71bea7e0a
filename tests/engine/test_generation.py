"""Generated tokens are those of one process, with the cache or without, on any layout."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import pretrained_models
import tensorshard as ts
from pretrained_models import token_loss
from tensorshard.models import GPT

PROMPTS = torch.arange(4 * 5).view(4, 5) * 11 % 61
DRAWN = {"temperature": 1.5, "top_k": 9, "seed": 4}
ENDED = {"eos_token_id": 7}
BUILD = {
    **pretrained_models.KINDS,
    "plain": partial(GPT, vocab_size=64, context_length=32, num_layers=2, num_heads=4, width=32),
}


def _engine(kind: str, fields: dict[str, Any]) -> ts.Engine:
    return ts.parallelize(
        BUILD[kind], ts.Plan(**fields), optimizer=partial(torch.optim.SGD, lr=0.1), loss_fn=token_loss, seed=3
    )


def _generate(kind: str, fields: dict[str, Any]) -> list[torch.Tensor]:
    engine = _engine(kind, fields)
    mine = PROMPTS.tensor_split(engine.mesh.dp_size)[engine.mesh.dp_rank]
    tokens = [engine.gather(engine.generate(mine, max_new_tokens=9, **options)) for options in ({}, DRAWN, ENDED)]
    assert not any(parameter.grad is not None for parameter in engine.model.parameters())
    return tokens


@pytest.mark.parametrize(
    ("kind", "size", "fields"),
    [
        ("llama", 2, {"zero": 3}),
        pytest.param("llama", 2, {"tp": 2}, marks=pytest.mark.slow),
        ("llama", 2, {"pp": 2, "micro_batches": 2}),
        pytest.param("gpt2", 4, {"tp": 2, "zero": 3}, marks=pytest.mark.slow),
        ("mixtral", 2, {"tp": 2}),
        pytest.param("plain", 4, {"pp": 2, "tp": 2, "micro_batches": 2}, marks=pytest.mark.slow),
        ("plain", 2, {"zero": 3}),
    ],
)
def test_tokens_are_those_of_one_process(ranks, kind, size, fields):
    expected = ranks(1, _generate, kind, {"zero": 0})[0]
    assert [len(set(tokens[:, 5:].flatten().tolist())) > 2 for tokens in expected[:2]] == [True, True]
    for found in ranks(size, _generate, kind, fields):
        assert all(torch.equal(tokens, other) for tokens, other in zip(found, expected, strict=True))


def _like_transformers() -> tuple[torch.Tensor, torch.Tensor]:
    engine = _engine("llama", {})
    expected = engine.model.generate(PROMPTS, max_new_tokens=9, do_sample=False)
    return engine.generate(PROMPTS, max_new_tokens=9), expected


def test_greedy_tokens_are_those_of_transformers(ranks):
    found, expected = ranks(1, _like_transformers)[0]
    assert torch.equal(found, expected)


def test_a_sample_that_has_ended_is_filled_up(ranks):
    tokens = ranks(1, _generate, "llama", {})[0][0]
    end = tokens[0, 7].item()
    found = ranks(1, _generate_until, end)[0]
    first = tokens[0].tolist().index(end, 5)
    assert torch.equal(found[0, : first + 1], tokens[0, : first + 1]) and (found[0, first:] == end).all()


def _generate_until(end: int) -> torch.Tensor:
    return _engine("llama", {}).generate(PROMPTS, max_new_tokens=9, eos_token_id=end)


def _bad_calls() -> None:
    engine = _engine("plain", {})
    for arguments, said in [
        ((torch.ones(2, 3), 4), r"prompts of torch.float32 \(2, 3\) were given; they must be token ids"),
        ((torch.ones(3).long(), 4), r"of shape \[samples, tokens\]"),
        ((PROMPTS[:, :0], 4), "at least one token is needed"),
        ((PROMPTS, 0), "max_new_tokens=0 was given; it must be a whole number of at least 1"),
        ((PROMPTS, 99), "5 tokens and 99 new ones are 104 together, and this GPT reads at most 32"),
    ]:
        with pytest.raises(ValueError, match=said):
            engine.generate(arguments[0], max_new_tokens=arguments[1])
    classifier = ts.parallelize(
        partial(torch.nn.Embedding, 64, 8), ts.Plan(), optimizer=torch.optim.SGD, loss_fn=token_loss
    )
    assert classifier.generate(PROMPTS, max_new_tokens=1).shape == (4, 6)
    pooled = ts.parallelize(
        lambda: torch.nn.Sequential(torch.nn.Embedding(64, 8), torch.nn.Flatten()),
        ts.Plan(),
        optimizer=torch.optim.SGD,
        loss_fn=token_loss,
    )
    with pytest.raises(ValueError, match=r"the model returned \(4, 40\) for tokens of shape \(4, 5\)"):
        pooled.generate(PROMPTS, max_new_tokens=1)


def test_what_cannot_generate_is_told(ranks):
    ranks(1, _bad_calls)


def test_weights_from_files_generate(ranks, tmp_path):
    directory = pretrained_models.write("llama", tmp_path / "in")
    expected = pretrained_models.llama().from_pretrained(directory).generate(PROMPTS, max_new_tokens=6, do_sample=False)
    assert all(torch.equal(found, expected) for found in ranks(2, _generate_from, directory))


def _generate_from(directory: Path) -> torch.Tensor:
    engine = ts.parallelize(ts.from_pretrained(directory), ts.Plan(tp=2), optimizer=torch.optim.SGD, loss_fn=token_loss)
    return engine.generate(PROMPTS, max_new_tokens=6)
