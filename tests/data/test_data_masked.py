import numpy as np
import pytest
import torch

from tensorshard.data import MaskedTokens, TokenDataset

MASK = 100


def windows(context_length: int = 40, tokens: int = 4001) -> TokenDataset:
    return TokenDataset(np.random.default_rng(0).integers(MASK, size=tokens), context_length)


def test_targets_are_the_masked_tokens_alone():
    dataset = windows()
    masked = MaskedTokens(dataset, vocab_size=101, mask_token=MASK)
    for index in range(20):
        original = dataset[index][0]
        tokens, targets = masked[index]
        predicted = targets != -100
        assert tokens.dtype == targets.dtype == torch.int64
        assert predicted.sum() == 6  # 15% of 40
        assert torch.equal(targets[predicted], original[predicted])
        assert torch.equal(tokens[~predicted], original[~predicted])


def test_of_the_masked_80_percent_show_the_mask_10_a_random_token_10_themselves():
    dataset = windows()
    tokens, targets = (
        torch.cat(part) for part in zip(*MaskedTokens(dataset, vocab_size=101, mask_token=MASK), strict=True)
    )
    predicted = targets != -100
    shown, original = tokens[predicted], targets[predicted]
    assert len(shown) == 6 * 100 * 10
    as_mask, as_itself = (shown == MASK).float().mean(), (shown == original).float().mean()
    assert as_mask.item() == pytest.approx(0.80, abs=0.02)
    assert as_itself.item() == pytest.approx(0.10, abs=0.02)
    replaced = shown[(shown != MASK) & (shown != original)]
    assert len(replaced.unique()) > 90


def test_masks_are_a_function_of_seed_and_index():
    dataset = windows()
    first, again = (MaskedTokens(dataset, vocab_size=101, mask_token=MASK, seed=3) for _ in range(2))
    other = MaskedTokens(dataset, vocab_size=101, mask_token=MASK, seed=4)
    assert torch.equal(first[5][0], again[5][0])
    assert not torch.equal(first[5][1], other[5][1])


def test_copies_of_a_window_have_other_masks():
    dataset = windows()
    masked = MaskedTokens(dataset, vocab_size=101, mask_token=MASK, copies=3)
    assert len(masked) == 3 * len(dataset)
    original = dataset[2][0]
    places = []
    for copy in range(3):
        targets = masked[2 + copy * len(dataset)][1]
        places.append(targets != -100)
        assert torch.equal(targets[places[-1]], original[places[-1]])
    assert not torch.equal(places[0], places[1])
    assert not torch.equal(places[1], places[2])


def test_at_least_one_token_is_masked():
    targets = MaskedTokens(windows(3), vocab_size=101, mask_token=MASK)[0][1]
    assert (targets != -100).sum() == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 100}, "mask_token is 100, outside a vocab_size of 100; .* needs a vocab_size of 101"),
        ({"mask_token": -1}, "mask_token is -1"),
        ({"copies": 0}, "copies is 0; expected at least 1"),
        ({"mask_probability": 0.0}, "mask_probability is 0.0; expected more than 0 and at most 1"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_options_that_cannot_be_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        MaskedTokens(windows(), **{"vocab_size": 101, "mask_token": MASK, **change})


def test_an_index_outside_is_an_index_error():
    masked = MaskedTokens(windows(), vocab_size=101, mask_token=MASK, copies=2)
    for index in (-1, 200):
        with pytest.raises(IndexError, match=f"Window {index} of a dataset of 200"):
            masked[index]
