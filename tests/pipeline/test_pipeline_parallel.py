"""Plans with a pipeline, alone and with every other axis, train as one process does."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import parity
import tensorshard as ts
from tensorshard.engine.engine import NonFiniteLossError
from tensorshard.models import GPT
from tensorshard.plan.schedules import SCHEDULES
from tensorshard.trainer.launch.launch_errors import WorkerFailedError
from tensorshard.trainer.launch.launcher import World, launch

STEPS = 5
CLIP = 1.1  # some steps' norms are above it, some below

# id: (model, ranks, fields of the plan).
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "gpt": ("gpt", 2, dict(zero=0, micro_batches=4)),
    "bert-padding-clip": ("bert", 2, dict(micro_batches=2, clip_grad_norm=CLIP)),
    "resnet": ("resnet", 2, dict(micro_batches=2)),
    "llama-recompute": ("llama", 2, dict(micro_batches=4, recompute="full")),
    "llama-selective-zbv": ("llama", 2, dict(micro_batches=4, recompute="selective", pp_schedule="zbv")),
    "gpt2-tied-clip": ("gpt2", 2, dict(micro_batches=2, clip_grad_norm=CLIP)),
    "t5-interleaved": ("t5", 2, dict(micro_batches=2, pp_schedule="interleaved_1f1b")),
    "unet-skips": ("unet", 2, dict(micro_batches=2, pp_split=["down.2"])),
    "gpt-cut-inside-of-a-block": ("gpt", 2, dict(micro_batches=2, pp_units=["blocks.1.*"], pp_split=["blocks.1.mlp"])),
    "resnet-whole-encoder": ("resnet", 2, dict(micro_batches=2, pp_units=["resnet.encoder"], recompute="full")),
    "tied-zero2-zero-bubble": ("gpt_tied", 4, dict(zero=2, micro_batches=4, pp_schedule="interleaved_zero_bubble")),
    "tied-zero3-full": ("gpt_tied", 4, dict(zero=3, micro_batches=4, recompute="full", clip_grad_norm=CLIP)),
    "tied-zero3-zbv": ("gpt_tied", 4, dict(zero=3, micro_batches=4, pp_schedule="zbv")),
    "gpt-named-units": ("gpt", 4, dict(zero=3, micro_batches=2, shard_units=["blocks.*.mlp", "embedding"])),
    "tied-tp2": ("gpt_tied", 4, dict(tp=2, micro_batches=2, clip_grad_norm=CLIP)),
    # The combinations of all axes, on eight ranks.
    "gpt2-pp2-dp2-tp2": (
        "gpt2", 8, dict(dp_shard=2, tp=2, micro_batches=2, sequence_parallel=True, clip_grad_norm=CLIP),
    ),
    "gpt-pp4-tp2": ("gpt", 8, dict(pp=4, tp=2, micro_batches=4)),
    "tied-pp2-hybrid": ("gpt_tied", 8, dict(dp_replicate=2, dp_shard=2, zero=3, micro_batches=2, clip_grad_norm=CLIP)),
}  # fmt: skip
for schedule in SCHEDULES:
    CASES[f"tied-{schedule}"] = ("gpt_tied", 2, dict(micro_batches=4, pp_schedule=schedule, clip_grad_norm=CLIP))


# Of each model, level, schedule and other axis one stays that is not slow.


@pytest.mark.fast_cases("gpt2-tied-clip", "gpt-cut-inside-of-a-block", "gpt", "bert-padding-clip")
@pytest.mark.parametrize("case", CASES)
def test_a_pipeline_trains_as_one_process_does(ranks, case):
    kind, world_size, fields = CASES[case]
    fields = {"pp": 2, **fields}
    found = ranks(world_size, parity.train, kind, fields, STEPS)
    clip = fields.get("clip_grad_norm")
    data_ranks = world_size // fields["pp"] // fields.get("tp", 1)
    cuts = (fields["micro_batches"], data_ranks) if kind in ("resnet", "unet") else (1, 1)
    expected = parity.reference(kind, clip, STEPS, *cuts)
    parity.assert_same(found[0], expected, 1e-5)
    if clip is not None:
        torch.testing.assert_close(found[0]["norms"], expected["norms"], rtol=1e-5, atol=1e-6)
    for other in found[1:]:
        assert other["losses"] == found[0]["losses"]
        assert other["norms"] == found[0]["norms"]
        assert other["state"] == {}


@pytest.mark.slow
def test_bf16_stays_near_one_process_in_bf16(ranks):
    fields = dict(pp=2, micro_batches=2, precision="bf16", recompute="full")
    found = ranks(4, parity.train, "gpt_tied", dict(zero=1, **fields), STEPS)[0]
    alone = ranks(1, parity.train, "gpt_tied", dict(micro_batches=2, precision="bf16"), STEPS)[0]
    torch.testing.assert_close(torch.tensor(found["losses"]), torch.tensor(alone["losses"]), rtol=2e-3, atol=0)
    assert all(v.dtype == alone["state"][n].dtype for n, v in found["state"].items())


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zbv", marks=pytest.mark.slow)])
def test_recomputed_blocks_drop_what_they_dropped(ranks, schedule):
    fields = dict(pp=2, micro_batches=4, pp_schedule=schedule)
    plain = ranks(2, parity.train, "gpt_dropout", fields, STEPS)[0]
    again = ranks(2, parity.train, "gpt_dropout", dict(recompute="full", **fields), STEPS)[0]
    parity.assert_same(again, plain, 1e-5)


def _initial(build: Any, fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(dist.get_rank())
    model = build or GPT(61, 16, 2, 2, 30, tie_embeddings=True)  # other weights on each rank
    engine = ts.parallelize(
        model, ts.Plan(**fields), optimizer=parity.ADAMW, loss_fn=parity.loss_function("gpt"), seed=5
    )
    return engine.full_state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("build", [partial(GPT, 61, 16, 2, 2, 30, tie_embeddings=True), None])
def test_initial_weights_do_not_depend_on_the_pipeline(ranks, build):
    alone = ranks(1, _initial, build, dict())[0]
    for world, fields in ((2, dict(pp=2, micro_batches=2)), (4, dict(pp=2, tp=2, micro_batches=2))):
        found = ranks(world, _initial, build, fields)[0]
        assert list(found) == list(alone)
        assert all(torch.equal(found[name], value) for name, value in alone.items())


def _scales(fields: dict[str, Any]) -> tuple[list[float], list[int], bool]:
    engine = parity.make_engine("gpt", fields)
    before = [p.detach().clone() for p in engine.sharded.masters().values()]
    assert engine.scaler is not None
    engine.scaler.scale = 2.0**40  # the first steps overflow
    scales = []
    for step in range(3):
        engine.step(*parity.shard(engine, *parity.batch("gpt", step)))
        scales.append(engine.scaler.scale)
    after = engine.sharded.masters().values()
    return scales, [engine.step_count], all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_fp16_steps_are_skipped_on_all_stages_together(ranks):
    found = ranks(2, _scales, dict(pp=2, micro_batches=2, precision="fp16"))
    assert all(result == ([2.0**39, 2.0**38, 2.0**37], [3], True) for result in found)


def _evaluate(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    engine = parity.make_engine(kind, fields)
    inputs, targets = parity.batch(kind, 0, 7)  # which four micro-batches do not divide
    one_input, one_target = parity.batch(kind, 1, 1)
    found: dict[str, Any] = {
        "loss": engine.evaluate(inputs, targets).item(),
        "one": engine.evaluate(one_input, one_target).item(),
        "output": engine.predict(inputs),
    }
    last = engine.step(*parity.batch(kind, 2, 4))  # a smaller batch than the next one
    found["steps"] = [last.item(), engine.step(*parity.batch(kind, 3, 8)).item()]
    found["training"] = engine.model.training
    return found


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_evaluation_outputs_and_batches_of_other_sizes(ranks, schedule):
    found = ranks(2, _evaluate, "bert", dict(pp=2, micro_batches=4, pp_schedule=schedule))
    (expected,) = ranks(1, _evaluate, "bert", dict())
    for result in found:
        torch.testing.assert_close(result["output"], expected["output"], rtol=1e-5, atol=1e-6)
        for name in ("loss", "one", "steps"):
            torch.testing.assert_close(torch.tensor(result[name]), torch.tensor(expected[name]), rtol=1e-5, atol=1e-6)
        assert result["training"]


def test_outputs_that_are_no_tensors(ranks):
    output = ranks(2, _predict_llama)[1]
    assert type(output).__name__ == "CausalLMOutputWithPast"
    assert output.logits.shape == (4, 12, 61)


def _predict_llama() -> Any:
    engine = parity.make_engine("llama", dict(pp=2, micro_batches=2))
    return engine.predict(parity.batch("llama", 0, 4)[0])


def _train_and_save(kind: str, fields: dict[str, Any], path: str) -> list[float]:
    engine = parity.make_engine(kind, fields)
    for step in range(3):
        engine.step(*parity.shard(engine, *parity.batch(kind, step)))
    engine.save(path, extra={"epoch": 1})
    return [engine.step(*parity.shard(engine, *parity.batch(kind, step))).item() for step in range(3, 6)]


def _load_and_train(kind: str, fields: dict[str, Any], path: str) -> list[float]:
    engine = parity.make_engine(kind, fields)
    with torch.no_grad():
        for master in engine.sharded.masters().values():
            master.zero_()
    assert engine.load(path) == {"epoch": 1}
    assert engine.step_count == 3
    return [engine.step(*parity.shard(engine, *parity.batch(kind, step))).item() for step in range(3, 6)]


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2-zero1": (4, dict(pp=2, zero=1, micro_batches=4)),
    "zbv": (2, dict(pp=2, pp_schedule="zbv", micro_batches=4)),
    "pp2-tp2": (4, dict(pp=2, tp=2, micro_batches=2)),
    "zero3": (2, dict(zero=3, micro_batches=4)),
}


@pytest.mark.slow
@pytest.mark.parametrize("written", ["pp2-zero1", "zero3"])
def test_checkpoints_go_from_any_plan_to_any_other(ranks, tmp_path, written):
    world, fields = LAYOUTS[written]
    path = str(tmp_path / "checkpoint")
    undisturbed = ranks(world, _train_and_save, "gpt_tied", fields, path)[0]
    for world_size, other in LAYOUTS.values():
        resumed = ranks(world_size, _load_and_train, "gpt_tied", other, path)
        for losses in resumed:
            torch.testing.assert_close(torch.tensor(losses), torch.tensor(undisturbed), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_buffers_are_in_checkpoints(ranks, tmp_path):
    path = str(tmp_path / "checkpoint")
    fields = dict(pp=2, micro_batches=2)
    undisturbed = ranks(2, _train_and_save, "resnet", fields, path)[0]
    for world_size, other in ((2, fields), (1, dict(micro_batches=2))):
        losses = ranks(world_size, _load_and_train, "resnet", other, path)[0]
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(undisturbed), rtol=1e-5, atol=1e-5)


def _described(path: str) -> dict[str, Any]:
    engine = parity.make_engine("gpt_tied", dict(pp=2, micro_batches=4), as_callable=True)
    scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, gamma=0.5)
    engine.step(*parity.batch("gpt_tied", 0))
    scheduler.step()
    text = engine.draw_schedule(path)
    try:
        engine.model(parity.batch("gpt_tied", 0)[0])
        message = ""
    except RuntimeError as error:
        message = str(error)
    return {
        "text": text,
        "mesh": engine.mesh.describe(),
        "summary": engine.summary().describe(),
        "lr": engine.optimizer.param_groups[0]["lr"],
        "held": engine.sharded.held_numel(),
        "message": message,
    }


def test_what_is_shown(ranks, tmp_path):
    path = tmp_path / "schedule.svg"
    first, second = ranks(2, _described, str(path))
    assert "1f1b: 2 ranks, 4 micro-batches; bubble 20.0%" in first["text"]
    assert path.read_text().startswith("<svg")
    assert "stages of this rank: 1 of 2 (1f1b)" in second["mesh"]
    assert "stage 0 " in first["summary"] and "gradients are added" in first["summary"]
    whole = sum(p.numel() for p in parity.build("gpt_tied").parameters())
    assert f"{whole:,} in the model" in second["summary"]
    shared = parity.build("gpt_tied").embedding.weight.numel()
    assert first["held"] + second["held"] == whole + shared  # the tied one is on both
    assert first["lr"] == second["lr"] == parity.ADAMW.keywords["lr"] / 2
    assert "engine.predict" in first["message"]


class Frozen(nn.Module):
    """Its first stage has nothing to train."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))
        self.layers[:2].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _train_frozen(fields: dict[str, Any], path: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = ts.parallelize(
        Frozen(),
        ts.Plan(clip_grad_norm=0.1, **fields),
        optimizer=partial(torch.optim.AdamW, lr=0.1),
        loss_fn=nn.functional.mse_loss,
    )
    x = torch.linspace(-1, 1, 24).view(4, 6)
    losses = [engine.step(x, x * 2).item() for _ in range(3)]
    engine.save(path)
    engine.load(path)
    return [*losses, engine.step(x, x * 2).item()], engine.full_state_dict()


@pytest.mark.parametrize("level", [0, 3])
def test_a_stage_may_have_nothing_to_train(ranks, tmp_path, level):
    fields = dict(pp=2, pp_split=["layers.2"], micro_batches=2, zero=level, dp_replicate=1, dp_shard=1)
    losses, state = ranks(2, _train_frozen, fields, str(tmp_path / "pipeline"))[0]
    expected, weights = ranks(1, _train_frozen, dict(), str(tmp_path / "alone"))[0]
    parity.assert_same({"losses": losses, "state": state}, {"losses": expected, "state": weights}, 1e-5)


class TwoInputs(nn.Module):
    """Every block reads the second input; a plain number is one of the third."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor, gate: torch.Tensor, power: int = 1) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x * gate**power)
        return {"x": x, "gated": x * gate}


def _two_losses(output: dict[str, torch.Tensor], targets: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    kept = targets["kept"]
    first = (output["x"] - targets["pair"][0]).square().mean(1)
    second = (output["gated"] - targets["pair"][1]).abs().mean(1)
    return ((first + second) * kept).sum(), kept.sum()


def _train_two_inputs(fields: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    x, gate = torch.linspace(-1, 1, 48).view(8, 6), torch.linspace(0.5, 1.5, 8).view(8, 1)
    inputs = (x, gate, 2)
    targets = {"pair": (x.flip(0), x.flip(1)), "kept": torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0])}
    engine = ts.parallelize(
        TwoInputs(),
        ts.Plan(**fields),
        optimizer=partial(torch.optim.SGD, lr=0.5),
        loss_fn=_two_losses,
        sample_inputs=inputs,
    )
    losses = [engine.step(inputs, targets).item() for _ in range(4)]
    return [*losses, engine.evaluate(inputs, targets).item()], engine.predict(inputs)


def test_several_inputs_and_targets_of_any_structure(ranks):
    expected, output = ranks(1, _train_two_inputs, dict())[0]
    for losses, outputs in ranks(2, _train_two_inputs, dict(pp=2, micro_batches=4)):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(outputs, output, rtol=1e-5, atol=1e-6)


# Bad inputs.


def _message(kind: str, fields: dict[str, Any], **options: Any) -> str:
    try:
        ts.parallelize(
            parity.build(kind),
            ts.Plan(**{"pp": 2, "micro_batches": 4, **fields}),
            optimizer=parity.ADAMW,
            loss_fn=parity.loss_function(kind),
            **options,
        )
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(micro_batches=1), "needs at least micro_batches=2, and micro_batches is 1; use 2 or more, or the gpipe"),
        (dict(pp_split=["blocks.9"]), "pp_split names 'blocks.9', which is no module that is called; did you mean"),
        (dict(pp_split=["blocks.0.mlp"]), "is inside of 'blocks.0', and that runs on one stage as a whole"),
        (dict(pp_split=["blocks.1", "head"]), "pp_split names 2 modules"),
        (
            dict(tp=2, pp_units=["blocks.1.mlp"], sequence_parallel=True),
            "is inside of 'blocks.1', and with sequence_parallel=True",
        ),
        (dict(pp_units=["block.*"]), "no module of the model is called 'block.*'"),
        (dict(pp_schedule="pipedream"), "pp_schedule is 'pipedream'; "),
        (dict(pp_stages_per_rank=3), "the 1f1b schedule needs 1 stage a rank, and there are 3"),
        (dict(pp_schedule="looped_bfs", pp_stages_per_rank=9), "which cannot make 18 stages"),
        (dict(pp=1, dp_shard=2, pp_schedule="zbv"), "pp_schedule='zbv' was given, but pp=1 makes no pipeline"),
    ],
)
def test_plans_that_cannot_be_honoured(ranks, fields, words):
    for message in ranks(2 * fields.get("tp", 1), _message, "gpt", fields):
        assert words in message


def test_sample_inputs_that_do_not_fit_are_named(ranks):
    for message in ranks(2, _message_of_a_model_that_cannot_be_guessed):
        assert "sample_inputs=" in message and "needs scale" in message


class Unguessable(Frozen):
    def forward(self, x: torch.Tensor, *, scale: torch.Tensor | None = None) -> torch.Tensor:
        if scale is None:
            raise TypeError("needs scale")
        return super().forward(x * scale)


def _message_of_a_model_that_cannot_be_guessed() -> str:
    arguments: dict[str, Any] = {
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "loss_fn": nn.functional.mse_loss,
    }
    plan = ts.Plan(pp=2, micro_batches=2)
    inputs = {"x": torch.ones(4, 6), "scale": torch.full((4, 1), 0.5)}
    engine = ts.parallelize(Unguessable(), plan, sample_inputs=inputs, **arguments)
    assert engine.step(inputs, torch.zeros(4, 6)).isfinite()
    try:
        ts.parallelize(Unguessable(), plan, **arguments)
    except ValueError as error:
        return str(error)
    return ""


def _unsplittable_batch() -> str:
    engine = parity.make_engine("gpt", dict(pp=2, micro_batches=4))
    try:
        engine.step(*parity.batch("gpt", 0, 6))
    except ValueError as error:
        message = str(error)
    loss = engine.step(*parity.batch("gpt", 0, 8))  # and goes on
    assert loss.isfinite()
    return message


def test_a_batch_that_does_not_split(ranks):
    for message in ranks(2, _unsplittable_batch):
        assert "a batch of 6 samples on this rank does not split into micro_batches=4" in message


def _steps_around_a_bad_batch(fields: dict[str, Any]) -> tuple[list[float], str, int]:
    engine = parity.make_engine("resnet", fields)
    images, labels = parity.batch("resnet", 0)
    losses = [engine.step(images, labels).item()]
    try:
        engine.step(images.fill_(float("inf")), labels)
        message = ""
    except NonFiniteLossError as error:
        message = str(error)
    losses.append(engine.step(*parity.batch("resnet", 1)).item())
    losses.append(engine.evaluate(*parity.batch("resnet", 2)).item())  # by the running statistics
    return losses, message, engine.step_count


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_said_on_every_stage_and_leaves_no_trace(ranks):
    alone, _, _ = ranks(1, _steps_around_a_bad_batch, dict(micro_batches=2))[0]
    for losses, message, count in ranks(2, _steps_around_a_bad_batch, dict(pp=2, micro_batches=2)):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(alone), rtol=1e-5, atol=1e-6)
        assert "the loss of step 2 is nan" in message and count == 2


def _steps_around_a_loss_that_fails(fields: dict[str, Any], failing: int) -> list[float]:
    def loss_fn(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if failing == len(losses):
            raise ZeroDivisionError("made by the test")
        return nn.functional.cross_entropy(output, labels)

    losses: list[float] = []
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)])
    sgd = partial(torch.optim.SGD, lr=0.1)
    engine = ts.parallelize(model, ts.Plan(**fields), optimizer=sgd, loss_fn=loss_fn, sample_inputs=torch.ones(4, 6))
    for step in range(4):
        x, y = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)), torch.arange(8) % 6
        try:
            losses.append(engine.step(x, y).item())
        except ZeroDivisionError:
            losses.append(0.0)
    return losses


@pytest.mark.parametrize("failing", [0, 2])
def test_training_goes_on_after_a_loss_that_failed(ranks, failing):
    alone = ranks(1, _steps_around_a_loss_that_fails, dict(micro_batches=2), failing)[0]
    for losses in ranks(2, _steps_around_a_loss_that_fails, dict(pp=2, micro_batches=2), failing):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(alone), rtol=1e-5, atol=1e-6)


class CountsCalls(nn.Module):
    """The statistics of its norm would be changed by two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(self.norm(x))
        return self.norm(x)


def _cut_through_state() -> str:
    try:
        ts.parallelize(
            CountsCalls(),
            ts.Plan(pp=2, micro_batches=2),
            optimizer=partial(torch.optim.SGD, lr=0.1),
            loss_fn=nn.functional.mse_loss,
        )
    except ValueError as error:
        return str(error)
    return ""


def test_a_cut_through_a_module_with_state_names_it(ranks):
    for message in ranks(2, _cut_through_state):
        assert "'norm' is called on both sides and changes its buffers" in message


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))
        self.layers[3].register_forward_pre_hook(self.fail)
        self.steps = 0

    def fail(self, *_: Any) -> None:
        if self.training and not isinstance(self.layers[3][0].weight, nn.Parameter):
            return
        self.steps += 1
        if self.steps == 4 and dist.is_initialized() and not _is_fake(self.layers[3][0].weight):
            raise ArithmeticError("the third layer had enough")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _is_fake(tensor: torch.Tensor) -> bool:
    return type(tensor.data).__name__ == "FakeTensor"


def fail_on_a_stage(folder: str) -> None:
    engine = ts.parallelize(
        Failing(),
        ts.Plan(pp=2, micro_batches=2),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        loss_fn=nn.functional.mse_loss,
    )
    Path(folder, f"rank{dist.get_rank()}.pid").write_text(str(os.getpid()))
    for _ in range(50):
        engine.step(torch.ones(4, 6), torch.ones(4, 6))


@pytest.mark.slow
def test_an_exception_on_one_stage_ends_every_rank_with_its_traceback(tmp_path):
    with pytest.raises(WorkerFailedError) as caught:
        launch(fail_on_a_stage, [str(tmp_path)], World(2))
    workers = [int((tmp_path / f"rank{rank}.pid").read_text()) for rank in range(2)]
    message = str(caught.value)
    assert "ArithmeticError: the third layer had enough" in message
    assert "on stage 1 of 2 (pipeline rank 1)" in message and "rank 1 of 2 failed" in message
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


class Residual(nn.Module):
    """Blocks that add their input. A stage may end at a normalization inside of one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6), nn.BatchNorm1d(6))
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def _steps_of_residuals(fields: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor] | None]:
    torch.manual_seed(0)
    engine = ts.parallelize(
        Residual(), ts.Plan(**fields), optimizer=partial(torch.optim.SGD, lr=0.1), loss_fn=nn.functional.mse_loss
    )
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    return [float(engine.step(x * n, x)) for n in (1, 2, 3)], engine.full_state_dict()


@pytest.mark.parametrize("split", ["blocks.1.1", "blocks.1.4", "blocks.1.0"])
def test_stages_that_end_at_a_normalization(ranks, split):
    losses, state = ranks(1, _steps_of_residuals, dict(micro_batches=2))[0]
    cut = dict(pp=2, micro_batches=2, pp_units=["blocks.*.*"], pp_split=[split])
    found, parts = ranks(2, _steps_of_residuals, cut)[0]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(parts, state, rtol=1e-5, atol=1e-6)
