"""A LightningModule under the strategy computes what Lightning computes in one process. Runs where Lightning is."""

from typing import Any

import pytest

import peer_scripts
import tensorshard as ts
from rank_pool import RankError

pytest.importorskip("lightning")


def _nothing(*_: Any) -> None: ...


def _run(strategy: Any, ranks: int, **arguments: Any) -> dict[str, Any]:
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment  # type: ignore[import-not-found]

    given = {"strategy": strategy, "devices": ranks, "batch_size": 8 // ranks, "plugins": [TorchElasticEnvironment()]}
    found: dict[str, Any] = peer_scripts.run("lightning_training", {**given, **arguments})
    return found


def _theirs(**arguments: Any) -> dict[str, Any]:
    return _run("ddp", 1, **arguments)  # of one process; "auto" would not shuffle


def _ours(plan: dict[str, Any], ranks: int, **arguments: Any) -> dict[str, Any]:
    from tensorshard.compat.lightning import TensorshardStrategy

    return _run(TensorshardStrategy(plan=ts.Plan(**plan)), ranks, **arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "arguments"),
    [
        ({"zero": 3}, {"gradient_clip_val": 0.5}),
        ({"zero": 1}, {"accumulate_grad_batches": 3}),
        ({"zero": 2}, {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}),
        ({"zero": 0, "precision": "fp32"}, {}),
    ],
)
def test_losses_validation_and_rates_are_those_of_lightning(ranks, tmp_path, plan, arguments):
    (theirs,) = ranks(1, _theirs, folder=str(tmp_path / "theirs"), **arguments)
    for one in ranks(2, _ours, plan, 2, folder=str(tmp_path / "ours"), **arguments):
        assert one["losses"] == pytest.approx(theirs["losses"], abs=1e-5) and len(one["losses"]) == 24
        for key in ("validated", "tested", "rate"):
            assert one[key] == pytest.approx(theirs[key], abs=1e-5)
        assert one["steps"] == theirs["steps"]


@pytest.mark.slow
def test_a_fit_goes_on_from_its_checkpoint_on_another_number_of_ranks(ranks, tmp_path):
    (theirs,) = ranks(1, _theirs, folder=str(tmp_path / "theirs"), predict=True)
    ranks(2, _ours, {"zero": 3}, 2, folder=str(tmp_path / "ours"))
    options = {"folder": str(tmp_path / "on"), "resume": str(tmp_path / "ours" / "epoch=0.ckpt"), "predict": True}
    (resumed,) = ranks(1, _ours, {"zero": 1}, 1, **options)
    assert resumed["losses"] == pytest.approx(theirs["losses"][8:], abs=1e-5)
    assert resumed["predicted"] == theirs["predicted"]
    assert resumed["rate"] == pytest.approx(theirs["rate"]) and resumed["steps"] == theirs["steps"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "arguments", "message"),
    [
        ({"tp": 2}, {}, r"was given a plan with tp=2. Lightning's metrics and all_gather"),
        ({}, {"precision": "bf16-mixed"}, r"Trainer\(precision='bf16-mixed'\) was given with a Plan"),
        ({"micro_batches": 2}, {"accumulate_grad_batches": 3}, "accumulate_grad_batches=3 was given with a plan of"),
        ({}, {"resume": "."}, "is no checkpoint of TensorshardStrategy, a folder with 'engine' in it"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(ranks, tmp_path, plan, arguments, message):
    with pytest.raises(RankError, match=message):
        ranks(1, _ours, plan, 1, folder=str(tmp_path), **arguments)


def _what_is_said(attribute: str, value: Any) -> str:
    """The error of a module that has another `attribute`."""
    import lightning.pytorch as pl

    from tensorshard.compat.lightning import TensorshardStrategy

    names = peer_scripts.names_of("lightning_training")
    module = type("Another", (names["LitModel"],), {attribute: value})()
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=TensorshardStrategy(), logger=False, max_epochs=1)
    with pytest.raises(ValueError) as error:
        trainer.fit(module, names["loader"](8, 4, 1), names["loader"](8, 4, 1))
    return str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("configure_optimizers", _nothing, "Another.configure_optimizers returned no optimizer"),
        ("automatic_optimization", False, "Another.automatic_optimization is False"),
        ("backward", _nothing, "Another has a backward of its own"),
    ],
)
def test_modules_that_cannot_be_honoured(ranks, attribute, value, message):
    assert message in ranks(1, _what_is_said, attribute, value)[0]
