"""transformers' run_clm with the import line of the Trainer changed: what it computes in one process."""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

import parity
import peer_scripts
import tensorshard as ts
from rank_pool import RankError

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

_IMPORTS = {
    "from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed": (
        "from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments, set_seed\n"
        "from tensorshard.compat.transformers import Trainer"
    ),
}


def _theirs(folder: Path, **arguments: Any) -> dict[str, Any]:
    return peer_scripts.run("run_clm", {"output_dir": str(folder), **arguments})


def _ours(plan: Any, folder: str, **arguments: Any) -> dict[str, Any]:
    given = ts.Plan(**plan) if isinstance(plan, dict) else plan
    return peer_scripts.run("run_clm", {"output_dir": folder, "plan": given, **arguments}, _IMPORTS)


def _series(found: dict[str, Any], key: str) -> list[float]:
    return [entry[key] for entry in found["logs"]]


def _assert_same(found: dict[str, Any], theirs: dict[str, Any], bound: float = 1e-5) -> None:
    assert len(theirs["logs"]) == 20
    for key in ("loss", "learning_rate"):
        assert _series(found, key) == pytest.approx(_series(theirs, key), abs=bound)
    assert _series(found, "grad_norm") == pytest.approx(_series(theirs, "grad_norm"), rel=max(1e-4, bound))
    assert found["train_loss"] == pytest.approx(theirs["train_loss"], abs=bound)
    assert found["calls"] == theirs["calls"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "world", "data_ranks", "arguments"),
    [
        pytest.param({"zero": 3}, 2, 2, {}, id="zero 3"),
        pytest.param({"zero": 1}, 2, 2, {"gradient_accumulation_steps": 5}, id="zero 1, an epoch cuts steps short"),
        pytest.param({"tp": 2}, 2, 1, {"train_sampling_strategy": "group_by_length"}, id="tp 2, grouped by length"),
        pytest.param({"zero": 2}, 2, 2, {"label_smoothing_factor": 0.1}, id="zero 2, label smoothing"),
        pytest.param({"zero": 0}, 2, 2, {"max_grad_norm": 0.0}, id="zero 0, no clipping"),
        pytest.param({"pp": 2}, 2, 1, {"gradient_accumulation_steps": 2}, id="pp 2"),
        pytest.param({"pp": 2, "zero": 1, "micro_batches": 4}, 4, 2, {}, id="pp 2, zero 1, four micro-batches"),
        pytest.param({"zero": 3, "tp": 2}, 4, 2, {"optim": "adafactor"}, id="zero 3, tp 2, adafactor"),
    ],
)
def test_losses_rates_norms_and_weights_are_those_of_transformers(ranks, tmp_path, plan, world, data_ranks, arguments):
    theirs = _theirs(tmp_path / "theirs", per_device_train_batch_size=8, **arguments)
    size = 8 // data_ranks
    found = ranks(world, _ours, plan, str(tmp_path / "ours"), per_device_train_batch_size=size, **arguments)
    for one in found:
        _assert_same(one, theirs)
    files = [tmp_path / who / "final" / "model.safetensors" for who in ("ours", "theirs")]
    parity.assert_same_state(*map(safetensors.torch.load_file, files), 1e-4)


@pytest.mark.slow
def test_evaluation_checkpoints_and_resumption_are_those_of_transformers(ranks, tmp_path):
    """Metrics of whole samples, callbacks in their order, a run that goes on from a checkpoint on other ranks."""
    options = {"evaluate": True, "eval_strategy": "steps", "eval_steps": 5, "save_strategy": "steps", "save_steps": 10}
    sizes = ("per_device_train_batch_size", "per_device_eval_batch_size")  # the loss is a mean of each batch's mean
    options["load_best_model_at_end"] = True
    theirs = _theirs(tmp_path / "theirs", **dict.fromkeys(sizes, 8), **options)
    found = ranks(2, _ours, {"zero": 3}, str(tmp_path / "ours"), **dict.fromkeys(sizes, 4), **options)
    for one in found:
        _assert_same(one, theirs)
        for name in ("eval_loss", "eval_accuracy", "eval_tokens"):
            assert one["metrics"][name] == pytest.approx(theirs["metrics"][name], abs=1e-5)
    for who in ("ours", "theirs"):  # their Trainer's checkpoints, too
        arguments = {"per_device_train_batch_size": 8, "resume": str(tmp_path / who / "checkpoint-10")}
        (resumed,) = ranks(1, _ours, {"zero": 1}, str(tmp_path / f"from {who}"), **arguments)
        for key in ("loss", "learning_rate"):
            assert _series(resumed, key) == pytest.approx(_series(theirs, key), abs=1e-5)
        assert resumed["calls"] == [call for call in theirs["calls"] if call[0] == "step" and call[1] > 10]


_GLUE_IMPORTS = {"from transformers.trainer import Trainer": "from tensorshard.compat.transformers import Trainer"}


def _their_task(task: str, folder: Path, **arguments: Any) -> dict[str, Any]:
    return peer_scripts.run("run_glue", {"task": task, "output_dir": str(folder), **arguments})


def _our_task(task: str, plan: dict[str, Any], folder: str, **arguments: Any) -> dict[str, Any]:
    given = {"task": task, "output_dir": folder, "plan": ts.Plan(**plan), **arguments}
    return peer_scripts.run("run_glue", given, _GLUE_IMPORTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "plan", "data_ranks", "arguments"),
    [
        ("glue", {"zero": 3}, 2, {}),
        ("glue", {"tp": 2}, 1, {"gradient_accumulation_steps": 2}),
        ("mlm", {"zero": 1}, 2, {"gradient_accumulation_steps": 3}),
        ("mlm", {"zero": 3}, 2, {"train_sampling_strategy": "group_by_length"}),
        ("mlm", {"tp": 2}, 1, {}),
    ],
)
def test_glue_and_masked_language_models_are_those_of_transformers(ranks, tmp_path, task, plan, data_ranks, arguments):
    """Evaluation and a checkpoint each epoch, the best one loaded at the end, predictions of samples without labels."""
    sizes = ("per_device_train_batch_size", "per_device_eval_batch_size")
    theirs = _their_task(task, tmp_path / "theirs", **dict.fromkeys(sizes, 8), **arguments)
    ours = {**dict.fromkeys(sizes, 8 // data_ranks), **arguments}
    for one in ranks(2, _our_task, task, plan, str(tmp_path / "ours"), **ours):
        for key in ("losses", "rates"):
            assert one[key] == pytest.approx(theirs[key], abs=1e-5)
        assert one["train_loss"] == pytest.approx(theirs["train_loss"], abs=1e-5)
        rows = sorted if "train_sampling_strategy" in arguments else list  # which groups samples to predict, too
        assert one["best"] == theirs["best"] and rows(one["predicted"]) == rows(theirs["predicted"])
        for mine, other in zip(one["evaluated"], theirs["evaluated"], strict=True):
            assert mine[1] == other[1]
    files = [tmp_path / who / "model.safetensors" for who in ("ours", "theirs")]
    parity.assert_same_state(*map(safetensors.torch.load_file, files), 1e-4)


@pytest.mark.slow
def test_a_pipeline_evaluates(ranks, tmp_path):
    evaluated = {"evaluate": True, "per_device_eval_batch_size": 8}
    theirs = _theirs(tmp_path / "theirs", per_device_train_batch_size=8, **evaluated)
    found = ranks(
        2, _ours, {"pp": 2, "micro_batches": 2}, str(tmp_path / "ours"), per_device_train_batch_size=8, **evaluated
    )
    for name in ("eval_loss", "eval_accuracy", "eval_tokens"):
        assert found[0]["metrics"][name] == pytest.approx(theirs["metrics"][name], abs=1e-5)


@pytest.mark.slow
def test_bf16_is_the_plans(ranks, tmp_path):
    """bf16: within the spread of 16-bit digits."""
    theirs = _theirs(tmp_path / "theirs", per_device_train_batch_size=8, bf16=True)
    found = ranks(2, _ours, {"zero": 3}, str(tmp_path / "ours"), per_device_train_batch_size=4, bf16=True)
    assert _series(found[0], "loss") == pytest.approx(_series(theirs, "loss"), abs=3e-2)


@pytest.mark.slow
def test_auto_finds_a_plan(ranks, tmp_path):
    theirs = _theirs(tmp_path / "theirs", per_device_train_batch_size=8)
    found = ranks(1, _ours, "auto", str(tmp_path / "ours"), per_device_train_batch_size=8)
    _assert_same(found[0], theirs)


@pytest.mark.parametrize(
    ("plan", "arguments", "message"),
    [
        ({}, {"activation_checkpointing": True}, r"Plan\(recompute='full'\) or 'selective' recomputes"),
        ({}, {"bf16_full_eval": True}, "evaluation computes in the Plan's precision"),
        ({}, {"auto_find_batch_size": True}, "a model is laid out once"),
        (
            {"micro_batches": 3},
            {"gradient_accumulation_steps": 2},
            "gradient_accumulation_steps=2 was given with a plan",
        ),
        ({"precision": "fp16"}, {"bf16": True}, "mixed_precision='bf16' was given with a plan of precision='fp16'"),
        (
            {"clip_grad_norm": 0.5},
            {"max_grad_norm": 2.0},
            "max_grad_norm=2.0 was given with a plan of clip_grad_norm=0.5",
        ),
        ({"pp": 1, "tp": 3}, {}, "3"),
        ({}, {"resume": "."}, "has no folder 'engine'"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(ranks, tmp_path, plan, arguments, message):
    with pytest.raises(RankError, match=message):
        ranks(1, _ours, plan, str(tmp_path), **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"label_smoothing_factor": 0.1},
            "the plan has pp=2, .* label_smoothing_factor would have it computed elsewhere",
        ),
        (
            {"per_device_train_batch_size": 5},
            "96 samples are not a multiple of the 5 of a step: cut train_dataset to 95",
        ),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused_by_name(ranks, tmp_path, arguments, message):
    with pytest.raises(RankError, match=message):
        ranks(2, _ours, {"pp": 2, "pp_schedule": "gpipe"}, str(tmp_path), **arguments)
