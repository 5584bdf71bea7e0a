"""When logits are not held, what users who look at them all the same get, and what the summary says of it."""

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import parity
import tensorshard as ts
from tensorshard.loss.logits import output_layers
from tensorshard.loss.logits.deferred_logits import DeferredLogits
from tensorshard.models import GPT, next_token_loss

ADAMW = partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)
LARGE = 64  # classes


def _large() -> Any:
    """Under "auto" logits of the models here count as large."""
    return mock.patch.multiple(output_layers, FEWEST_CLASSES=LARGE, SMALLEST_BYTES=1, SMALLEST_SHARE=0.0)


class _Net(nn.Module):
    """Blocks between an embedding and a layer that shares its weight, after one more linear layer."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(LARGE, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(2))
        self.before = nn.Linear(width, LARGE + 6)
        self.after = nn.Linear(LARGE + 6, width)
        self.classify = nn.Linear(width, LARGE, bias=False)
        self.classify.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.classify(x + self.after(self.before(x).relu()))


class _Transposed(_Net):
    """Its last layer is a ``Conv1D`` of transformers."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        self.classify = Conv1D(LARGE, 16)


class _FrozenBelow(_Net):
    """Nothing that its last layer is given takes a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.classify = nn.Linear(16, LARGE)


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, LARGE, (4, 9), generator=torch.Generator().manual_seed(step))
    return tokens, tokens.roll(1, 1)


def _flat_loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


def _entropy_loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    probabilities = output.softmax(-1)
    return _flat_loss(output, targets) - 0.1 * (probabilities * output.log_softmax(-1)).sum(-1).mean()


def _steps(loss_fn: Any, count: int = 3, build: Any = _Net, **fields: Any) -> tuple[list[float], ts.Engine]:
    torch.manual_seed(0)
    engine = ts.parallelize(build, ts.Plan(**fields), optimizer=ADAMW, loss_fn=loss_fn)
    losses = [engine.step(*_batch(step)).item() for step in range(count)]
    return [*losses, engine.evaluate(*_batch(0)).item()], engine


def _said(engine: ts.Engine, layer: str) -> str:
    (sentence,) = [line for line in str(engine.summary().logits).splitlines() if f" {layer}: " in line]
    return sentence.split(f"{layer}: ")[1]


def _small_logits_are_computed_and_nothing_is_in_the_way() -> None:
    seen: list[type] = []

    def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append(type(output))
        return _flat_loss(output, targets)

    _, engine = _steps(loss)
    assert set(seen) == {torch.Tensor}
    said = "logits         whole: no linear layer outside of the model's blocks has 8,192 outputs or more"
    assert said in engine.summary().describe().splitlines()
    with mock.patch.object(output_layers, "FEWEST_CLASSES", LARGE):
        _, engine = _steps(loss)
    assert set(seen) == {torch.Tensor}
    assert _said(engine, "classify") == "whole (36 x 64 logits of 0.0 MB): tiled from 34 MB on"


def test_small_logits_are_computed_and_nothing_is_in_the_way(ranks):
    ranks(1, _small_logits_are_computed_and_nothing_is_in_the_way)


def _auto_takes_tiles_where_they_are_large_and_leaves_other_layers_alone() -> None:
    with _large():
        expected, whole = _steps(_flat_loss, logits="whole")
        found, engine = _steps(_flat_loss)
        assert found == pytest.approx(expected, rel=1e-6)
        assert whole.summary().logits is None
        assert _said(engine, "classify").startswith("tiled (36 x 64 logits of")
        assert "relu needs them, and no loss that takes tiles does" in _said(engine, "before")
        for name, value in whole.full_state_dict().items():
            torch.testing.assert_close(engine.full_state_dict()[name], value, rtol=1e-5, atol=1e-6)


def test_auto_takes_tiles_where_they_are_large_and_leaves_other_layers_alone(ranks):
    ranks(1, _auto_takes_tiles_where_they_are_large_and_leaves_other_layers_alone)


def _a_loss_that_needs_them_gets_them_and_from_then_on_at_once() -> None:
    with _large():
        expected, _ = _steps(_entropy_loss, logits="whole")
        seen: list[bool] = []

        def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            seen.append(isinstance(output, DeferredLogits))
            return _entropy_loss(output, targets)

        found, engine = _steps(loss)
        assert found == pytest.approx(expected, rel=1e-6)
        assert seen == [True, False, False, False]
        assert "softmax needs them" in _said(engine, "classify")
        found, engine = _steps(_entropy_loss, logits="tiled")
        assert found == pytest.approx(expected, rel=1e-6)


def test_a_loss_that_needs_them_gets_them_and_from_then_on_at_once(ranks):
    ranks(1, _a_loss_that_needs_them_gets_them_and_from_then_on_at_once)


def _who_keeps_them_has_their_values_after_the_update() -> None:
    kept: dict[str, list[torch.Tensor]] = {"whole": [], "tiled": []}

    def loss(mode: str, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        kept[mode].append(output[:, -1])
        return _flat_loss(output, targets)

    expected, _ = _steps(partial(loss, "whole"), logits="whole")
    found, engine = _steps(partial(loss, "tiled"), logits="tiled")
    assert found == pytest.approx(expected, rel=1e-6)
    for ours, wanted in zip(kept["tiled"], kept["whole"], strict=True):
        torch.testing.assert_close(ours + 0, wanted)
    assert "computed for something that kept them after the loss all the same" in _said(engine, "classify")


def test_who_keeps_them_has_their_values_after_the_update(ranks):
    ranks(1, _who_keeps_them_has_their_values_after_the_update)


class _WithLabels(nn.Module):
    """A model of transformers that is given labels, and computes its loss itself."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = parity.build(kind)

    def forward(self, **inputs: torch.Tensor) -> Any:
        return self.inner(**inputs)


def _labels_loss(output: Any, targets: Any) -> Any:
    return output.loss


def _train_with_labels(kind: str, fields: dict[str, Any]) -> tuple[list[float], str | None]:
    engine = ts.parallelize(partial(_WithLabels, kind), ts.Plan(**fields), optimizer=parity.ADAMW, loss_fn=_labels_loss)
    losses = []
    for step in range(3):
        inputs, targets = parity.shard(engine, *parity.batch(kind, step))
        losses.append(engine.step({**inputs, "labels": inputs["input_ids"].contiguous()}, targets).item())
    losses.append(engine.evaluate({**inputs, "labels": inputs["input_ids"].contiguous()}, targets).item())
    return losses, engine.summary().logits


@pytest.mark.parametrize(
    "kind", [pytest.param("llama", marks=pytest.mark.slow), pytest.param("gpt2", marks=pytest.mark.slow), "hf_bert"]
)
def test_losses_of_transformers_take_tiles(ranks, kind):
    [(expected, _)] = ranks(1, _train_with_labels, kind, {"logits": "whole"})
    for losses, said in ranks(2, _train_with_labels, kind, {"logits": "tiled", "zero": 3}):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert said is not None and said.splitlines()[-1].endswith("are not held)")


def _the_same_by_another_layer(build: Any, fields: dict[str, Any]) -> None:
    expected, whole = _steps(_flat_loss, build=build, logits="whole", **fields)
    found, engine = _steps(_flat_loss, build=build, logits="tiled", **fields)
    assert found == pytest.approx(expected, rel=1e-6)
    assert "are not held" in _said(engine, "classify")
    weights, wanted = engine.full_state_dict(), whole.full_state_dict()
    assert all(torch.allclose(weights[name], value, rtol=1e-5, atol=1e-6) for name, value in wanted.items())


@pytest.mark.parametrize(
    ("build", "fields"), [(_Transposed, {"zero": 3}), (_FrozenBelow, {"zero": 0})], ids=["Conv1D", "frozen below"]
)
def test_the_same_by_another_layer(ranks, build, fields):
    ranks(2, _the_same_by_another_layer, build, fields)


def _in_bf16_losses_are_those_of_whole_logits_within_rounding() -> None:
    exact, _ = _steps(_flat_loss, logits="whole")
    expected, _ = _steps(_flat_loss, logits="whole", precision="bf16")
    found, engine = _steps(_flat_loss, logits="tiled", precision="bf16")
    assert found == pytest.approx(expected, rel=2e-3) and found == pytest.approx(exact, rel=2e-2)
    assert "are not held" in _said(engine, "classify")


def test_in_bf16_losses_are_those_of_whole_logits_within_rounding(ranks):
    ranks(1, _in_bf16_losses_are_those_of_whole_logits_within_rounding)


def _compiled_blocks_beside_tiles() -> None:
    expected, _ = _steps(_flat_loss, logits="whole", count=1)
    found, engine = _steps(_flat_loss, logits="tiled", compile=True, count=1)
    assert found == pytest.approx(expected, rel=1e-5)
    assert "are not held" in _said(engine, "classify")


@pytest.mark.slow
def test_compiled_blocks_beside_tiles(ranks):
    ranks(1, _compiled_blocks_beside_tiles)


def _a_model_that_is_compiled_as_a_whole_keeps_its_logits() -> None:
    torch.manual_seed(0)
    plan = ts.Plan(compile=True, logits="tiled")
    engine = ts.parallelize(partial(nn.Linear, 6, LARGE), plan, optimizer=ADAMW, loss_fn=F.cross_entropy)
    assert "whole: no linear layer outside of the model's blocks" in str(engine.summary().logits)


def test_a_model_that_is_compiled_as_a_whole_keeps_its_logits(ranks):
    ranks(1, _a_model_that_is_compiled_as_a_whole_keeps_its_logits)


def test_layers_gathered_for_themselves_alone_keep_their_logits(ranks):
    def_fields = {"zero": 3, "shard_units": ["head", "blocks.*"], "logits": "tiled"}
    said = ranks(2, _said_of_gpt, def_fields)
    assert all("whole: shard_units has its parameters gathered for its own forward alone" in each for each in said)


def _said_of_gpt(fields: dict[str, Any]) -> str | None:
    engine = parity.make_engine("gpt", fields)
    engine.step(*parity.shard(engine, *parity.batch("gpt", 0)))
    return engine.summary().logits


def _an_estimate_sees_that_they_are_not_held() -> None:
    dist.destroy_process_group()  # a process of the tests' pool has a world of its own
    tokens = torch.zeros(8, 128, dtype=torch.long)
    peaks = {}
    for mode in ("whole", "tiled"):
        estimate = ts.estimate(
            partial(GPT, 20_000, 128, 2, 2, 16),
            ts.Plan(logits=mode),
            world_size=2,
            inputs=tokens,
            targets=tokens,
            optimizer=ADAMW,
            loss_fn=next_token_loss,
            device="cpu",  # whose tiles are small
        )
        peaks[mode] = estimate.ranks[0].peak_allocated
    logits = 8 * 128 * 20_000 * 4
    assert peaks["whole"] - peaks["tiled"] > 1.5 * logits


@pytest.mark.slow
def test_an_estimate_sees_that_they_are_not_held(ranks):
    ranks(1, _an_estimate_sees_that_they_are_not_held)
