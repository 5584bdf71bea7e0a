"""Accelerate's scripts with the import line changed: what they compute in one process, under every kind of plan."""

import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import parity
import peer_scripts
import tensorshard as ts
from rank_pool import RankError

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

_IMPORTS = {
    "from accelerate import Accelerator": "from tensorshard.compat.accelerate import Accelerator",
}


def _theirs(batch_size: int, *arguments: str, name: str = "nlp_example") -> dict[str, Any]:
    return peer_scripts.run(name, ["--cpu", "--batch_size", str(batch_size), *arguments])


def _ours(
    plan: dict[str, Any], path: str, batch_size: int, *arguments: str, name: str = "nlp_example"
) -> dict[str, Any]:
    file = Path(path) / f"plan-{torch.distributed.get_rank()}.yaml"
    ts.Plan(**plan).to_yaml(file)
    given = ["--cpu", "--batch_size", str(batch_size), *arguments]
    return peer_scripts.run(name, given, _IMPORTS, TENSORSHARD_PLAN=str(file))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "ranks_of_data", "arguments"),
    [
        pytest.param({"zero": 3}, 2, ["--clip", "0.5"], id="zero 3, clipping"),
        pytest.param(
            {"zero": 1}, 2, ["--gradient_accumulation_steps", "3"], id="zero 1, steps that an epoch cuts short"
        ),
        pytest.param({"zero": 0}, 2, [], id="zero 0", marks=pytest.mark.slow),
        pytest.param({"tp": 2}, 1, ["--clip", "0.5"], id="tp 2", marks=pytest.mark.slow),
        pytest.param({"zero": 2}, 2, ["--gradient_accumulation_steps", "2"], id="zero 2", marks=pytest.mark.slow),
    ],
)
def test_losses_rates_and_metrics_are_those_of_accelerate(ranks, tmp_path, plan, ranks_of_data, arguments):
    theirs = _theirs(16, *arguments)
    found = ranks(2, _ours, plan, str(tmp_path), 16 // ranks_of_data, *arguments)
    for key in ("losses", "rates"):
        assert found[0][key] == found[1][key] == pytest.approx(theirs[key], abs=1e-5)
    assert found[0]["accuracy"] == theirs["accuracy"]
    parity.assert_same_state(found[0]["weights"], theirs["weights"], 1e-4)


@pytest.mark.slow
def test_a_run_goes_on_from_its_folder_under_another_plan(ranks, tmp_path):
    theirs = _theirs(16, "--clip", "0.5")
    state = str(tmp_path / "state")
    ranks(2, _ours, {"zero": 3}, str(tmp_path), 8, "--clip", "0.5", "--save", state)
    resumed, _ = ranks(2, _ours, {"zero": 1}, str(tmp_path), 8, "--clip", "0.5", "--resume", state)
    assert resumed["losses"] == pytest.approx(theirs["losses"][4:], abs=1e-5)
    assert resumed["rates"] == pytest.approx(theirs["rates"][4:])
    with pytest.raises(RankError, match="saved with 2 data ranks, and there are 1: as in Accelerate"):
        ranks(1, _ours, {"zero": 1}, str(tmp_path), 16, "--resume", state)


@pytest.mark.slow
def test_mixed_precision_is_the_plans(ranks, tmp_path):
    """bf16: within the spread of 16-bit digits."""
    theirs = _theirs(16, "--mixed_precision", "bf16")
    found = ranks(2, _ours, {"zero": 2}, str(tmp_path), 8, "--mixed_precision", "bf16")
    assert found[0]["losses"] == pytest.approx(theirs["losses"], abs=2e-2)
    assert found[0]["losses"] != pytest.approx(_theirs(16)["losses"], abs=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "ranks_of_data", "arguments"),
    [({"zero": 2}, 2, []), ({"tp": 2}, 1, []), ({"zero": 3}, 2, ["--gradient_accumulation_steps", "4"])],
)
def test_cv_example_trains_a_head(ranks, tmp_path, plan, ranks_of_data, arguments):
    """OneCycleLR sets rates and momentum; epochs cut steps short; a last batch is filled up for evaluation."""
    size = 12 // ranks_of_data
    theirs = ranks(ranks_of_data, _theirs, size, *arguments, name="cv_example")[0]
    found = ranks(2, _ours, plan, str(tmp_path), size, *arguments, name="cv_example")
    for one in found:
        for key in ("losses", "rates", "moments"):
            assert one[key] == pytest.approx(theirs[key], abs=1e-5)
        assert one["accuracy"] == theirs["accuracy"] and one["accuracy"][-1][1] == 22
        assert len(one["trained"]) == 4
    parity.assert_same_state(found[0]["weights"], theirs["weights"], 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "ranks_of_data"), [({"zero": 3}, 2), ({"tp": 2}, 1), ({"zero": 1}, 2)])
def test_checkpointing_goes_on_within_an_epoch(ranks, tmp_path, plan, ranks_of_data):
    size, folder = 8 // ranks_of_data, str(tmp_path / "ours")
    theirs = ranks(ranks_of_data, _theirs, size, "--output_dir", str(tmp_path / "theirs"), name="checkpointing")[0]
    options = ["--output_dir", folder, "--checkpointing_steps", "3", "--total_limit", "5"]
    found = ranks(2, _ours, plan, str(tmp_path), size, *options, name="checkpointing")
    for key in ("losses", "rates"):
        assert found[0][key] == found[1][key] == pytest.approx(theirs[key], abs=1e-5)
    names = sorted(path.name for path in (tmp_path / "ours" / "checkpoints").iterdir())
    assert names == [f"checkpoint_{number}" for number in range(3, 8)]
    files = [tmp_path / who / "final" / "model.safetensors" for who in ("ours", "theirs")]
    ours, same = (dict(sorted(safetensors.torch.load_file(file).items())) for file in files)
    parity.assert_same_state(ours, same, 1e-4)
    options[1] = str(tmp_path / "resumed")
    resume = ["--resume_from_checkpoint", f"{folder}/checkpoints/checkpoint_3"]  # 12 of 24 steps, 4 of 8 of an epoch
    for one in ranks(2, _ours, plan, str(tmp_path), size, *options, *resume, name="checkpointing"):
        assert one["losses"] == pytest.approx(theirs["losses"][12:], abs=1e-5)
        assert one["rates"] == pytest.approx(theirs["rates"][12:])
        assert one["samples"] == theirs["samples"] == 192 and one["steps"] == 24


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "ranks_of_data"), [({"zero": 3}, 2), ({"tp": 2}, 1)])
def test_early_stopping_and_trackers_are_those_of_accelerate(ranks, tmp_path, plan, ranks_of_data):
    theirs = ranks(ranks_of_data, _theirs, 8 // ranks_of_data, name="early_stopping")[0]
    found = ranks(2, _ours, plan, str(tmp_path), 8 // ranks_of_data, name="early_stopping")
    epochs = len(theirs["evaluated"])
    assert 3 < epochs < 20
    for one in found:
        for key in ("losses", "evaluated"):
            assert one[key] == pytest.approx(theirs[key], abs=1e-5)
    assert found[0]["logged"] == theirs["logged"] == list(range(epochs))
    assert found[0]["tracker"] and "logged" not in found[1]


def _reduced() -> list[Any]:
    from tensorshard.compat.accelerate import Accelerator

    accelerator = Accelerator(plan=ts.Plan(zero=1, tp=2))
    mine = {"count": torch.tensor(7), "loss": torch.tensor([1.5])}
    if accelerator.process_index >= 2:  # ranks 0 and 1 share a batch, as do 2 and 3
        mine = {"count": torch.tensor(4), "loss": torch.tensor([0.25])}
    found = [accelerator.reduce(mine, kind) for kind in ("sum", "max")]
    found.append(accelerator.reduce(mine["loss"], "mean"))
    if accelerator.process_index == 1:
        accelerator.set_trigger()
    return [*found, accelerator.check_trigger(), accelerator.check_trigger()]


def _local_sgd(uneven: bool) -> None:
    from accelerate.local_sgd import LocalSGD

    from tensorshard.compat.accelerate import Accelerator

    accelerator, model = Accelerator(), torch.nn.Linear(4, 2)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with accelerator.join_uneven_inputs([model], even_batches=not uneven):
        LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2).__enter__()


@pytest.mark.slow
def test_what_lets_ranks_differ_is_refused(ranks):
    with pytest.raises(RankError, match="LocalSGD does, whose ranks have weights of their own"):
        ranks(2, _in_fresh_accelerate, _local_sgd, False)
    with pytest.raises(RankError, match="join_uneven_inputs was called with even_batches=False"):
        ranks(2, _in_fresh_accelerate, _local_sgd, True)


@pytest.mark.slow
def test_data_ranks_are_reduced_once(ranks):
    for total, largest, mean, triggered, again in ranks(4, _in_fresh_accelerate, _reduced):
        assert (int(total["count"]), float(total["loss"])) == (11, 1.75) and total["count"].dtype == torch.int64
        assert (int(largest["count"]), float(largest["loss"]), float(mean)) == (7, 1.5, 0.875)
        assert triggered and not again


def _more_helpers() -> dict[str, Any]:
    """Helpers of Accelerate that a Plan changes: what they give."""
    from accelerate.utils import GradScalerKwargs, find_executable_batch_size

    from tensorshard.compat.accelerate import Accelerator

    os.environ.update(ACCELERATE_MIXED_PRECISION="bf16", ACCELERATE_GRADIENT_ACCUMULATION_STEPS="2")
    accelerator = Accelerator(plan=ts.Plan(tp=2, dp_shard=1), kwargs_handlers=[GradScalerKwargs(init_scale=2.0**7)])
    found: dict[str, Any] = {"launched": (accelerator.plan.precision, accelerator.plan.micro_batches)}
    with accelerator.split_between_processes(list(range(5))) as part:
        found["part"] = part
    sizes = []

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> list[float]:
        sizes.append(batch_size)
        accelerator.free_memory()
        torch.manual_seed(0)
        made = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        model, optimizer = accelerator.prepare(made, torch.optim.SGD(made.parameters(), lr=0.1))
        if batch_size > 4:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        losses = []
        inputs = torch.linspace(-1, 1, 4 * batch_size).view(batch_size, 4)
        for step in range(4):
            with accelerator.no_sync(model):
                loss = model(inputs[: batch_size // 2]).square().mean()
                accelerator.backward(loss)
                with accelerator.trigger_sync_in_backward(model):
                    second = model(inputs[batch_size // 2 :]).square().mean()
                    accelerator.backward(second)
            losses.append((loss + second).item() / 2)
            if step == 2:  # the model and its optimizer come back after their references were released
                accelerator.free_memory()
                model, optimizer = accelerator.prepare(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        return losses

    found["losses"], found["sizes"] = train(), sizes
    return found


@pytest.mark.slow
def test_helpers_of_accelerate_under_a_plan(ranks):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    optimizer, inputs, losses = torch.optim.SGD(model.parameters(), lr=0.1), torch.linspace(-1, 1, 16).view(4, 4), []
    for _ in range(4):
        loss = model(inputs).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    for found in ranks(2, _in_fresh_accelerate, _more_helpers):
        assert (
            found["launched"] == ("bf16", 2) and found["part"] == [0, 1, 2, 3, 4] and found["sizes"] == [8, 7, 6, 5, 4]
        )
        assert found["losses"] == pytest.approx(losses, rel=2e-2)


def _in_fresh_accelerate(function: Any, *args: Any) -> Any:
    with peer_scripts.fresh_accelerate():
        return function(*args)


def _refused() -> dict[str, str]:
    """The messages of what is refused, by name."""
    from accelerate.utils import (
        AutocastKwargs,
        DistributedDataParallelKwargs,
        GradientAccumulationPlugin,
        GradScalerKwargs,
    )

    from tensorshard.compat.accelerate import Accelerator

    def message(call: Any) -> str:
        try:
            call()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing was refused"

    def made() -> tuple[Accelerator, torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(4, 2)
        return Accelerator(plan=ts.Plan(zero=0)), model, torch.optim.SGD(model.parameters(), lr=0.1)

    found = {}
    with peer_scripts.fresh_accelerate():
        found["plugin"] = message(lambda: Accelerator(fsdp_plugin=object()))
        found["pipeline"] = message(lambda: Accelerator(plan=ts.Plan(pp=2)))
        found["precision"] = message(lambda: Accelerator(plan=ts.Plan(precision="bf16"), mixed_precision="fp16"))
        found["fp8"] = message(lambda: Accelerator(mixed_precision="fp8"))
        plugin = GradientAccumulationPlugin(num_steps=3)
        found["accumulation"] = message(
            lambda: Accelerator(plan=ts.Plan(micro_batches=2), gradient_accumulation_plugin=plugin)
        )
        found["degrees"] = message(lambda: Accelerator(plan=ts.Plan(tp=3)))
        accelerator, model, optimizer = made()
        found["optimizer alone"] = message(lambda: accelerator.prepare(optimizer))
        found["backward"] = message(lambda: accelerator.backward(model(torch.randn(2, 4)).sum()))
        accelerator.prepare(model)
        found["forward"] = message(lambda: model(torch.randn(2, 4)))
        accelerator.prepare(optimizer)
        other = torch.nn.Linear(4, 2)
        found["second model"] = message(lambda: accelerator.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1)))
        accelerator.backward(model(torch.randn(2, 4)).sum())
        found["clipping"] = message(lambda: accelerator.clip_grad_norm_([model.weight], 1.0))
        found["hook"] = message(lambda: accelerator.register_save_state_pre_hook(print))
        found["steps"] = message(lambda: setattr(accelerator, "gradient_accumulation_steps", 4))
        found["lomo"] = message(lambda: accelerator.lomo_backward(model(torch.randn(2, 4)).sum(), 0.1))
        found["local sgd"] = message(model.no_sync)
        for name, handler in (
            ("scaler", GradScalerKwargs(growth_factor=4.0)),
            ("ddp hook", DistributedDataParallelKwargs(comm_hook="fp16")),
            ("autocast", AutocastKwargs(enabled=False)),
        ):
            found[name] = message(lambda handler=handler: Accelerator(kwargs_handlers=[handler]))
        accelerator, model, optimizer = made()
        model(torch.randn(2, 4)).sum().backward()
        optimizer = torch.optim.Adam(model.parameters())
        optimizer.step()
        found["stepped"] = message(lambda: accelerator.prepare(model, optimizer))
        found["foreign"] = message(lambda: accelerator.prepare(model, torch.optim.SGD(other.parameters(), lr=0.1)))
    return found


def test_what_cannot_be_honoured_is_refused_by_name(ranks):
    expected = {
        "plugin": "ValueError: Accelerator was given fsdp_plugin",
        "pipeline": "ValueError: Accelerator was given a plan with pp=2",
        "precision": "ValueError: mixed_precision='fp16' was given with a plan of precision='bf16'",
        "fp8": "ValueError: mixed_precision is 'fp8'",
        "accumulation": "ValueError: gradient_accumulation_steps=3 was given with a plan of micro_batches=2",
        "degrees": "ValueError: ",
        "optimizer alone": "ValueError: accelerator.prepare was given an optimizer without its model",
        "backward": "RuntimeError: accelerator.backward was called before prepare(model, optimizer)",
        "forward": "RuntimeError: the Linear was prepared without its optimizer",
        "second model": "ValueError: accelerator.prepare was given a second model that is trained",
        "clipping": "ValueError: accelerator.clip_grad_norm_ clips the 2-norm of the gradient of all",
        "hook": "NotImplementedError: register_save_state_pre_hook: save_state writes the Engine's checkpoint",
        "steps": "ValueError: accelerator.gradient_accumulation_steps was set to 4, and the Plan was made for 1",
        "lomo": "NotImplementedError: accelerator.lomo_backward updates weights while backward runs",
        "local sgd": "NotImplementedError: model.no_sync() was called, as accelerate.local_sgd.LocalSGD does",
        "scaler": "ValueError: Accelerator was given GradScalerKwargs(growth_factor=4.0)",
        "ddp hook": "ValueError: Accelerator was given DistributedDataParallelKwargs(comm_hook='fp16')",
        "autocast": "ValueError: Accelerator was given AutocastKwargs(enabled=False)",
        "stepped": "ValueError: accelerator.prepare was given a Adam that has stepped",
        "foreign": "ValueError: accelerator.prepare was given a SGD with a parameter of shape [2, 4] that is not in",
    }
    (found,) = ranks(1, _refused)
    assert {name: found[name][: len(start)] for name, start in expected.items()} == expected
