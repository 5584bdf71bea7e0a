import pytest
import torch

from tensorshard.models import Bert, masked_token_loss

SIZES = {"vocab_size": 60, "context_length": 16, "num_layers": 2, "num_heads": 4, "width": 32}


def tiny_bert(**options) -> Bert:
    torch.manual_seed(0)
    return Bert(**{**SIZES, "dropout": 0.0, **options})


def test_logits_have_one_row_of_the_vocabulary_a_token():
    assert tiny_bert()(torch.randint(60, (3, 10))).shape == (3, 10, 60)


def test_a_logit_depends_on_earlier_and_later_tokens():
    model = tiny_bert()
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    middle = model(tokens)[:, 2]
    assert not torch.allclose(middle, model(torch.tensor([[9, 2, 3, 4, 5]]))[:, 2])
    assert not torch.allclose(middle, model(torch.tensor([[1, 2, 3, 4, 9]]))[:, 2])


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32])
def test_padding_changes_nothing(mask_dtype):
    model = tiny_bert()
    tokens = torch.randint(60, (2, 6))
    padded = torch.cat([tokens, torch.randint(60, (2, 4))], dim=1)
    mask = (torch.arange(10) < 6).expand(2, 10).to(mask_dtype)
    torch.testing.assert_close(model(padded, mask)[:, :6], model(tokens))
    assert not torch.allclose(model(padded)[:, :6], model(tokens))


def test_a_padding_token_makes_the_mask():
    model = tiny_bert(padding_token=0)
    tokens = torch.randint(1, 60, (2, 6))
    padded = torch.cat([tokens, torch.zeros(2, 4, dtype=torch.int64)], dim=1)
    torch.testing.assert_close(model(padded)[:, :6], model(tokens))
    everything = torch.ones_like(padded)
    assert not torch.allclose(model(padded, everything)[:, :6], model(tokens))


def test_token_types_are_read_and_default_to_the_first():
    model = tiny_bert()
    tokens = torch.randint(60, (2, 6))
    first = torch.zeros_like(tokens)
    torch.testing.assert_close(model(tokens), model(tokens, token_types=first))
    assert not torch.allclose(model(tokens), model(tokens, token_types=first + 1))


def test_the_decoder_shares_the_embeddings_weight_and_has_its_own_bias():
    model = tiny_bert()
    assert model.head.decoder.weight is model.embeddings.tokens.weight
    assert model.head.decoder.bias.shape == (60,)
    names = [name for name, _ in model.named_parameters()]
    assert "embeddings.tokens.weight" in names
    assert "head.decoder.weight" not in names


def test_initial_weights_have_berts_spread():
    torch.manual_seed(0)
    model = Bert(vocab_size=1000, context_length=64, num_layers=1, num_heads=4, width=128)
    for weight in (model.embeddings.tokens.weight, model.blocks[0].mlp.up.weight, model.head.dense.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert model.head.decoder.bias.count_nonzero() == 0


def test_every_parameter_gets_a_gradient_from_the_masked_tokens():
    model = tiny_bert()
    tokens = torch.randint(60, (4, 16))
    targets = torch.full_like(tokens, -100)
    targets[:, ::5] = tokens[:, ::5]
    types = torch.arange(16).expand(4, 16) // 8
    total, count = masked_token_loss(model(tokens, token_types=types), targets)
    assert count == 4 * 4
    (total / count).backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or p.grad.count_nonzero() == 0]
    # A softmax is blind to what all keys have in common: the key's bias gets rounding errors, or exact zeros.
    assert [name for name in without if not name.endswith("key.bias")] == []


def test_dropout_acts_in_training_alone():
    model = tiny_bert(dropout=0.5)
    tokens = torch.randint(60, (2, 16))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 5}, "width 32 does not divide into 5 heads"),
        ({"num_token_types": 0}, "num_token_types is 0; expected at least 1"),
        ({"padding_token": 60}, "padding_token is 60; expected 0 to 59, or None"),
        ({"dropout": -0.1}, "dropout is -0.1"),
    ],
)
def test_sizes_that_cannot_be_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Bert(**{**SIZES, **change})


def test_input_that_does_not_fit_is_refused():
    model = tiny_bert()
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    with pytest.raises(ValueError, match="17 long; this model was built for a context_length of at most 16"):
        model(torch.zeros(1, 17, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"attention_mask has the shape \[2, 7\]; expected that .* \[2, 8\]"):
        model(tokens, torch.ones(2, 7))
    with pytest.raises(ValueError, match=r"token_types has the shape \[8\]"):
        model(tokens, token_types=torch.zeros(8, dtype=torch.int64))


def test_a_row_of_padding_alone_gives_no_nan():
    model = tiny_bert()
    tokens = torch.randint(60, (2, 8))
    mask = torch.ones_like(tokens)
    mask[0] = 0
    logits = model(tokens, mask)
    logits.sum().backward()
    assert logits.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters())
