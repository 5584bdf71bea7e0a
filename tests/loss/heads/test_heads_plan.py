"""Heads as a model's last layer under plans: what plain PyTorch makes of a linear layer and a loss, to 1e-5."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import parity
import tensorshard as ts
from head_models import classifier_batch, given_loss, gpt_with_head
from rank_pool import RankError
from tensorshard.models import GPT
from tensorshard.nn import ParallelLinearCrossEntropy

# id: (model, ranks, fields of the plan)
PLANS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "gpt-1-micro4": ("gpt", 1, dict(micro_batches=4)),
    "gpt-2-tp2": ("gpt", 2, dict(tp=2)),
    "gpt-2-zero3-full": ("gpt", 2, dict(zero=3, recompute="full")),
    "gpt-4-tp2-zero1-clip": ("gpt", 4, dict(tp=2, zero=1, clip_grad_norm=1.1)),
    "gpt-4-tp2-zero3-micro2": ("gpt", 4, dict(tp=2, zero=3, micro_batches=2)),
    "gpt-4-tp2-sequence": ("gpt", 4, dict(tp=2, sequence_parallel=True, zero=0)),
    "gpt-2x2-zero3": ("gpt", 4, dict(dp_replicate=2, zero=3, shard_units=["blocks.*", "head"])),
    "gpt-2-pp2": ("gpt", 2, dict(pp=2, micro_batches=2)),
    "gpt-4-pp2-tp2": ("gpt", 4, dict(pp=2, tp=2, micro_batches=2)),
    "gpt-4-pp2-zero1-clip": ("gpt", 4, dict(pp=2, dp_shard=2, zero=1, micro_batches=4, clip_grad_norm=1.1)),
    "tied-2-pp2": ("gpt_tied", 2, dict(pp=2, micro_batches=2)),
    "tied-4-tp2-zero2": ("gpt_tied", 4, dict(tp=2, zero=2, micro_batches=2)),
    "bert-2-zero2": ("bert", 2, dict(zero=2)),
    "bert-2-tp2": ("bert", 2, dict(tp=2)),
    "bert-4-tp2-zero3": ("bert", 4, dict(tp=2, zero=3)),
    "bert-2x2-zero3": ("bert", 4, dict(dp_replicate=2, dp_shard=2, zero=3)),
    "bert-2-pp2": ("bert", 2, dict(pp=2, micro_batches=2)),
    "bert-4-pp2-tp2": ("bert", 4, dict(pp=2, tp=2, micro_batches=2)),
    "resnet-2-tp2": ("resnet_37", 2, dict(tp=2)),
    "resnet-4-tp2-zero3-full": ("resnet_37", 4, dict(tp=2, zero=3, recompute="full")),
    "resnet-2-zero1-selective": ("resnet_37", 2, dict(zero=1, recompute="selective")),
}
# Of each model, level and axis one stays that is not slow.
STEPS = 8


@pytest.mark.fast_cases("gpt-2-zero3-full")
@pytest.mark.parametrize("case", PLANS)
def test_it_is_what_a_linear_layer_and_a_loss_are(ranks, case):
    kind, world_size, fields = PLANS[case]
    found = ranks(world_size, parity.train, f"{kind}_head", fields, STEPS)
    parity.assert_same(found[0], parity.reference(kind, fields.get("clip_grad_norm"), STEPS), 1e-5)
    for other in found[1:]:
        assert other["losses"] == found[0]["losses"]


def _train_wide(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    """As ``parity.train``, in fp64: over 4 data ranks, batch norms put rounding alone near 1e-5 in fp32."""
    model = parity.build(kind).double()
    engine = ts.parallelize(model, ts.Plan(**fields), optimizer=parity.ADAMW, loss_fn=parity.loss_function(kind))
    losses = []
    for step in range(STEPS):
        (images, classes), targets = parity.batch(f"{kind.removesuffix('_head')}_head", step)
        inputs = (images.double(), classes) if kind.endswith("_head") else images.double()
        losses.append(engine.step(*parity.shard(engine, inputs, targets)).item())
    return {"losses": losses, "state": engine.full_state_dict()}


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 3])
def test_resnet_under_hybrid_plans(ranks, zero):
    found = ranks(4, _train_wide, "resnet_37_head", dict(dp_replicate=2, dp_shard=2, zero=zero))
    parity.assert_same(found[0], ranks(1, _train_wide, "resnet_37", dict())[0], 1e-9)
    assert all(other["losses"] == found[0]["losses"] for other in found)


def _resnet_pipeline() -> dict[str, Any]:
    return parity.train("resnet_37_head", dict(pp=2, micro_batches=2), STEPS)


@pytest.mark.slow
def test_resnet_in_a_pipeline(ranks):
    expected = parity.reference("resnet_37", steps=STEPS, micro_batches=2)  # whose norms see micro-batches apart
    parity.assert_same(ranks(2, _resnet_pipeline)[0], expected, 1e-5)


def _of_a_callable(fields: dict[str, Any]) -> list[float]:
    """Norms of the initial weights; then losses, and sums of the weights after the steps."""
    engine = ts.parallelize(_Classifier, ts.Plan(**fields), optimizer=parity.ADAMW, loss_fn=given_loss, seed=3)
    initial = _norms(engine.full_state_dict())
    whole, targets = classifier_batch()
    inputs, part = parity.shard(engine, (whole, targets), targets)
    losses = [engine.step(inputs, part).item() for _ in range(4)]
    return [
        *initial,
        *losses,
        engine.evaluate(inputs, part).item(),
        *(v.sum().item() for v in engine.full_state_dict().values()),
    ]


def _norms(state: dict[str, torch.Tensor]) -> list[float]:
    return [value.double().norm().item() for value in state.values()]


class _Classifier(nn.Module):
    """A small network whose head has 37 classes, with some dropout before it."""

    def __init__(self, dropout: float = 0.0, **options: Any) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8), nn.Dropout(dropout))
        self.head = ParallelLinearCrossEntropy(8, 37, bias=not options, **options)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x), targets)


@pytest.mark.slow
def test_initial_weights_of_a_callable_do_not_depend_on_the_plan(ranks):
    """No rank holds all classes of what its constructor asked for, and the whole world is not a group of its own."""
    alone = ranks(1, _of_a_callable, dict())[0]
    torch.manual_seed(3)
    initial = _norms(_Classifier().state_dict())
    torch.testing.assert_close(alone[: len(initial)], initial)
    for world_size, fields in ((2, dict(tp=2)), (2, dict(zero=3)), (4, dict(tp=2, zero=3))):
        found = ranks(world_size, _of_a_callable, fields)[0]
        torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5)


def _of_meta(fields: dict[str, Any]) -> list[float]:
    with torch.device("meta"):
        model = _Classifier()
    engine = ts.parallelize(model, ts.Plan(**fields), optimizer=parity.ADAMW, loss_fn=given_loss, seed=3)
    return _norms(engine.full_state_dict())


def test_a_meta_module_gets_the_weights_of_a_linear_layer(ranks):
    found = ranks(2, _of_meta, dict(tp=2))[0]
    assert found == ranks(1, _of_meta, dict())[0]
    assert found[4] == pytest.approx((37 * 8) ** 0.5 * (1 / 3 / 8) ** 0.5, rel=0.1)


def _step_and_save(path: str) -> list[float]:
    engine = parity.make_engine("gpt_head", dict(tp=2, zero=3))
    losses = [engine.step(*parity.shard(engine, *parity.batch("gpt_head", step))).item() for step in range(2)]
    engine.save(path)
    return losses


def _load_and_step(kind: str, path: str) -> list[float]:
    engine = parity.make_engine(kind, dict(zero=1))
    engine.load(path)
    return [engine.step(*parity.shard(engine, *parity.batch(kind, step))).item() for step in range(2, 4)]


@pytest.mark.slow
def test_a_plain_layer_goes_on_from_a_heads_checkpoint(ranks, tmp_path):
    path = str(tmp_path / "split")
    losses = ranks(4, _step_and_save, path)[0]
    expected = parity.reference("gpt", steps=4)["losses"]
    torch.testing.assert_close(losses, expected[:2], rtol=1e-5, atol=1e-5)
    for kind in ("gpt", "gpt_head"):
        torch.testing.assert_close(ranks(2, _load_and_step, kind, path)[0], expected[2:], rtol=1e-5, atol=1e-5)


def _low_precision(fields: dict[str, Any]) -> list[float]:
    engine = ts.parallelize(
        _Classifier(), ts.Plan(precision="bf16", **fields), optimizer=parity.ADAMW, loss_fn=given_loss, seed=3
    )
    inputs, targets = classifier_batch()
    return [engine.step((inputs, targets), targets).item() for _ in range(4)]


def test_bf16(ranks):
    for found, whole in zip(ranks(2, _low_precision, dict(tp=2)), ranks(2, _low_precision, dict()), strict=True):
        assert found[-1] < found[0]
        torch.testing.assert_close(found, whole, rtol=1e-2, atol=1e-2)


def _sampled(options: dict[str, Any]) -> tuple[list[float], torch.Tensor]:
    build = partial(_Classifier, 0.3, **options)
    engine = ts.parallelize(build, ts.Plan(tp=2), optimizer=parity.ADAMW, loss_fn=given_loss, seed=3)
    whole, targets = classifier_batch()
    losses = [engine.step((whole, targets), targets).item() for _ in range(3)]
    return losses, torch.get_rng_state()


@pytest.mark.slow
def test_sampling_leaves_the_generators_of_the_ranks_alike(ranks):
    """37 classes are 19 and 18: dropout after a sample would differ if the ranks drew as many numbers as they hold."""
    (losses, state), (other_losses, other_state) = ranks(2, _sampled, dict(sample_rate=0.5))
    assert losses == other_losses and torch.equal(state, other_state)
    assert losses[0] < ranks(2, _sampled, dict(sample_rate=1.0))[0][0][0]  # of fewer classes


def _gathering() -> None:
    model = _Classifier(gather_inputs=torch.distributed.group.WORLD)
    ts.parallelize(model, ts.Plan(), optimizer=parity.ADAMW, loss_fn=given_loss)


def test_what_a_plan_does_itself(ranks):
    with pytest.raises(RankError, match="built with gather_inputs=, but under a plan each data rank has a loss"):
        ranks(2, _gathering)
    with pytest.raises(
        ValueError, match=r"loss_fn is a Parallel\w+ with parameters \(weight\), which the Engine would"
    ):
        ts.parallelize(nn.Linear(2, 2), ts.Plan(), optimizer=parity.ADAMW, loss_fn=ParallelLinearCrossEntropy(2, 5))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"head": "colwise"}, "head is a ParallelLinearCrossEntropy, which cannot be 'colwise'.*it can be classes"),
        ({"norm": "classes"}, "norm is a LayerNorm, which cannot be 'classes': that is for a ParallelLinear"),
        ({"head": "classes", "embedding": "replicate"}, "are one tied parameter"),
    ],
)
def test_wrong_tables(table, message):
    model = gpt_with_head(GPT(61, 16, 2, 2, 30, tie_embeddings=True))
    with pytest.raises(ValueError, match=message):
        ts.tensor_parallel.search.check_table.check_tensor_table(
            model, ts.tensor_parallel.table.table.TensorTable.from_dict(table), 2
        )
