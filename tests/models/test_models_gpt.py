import math

import pytest
import torch
from torch.nn import functional as F

from tensorshard.data import StdlibText
from tensorshard.models import GPT, next_token_loss


def tiny_gpt(**options) -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=50, context_length=16, num_layers=2, num_heads=4, width=32, **options)


def test_logits_have_one_row_of_the_vocabulary_a_token():
    tokens = torch.randint(50, (3, 10))
    assert tiny_gpt()(tokens).shape == (3, 10, 50)


def test_a_logit_depends_on_no_later_token():
    model = tiny_gpt()
    tokens = torch.randint(50, (2, 16))
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 50
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_a_logit_depends_on_earlier_tokens_and_on_their_places():
    model = tiny_gpt()
    tokens = torch.tensor([[1, 2, 3, 4]])
    last = model(tokens)[:, -1]
    assert not torch.allclose(last, model(torch.tensor([[9, 2, 3, 4]]))[:, -1])
    assert not torch.allclose(last, model(torch.tensor([[2, 1, 3, 4]]))[:, -1])


def test_initial_weights_have_gpt2s_spread():
    torch.manual_seed(0)
    model = GPT(vocab_size=1000, context_length=128, num_layers=8, num_heads=4, width=256)
    block = model.blocks[0]
    for weight in (
        model.embedding.weight,
        model.head.weight,
        block.attention.query.weight,
        block.mlp.up.weight,
    ):
        assert weight.std().item() == pytest.approx(0.02, rel=0.03)
    for weight in (block.attention.output.weight, block.mlp.down.weight):
        assert weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.03)
    assert block.mlp.up.bias.count_nonzero() == 0
    assert torch.equal(block.mlp_norm.weight, torch.ones(256))


def test_the_first_loss_is_that_of_a_uniform_guess():
    tokens = torch.randint(50, (4, 16))
    total, count = next_token_loss(tiny_gpt()(tokens), tokens)
    assert (total / count).item() == pytest.approx(math.log(50), rel=0.02)


def test_tied_embeddings_are_one_parameter():
    model = tiny_gpt(tie_embeddings=True)
    assert model.head.weight is model.embedding.weight
    untied = tiny_gpt()
    assert untied.head.weight is not untied.embedding.weight
    extra = sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in model.parameters())
    assert extra == 50 * 32


def test_without_bias_there_is_none_anywhere():
    assert not [name for name, _ in tiny_gpt(bias=False).named_parameters() if name.endswith("bias")]


@pytest.mark.parametrize("options", [{}, {"tie_embeddings": True}, {"bias": False}])
def test_every_parameter_gets_a_gradient(options):
    model = tiny_gpt(**options)
    tokens = torch.randint(50, (2, 16))
    total, count = next_token_loss(model(tokens), tokens)
    (total / count).backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or p.grad.count_nonzero() == 0]
    assert without == []


def test_dropout_acts_in_training_alone():
    model = tiny_gpt(dropout=0.5)
    tokens = torch.randint(50, (2, 16))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_attention_is_softmax_of_scaled_products():
    attention = tiny_gpt().blocks[0].attention
    x = torch.randn(2, 5, 32)

    def heads(projection):
        return projection(x).reshape(2, 5, 4, 8).transpose(1, 2)

    scores = heads(attention.query) @ heads(attention.key).transpose(2, 3) / math.sqrt(8)
    scores.masked_fill_(torch.ones(5, 5).triu(1).bool(), -math.inf)
    mixed = (F.softmax(scores, -1) @ heads(attention.value)).transpose(1, 2).reshape(2, 5, 32)
    torch.testing.assert_close(attention(x), attention.output(mixed))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 3}, "width 32 does not divide into 3 heads"),
        ({"num_heads": 0}, "num_heads is 0; expected at least 1"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"dropout": 1.0}, r"dropout is 1.0; expected 0 or more and less than 1"),
    ],
)
def test_sizes_that_cannot_be_are_refused(change, message):
    sizes = {"vocab_size": 50, "context_length": 16, "num_layers": 2, "num_heads": 4, "width": 32}
    with pytest.raises(ValueError, match=message):
        GPT(**{**sizes, **change})


def test_input_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="17 long; this model was built for a context_length of at most 16"):
        tiny_gpt()(torch.zeros(1, 17, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"shape \[5\]; expected \[batch, time\]"):
        tiny_gpt()(torch.zeros(5, dtype=torch.int64))


def test_it_learns_the_standard_librarys_text():
    torch.manual_seed(0)
    model = GPT(vocab_size=256, context_length=32, num_layers=1, num_heads=2, width=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    text = StdlibText("train", context_length=32)
    losses = []
    for step in range(60):
        windows = [text[(16 * step + i) * 97 % len(text)] for i in range(16)]
        tokens, targets = (torch.stack(parts) for parts in zip(*windows, strict=True))
        total, count = next_token_loss(model(tokens), targets)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        losses.append((total / count).item())
    assert losses[0] == pytest.approx(math.log(256), rel=0.02)
    assert sum(losses[-10:]) / 10 < 3.2
