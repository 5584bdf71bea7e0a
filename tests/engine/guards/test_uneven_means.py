"""Means over padded targets: noticed in the first step, and exact by ``ts.model_loss``."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pretrained_models
import tensorshard as ts
from log_lines import logged
from pages import blocks

SGD = partial(torch.optim.SGD, lr=0.1)
CLASSES, LENGTH, SAMPLES = 7, 6, 8


def _batch(even: bool = False, dp_rank: int = 0, dp_size: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of one batch; its rows have different numbers of targets, unless `even`."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, LENGTH, 4, generator=generator)
    targets = torch.randint(CLASSES, (SAMPLES, LENGTH), generator=generator)
    kept = torch.full((SAMPLES,), 3) if even else torch.arange(SAMPLES) % 5 + 1
    targets[torch.arange(LENGTH) >= kept[:, None]] = -100
    return inputs.chunk(dp_size)[dp_rank], targets.chunk(dp_size)[dp_rank]


def _ignoring(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def _smoothed(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return 0.5 * F.cross_entropy(output.transpose(1, 2), targets, label_smoothing=0.1) + 0.01 * output.square().mean()


def _masked(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(output.transpose(1, 2), targets, reduction="none")
    return (losses * (targets != -100)).sum() / (targets != -100).sum()


def _picked(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.transpose(1, 2), targets, reduction="none")[targets != -100].mean()


def _counted(output: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return F.cross_entropy(output.transpose(1, 2), targets, reduction="sum"), (targets != -100).sum()


def _of_samples(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (output.square().sum() + _counted(output, targets)[0]) / len(targets)


NOTICED = [_ignoring, _smoothed, _masked, _picked]
EXACT = [_counted, _of_samples]


def _said(fields: dict[str, Any], by_hand: bool = False) -> dict[str, list[str]]:
    """What two steps with each loss say, on padded and on even batches."""
    said = {}
    for loss_fn in (*NOTICED, *EXACT):
        for even in (False, True):
            model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, CLASSES))
            engine = ts.parallelize(model, ts.Plan(**fields), optimizer=SGD, loss_fn=loss_fn)
            inputs, targets = _batch(even, engine.mesh.dp_rank, engine.mesh.dp_size)
            with logged() as lines:
                for _ in range(2):
                    if by_hand:
                        engine.backward(loss_fn(engine.model(inputs), targets))
                        engine.optimizer.step()
                        engine.optimizer.zero_grad()
                    else:
                        engine.step(inputs, targets)
            said[f"{loss_fn.__name__} {even}"] = [line for line in lines if "is a mean over" in line]
    return said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "fields", "by_hand", "counts"),
    [
        (2, dict(), False, "(10, 11)"),
        (1, dict(micro_batches=4), False, "(3, 7, 6, 5)"),
        (2, dict(pp=2, micro_batches=4), False, "(3, 7, 6, 5)"),
        (2, dict(zero=2), True, "(10, 11)"),
        (1, dict(), False, None),
    ],
    ids=str,
)
def test_a_mean_over_different_numbers_of_targets_is_noticed_once(ranks, size, fields, by_hand, counts):
    found = ranks(size, _said, fields, by_hand)
    for what, lines in found[0].items():
        if counts is None or what.endswith("True") or what.split()[0] in {loss.__name__ for loss in EXACT}:
            assert lines == [], what
        else:
            [line] = lines
            assert counts in line and "give (sum, count)" in line and "ts.model_loss" in line, what
            assert "weight[targets].sum()" in line
    assert not any(lines for others in found[1:] for lines in others.values())


# -- ts.model_loss --


def _bert() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    return BertForMaskedLM(
        BertConfig(vocab_size=64, **sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    )


MODELS = {"llama": pretrained_models.llama, "bert": _bert}  # one shifts its labels, the other does not


def _labelled() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(64, (SAMPLES, 9), generator=torch.Generator().manual_seed(1))
    labels = tokens.where(torch.arange(9) < torch.arange(SAMPLES)[:, None] % 4 * 2, -100)
    labels[2:4] = -100  # a whole micro-batch without labels
    return tokens, labels


def _train(kind: str, fields: dict[str, Any]) -> tuple[list[float], list[str]]:
    torch.manual_seed(0)
    engine = ts.parallelize(MODELS[kind](), ts.Plan(**fields), optimizer=SGD, loss_fn=ts.model_loss)
    tokens, labels = (part.chunk(engine.mesh.dp_size)[engine.mesh.dp_rank] for part in _labelled())
    batch = {"input_ids": tokens, "labels": labels}
    with logged() as lines:
        losses = [engine.evaluate(batch, labels).item()]
        losses += [engine.step(batch, labels).item() for _ in range(3)]
    return losses, [line for line in lines if "is a mean over" in line]


@pytest.fixture(scope="module")
def alone():
    losses = {}
    for kind, build in MODELS.items():
        torch.manual_seed(0)
        model = build()
        optimizer = SGD(model.parameters())
        tokens, labels = _labelled()
        losses[kind] = []
        for _ in range(3):
            loss = model(input_ids=tokens, labels=labels).loss
            losses[kind].append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.fast_cases("llama-1-{'micro_batches': 4}")
@pytest.mark.parametrize(
    ("size", "fields"),
    [
        (1, dict(micro_batches=4)),
        (2, dict(micro_batches=2, recompute="full")),
        (2, dict(tp=2, micro_batches=4)),
        (2, dict(pp=2, micro_batches=4)),
        (2, dict(logits="tiled", micro_batches=2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", MODELS)
def test_the_loss_of_a_padded_batch_is_that_of_one_process(ranks, alone, kind, size, fields):
    losses, said = ranks(size, _train, kind, fields)[0]
    assert said == []
    torch.testing.assert_close(losses, [alone[kind][0], *alone[kind]], rtol=1e-5, atol=1e-5)


def _without_labels() -> str:
    engine = ts.parallelize(pretrained_models.llama(), ts.Plan(), optimizer=SGD, loss_fn=ts.model_loss)
    with pytest.raises(TypeError) as error:
        engine.step({"input_ids": _labelled()[0]}, _labelled()[1])
    return str(error.value)


def _train_two_means(fields: dict[str, Any]) -> tuple[list[float], torch.Tensor | None, list[str]]:
    """Losses and weights with the loss of docs/coupled-losses.md, and what is said meanwhile."""
    (page,) = (block.code for block in blocks("docs/coupled-losses.md") if "def loss_of_two_means" in block.code)
    names: dict[str, Any] = {"torch": torch, "F": F, "ts": ts}
    exec(page[: page.index("engine =")], names)
    engine = ts.parallelize(
        nn.Linear(4, CLASSES + 1), ts.Plan(**fields), optimizer=SGD, loss_fn=names["loss_of_two_means"], seed=0
    )
    names["group"] = engine.mesh.dp_group
    generator = torch.Generator().manual_seed(1)
    with logged() as said:
        losses = []
        for step in range(3):
            inputs, labels = _batch()
            boxes = torch.randn(SAMPLES, LENGTH, generator=generator)
            boxes[step : step + 3] = torch.nan
            mine = slice(engine.mesh.dp_rank, None, engine.mesh.dp_size)
            losses.append(float(engine.step(inputs[mine], (labels[mine], boxes[mine]))))
    return losses, engine.full_state_dict().get("weight"), said


@pytest.mark.parametrize("fields", [{}, {"zero": 3}, {"tp": 2}], ids=str)
def test_a_loss_of_two_means_as_the_page_writes_it(ranks, fields):
    ((expected, weight, _),) = ranks(1, _train_two_means, {})
    trained = ranks(2, _train_two_means, fields)
    torch.testing.assert_close(trained[0][1], weight)
    for losses, _, said in trained:
        assert losses == pytest.approx(expected, rel=1e-6)
        assert not said


def test_a_model_without_labels_is_told_of_them(ranks):
    assert "has no loss: give the model its labels among the inputs" in ranks(1, _without_labels)[0]
