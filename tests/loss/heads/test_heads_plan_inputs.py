"""Models with heads under plans: what they may take, what a head may be asked, and what is refused on every rank."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

import parity
import tensorshard as ts
from head_models import BertWithHead, classifier_batch, given_loss
from rank_pool import RankError
from tensorshard.models import Bert
from tensorshard.nn import ArcFace, ParallelLinearCrossEntropy

# -- models that take more than an input and targets --


class _Masked(Bert):
    """Cannot do without a mask, which stands where the targets might be expected."""

    def forward(self, tokens: torch.Tensor, attention_mask: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return BertWithHead.forward(self, tokens, targets, attention_mask)  # type: ignore[arg-type]


class _Packed(_Masked):
    """Cannot be guessed."""

    def forward(self, packed: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(packed["tokens"], packed["attention_mask"], targets)


def _masked(kind: type[nn.Module], fields: dict[str, Any], sampled: bool) -> list[float]:
    model = parity.build("bert_head")
    model.__class__ = kind

    def given(step: int) -> tuple[Any, torch.Tensor]:
        inputs, targets = parity.batch("bert_head", step)
        if kind is _Packed:
            return {"packed": {k: v for k, v in inputs.items() if k != "targets"}, "targets": targets}, targets
        return inputs, targets

    engine = ts.parallelize(
        model,
        ts.Plan(**fields),
        optimizer=parity.ADAMW,
        loss_fn=parity.loss_function("bert_head"),
        sample_inputs=tree_map(lambda tensor: tensor[:2, :5], given(9)[0]) if sampled else None,
    )
    return [engine.step(*parity.shard(engine, *given(step))).item() for step in range(3)]


@pytest.mark.parametrize("fields", [dict(tp=2), pytest.param(dict(pp=2, micro_batches=2), marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kind", "sampled"), [(_Masked, False), (_Masked, True), (_Packed, True)])
def test_a_mask_between_input_and_targets(ranks, kind, sampled, fields):
    expected = parity.reference("bert", steps=3)["losses"]
    torch.testing.assert_close(ranks(2, _masked, kind, fields, sampled)[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fields", [dict(tp=2), dict(pp=2, micro_batches=2)])
def test_inputs_that_cannot_be_guessed(ranks, fields):
    with pytest.raises(RankError, match=r"(?s)rank 0.*give parallelize\(sample.*rank 1.*give parallelize\(sample"):
        ranks(2, _masked, _Packed, fields, False)


# -- several heads, and what a head is asked beside its loss --


class _Blocks(nn.Module):
    """A head of 37 classes behind four blocks, and another behind two."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(4))
        self.middle = ParallelLinearCrossEntropy(8, 37, **options)
        self.head = ParallelLinearCrossEntropy(8, 37, **options)

    def forward(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        x = self.inner(x)
        early = x = self.blocks[1](self.blocks[0](x))
        for block in self.blocks[2:]:
            x = x + block(x)
        if targets is None:
            return self.head.topk(x, 3)[1]
        return self.head(x, targets) + 0.3 * self.middle(early, targets)


class _Chosen(_Blocks):
    """The same, the choice between loss and largest logits in a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.last = _Choice(self.head, self.middle)
        del self.head, self.middle

    def forward(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        x = self.inner(x)
        early = x = self.blocks[1](self.blocks[0](x))
        for block in self.blocks[2:]:
            x = x + block(x)
        return self.last(x, early, targets)


class _Choice(nn.Module):
    def __init__(self, head: nn.Module, middle: nn.Module) -> None:
        super().__init__()
        self.head, self.middle = head, middle

    def forward(self, x: torch.Tensor, early: torch.Tensor, targets: torch.Tensor | None) -> Any:
        if targets is None:
            return self.head.topk(x, 3)[1]
        return self.head(x, targets) + 0.3 * self.middle(early, targets)


def _plain_blocks() -> tuple[list[float], list[list[int]]]:
    model = _blocks()
    optimizer = parity.ADAMW(model.parameters())
    inputs, targets = classifier_batch()
    linear, loss = nn.functional.linear, nn.functional.cross_entropy
    losses = []
    for step in range(4):
        x = model.inner(inputs)
        early = x = model.blocks[1](model.blocks[0](x))
        for block in model.blocks[2:]:
            x = x + block(x)
        logits = linear(x, model.head.weight)
        if step == 3:
            break
        total = loss(logits, targets) + 0.3 * loss(linear(early, model.middle.weight), targets)
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    top = logits.topk(3).indices
    return losses, top.tolist()


def _blocks(kind: type[nn.Module] = _Blocks) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def _two_heads(fields: dict[str, Any], kind: type[nn.Module] = _Blocks) -> tuple[list[float], list[list[int]] | str]:
    engine = ts.parallelize(_blocks(kind), ts.Plan(**fields), optimizer=parity.ADAMW, loss_fn=given_loss)
    inputs, targets = classifier_batch()
    losses = [engine.step(*parity.shard(engine, (inputs, targets), targets)).item() for _ in range(3)]
    try:
        return losses, engine.predict(inputs).tolist()
    except ValueError as error:
        return losses, str(error)


NAMED = dict(shard_units=["blocks.*", "head", "middle"])


@pytest.mark.fast_cases("{'tp': 2}", "{'zero': 3}")
@pytest.mark.parametrize(
    "fields", [dict(tp=2), dict(zero=1, **NAMED), dict(zero=2), dict(zero=3), dict(zero=3, **NAMED)], ids=str
)
def test_two_heads_and_their_largest_logits(ranks, fields):
    losses, top = _plain_blocks()
    for found in ranks(2, _two_heads, fields):
        torch.testing.assert_close(found[0], losses, rtol=1e-5, atol=1e-5)
        assert found[1] == top


@pytest.mark.slow
def test_two_heads_in_a_pipeline(ranks):
    for losses, refusal in ranks(2, _two_heads, dict(pp=2, micro_batches=2)):
        torch.testing.assert_close(losses, _plain_blocks()[0], rtol=1e-5, atol=1e-5)
        assert "calls other units than with the sample inputs" in refusal  # topk is not the head's forward
    for found in ranks(2, _two_heads, dict(pp=2, micro_batches=2, pp_units=["last"]), _Chosen):
        torch.testing.assert_close(found[0], _plain_blocks()[0], rtol=1e-5, atol=1e-5)
        assert found[1] == _plain_blocks()[1]


def _asked_directly(fields: dict[str, Any]) -> list[Any]:
    """What heads say when they are asked between steps."""
    engine = ts.parallelize(_blocks(), ts.Plan(**fields), optimizer=parity.ADAMW, loss_fn=given_loss)
    inputs, targets = classifier_batch()
    engine.step(*parity.shard(engine, (inputs, targets), targets))
    features = torch.randn(8, 8, generator=torch.Generator().manual_seed(7))
    head = engine.model.head
    found: list[Any] = []
    for ask in (partial(head.topk, k=3), partial(head.accuracy, targets=targets), partial(head, targets=targets)):
        try:
            with torch.no_grad():
                found.append(tree_map(torch.Tensor.tolist, ask(features)))
        except RuntimeError as error:
            found.append(str(error))
    return found


@pytest.mark.slow
def test_a_head_does_not_compute_with_a_shard(ranks):
    """A head that is asked outside of a forward computes with the whole weight."""
    whole = ranks(1, _asked_directly, dict())[0]
    for found in ranks(2, _asked_directly, dict(tp=2)):
        torch.testing.assert_close(found, whole)
    for fields in (dict(zero=1), dict(zero=2, **NAMED), dict(zero=3, **NAMED), dict(zero=3)):
        for found in ranks(2, _asked_directly, fields):
            torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5)


WEIGHTS = torch.linspace(0.1, 3.0, 37)


def _weighted(fields: dict[str, Any]) -> list[float]:
    torch.manual_seed(0)
    engine = ts.parallelize(
        _Classifier(class_weight=WEIGHTS, reduction="sum"),
        ts.Plan(**fields),
        optimizer=parity.ADAMW,
        loss_fn=lambda total, targets: (total, WEIGHTS[targets].sum()),
    )
    inputs, targets = classifier_batch()
    return [engine.step(*parity.shard(engine, (inputs, targets), targets)).item() for _ in range(3)]


def test_class_weights_as_documented(ranks):
    """A mean over the weights of a part of the batch is not one over those of all: sums and counts are exact."""
    torch.manual_seed(0)
    model = _Classifier()
    optimizer, (inputs, targets) = parity.ADAMW(model.parameters()), classifier_batch()
    losses = []
    for _ in range(3):
        logits = nn.functional.linear(model.body(inputs), model.head.weight)
        loss = nn.functional.cross_entropy(logits, targets, WEIGHTS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for fields in (dict(tp=2), dict(zero=3, micro_batches=2), dict(pp=2, micro_batches=4)):
        torch.testing.assert_close(ranks(2, _weighted, fields)[0], losses, rtol=1e-5, atol=1e-5)


# -- bad inputs --


class _Classifier(nn.Module):
    def __init__(self, classes: int = 37, **options: Any) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))
        self.head = ParallelLinearCrossEntropy(8, classes, **options)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x), targets)


def _asked(model: Callable[[], nn.Module], fields: dict[str, Any], change: str) -> None:
    engine = ts.parallelize(model, ts.Plan(**fields), optimizer=parity.ADAMW, loss_fn=given_loss)
    inputs, targets = classifier_batch()
    if change == "no targets":
        engine.predict(inputs)
    targets = {"float": targets.float(), "outside": targets + 37}.get(change, targets)
    engine.step(*parity.shard(engine, (inputs, targets), targets))


_with = partial(partial, _Classifier)
BAD_INPUTS: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "no targets": (_Classifier, "no targets", r"forward\(\) missing 1 required positional argument: 'targets'"),
    "outside": (_Classifier, "outside", r"target \d+, number 0 of \d, is outside the 37 classes: use 0 to 36"),
    "float": (_Classifier, "float", r"targets of type torch.float32 were given: give class numbers, as integers"),
    "reduction": (
        _with(reduction="none"),
        "",
        r"loss_fn returned a tensor of shape \(\d,\); it must return a",
    ),
    "grad_scale": (
        _with(grad_scale=2.0),
        "",
        "module 'head' .* built with grad_scale=2.0, which undoes an average",
    ),
    "margin": (_with(margin=ArcFace(), bias=True), "", r"a bias was given with ArcFace\(margin=0.5\)"),
    "class_weight": (
        _with(class_weight=torch.ones(36)),
        "",
        r"class_weight \[36\] was given for 37 classes",
    ),
    "gather": (
        _with(gather_inputs=True),
        "",
        "gather_inputs=True gathers over the ranks that hold the classes",
    ),
}


@pytest.mark.parametrize("fields", [dict(tp=2), pytest.param(dict(zero=3), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_inputs_on_every_rank(ranks, case, fields):
    model, change, message = BAD_INPUTS[case]
    with pytest.raises(RankError, match=f"(?s)rank 0.*{message}.*rank 1.*{message}"):
        ranks(2, _asked, model, fields, change)


def _one_class() -> list[float]:
    engine = ts.parallelize(partial(_Classifier, classes=1), ts.Plan(tp=2), optimizer=parity.ADAMW, loss_fn=given_loss)
    inputs, targets = classifier_batch()
    return [engine.step((inputs, targets * 0), targets * 0).item() for _ in range(2)]


def test_fewer_classes_than_ranks(ranks):
    assert ranks(2, _one_class) == [[0.0, 0.0]] * 2
