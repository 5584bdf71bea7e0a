"""Every schedule, on two ranks, gives the gradients of one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import strict_nccl
from pipeline_models import EXAMPLES
from tensorshard.model.batches import call_model, split_batch
from tensorshard.pipeline.cut import cut_model
from tensorshard.pipeline.run.cut_cache import CutCache
from tensorshard.pipeline.run.draw_schedule import timeline
from tensorshard.pipeline.run.schedule_runner import PipelineRunner, connect
from tensorshard.pipeline.run.stage_module import StageModule
from tensorshard.pipeline.run.torch_stage import StageHooks
from tensorshard.pipeline.trace.tracer import Tracer
from tensorshard.plan.schedules import SCHEDULES, check_schedule, find_schedule

DEEP = "bert"  # enough for eight stages


def _runner(kind: str, schedule: str, per_rank: int, rank: int, ranks: int, **options: Any) -> tuple[Any, Any]:
    model, sample = EXAMPLES[kind].make()
    model.eval()  # random masks would differ from the single process's
    tracer = Tracer(model)
    shapes = CutCache(tracer, cut_model(tracer.trace(sample), ranks * per_rank))
    stages = [StageModule(model, shapes, i) for i in find_schedule(schedule).stages_of(rank, ranks, per_rank)]
    return PipelineRunner(stages, schedule, **options), stages


class _Counts(StageHooks):
    def __init__(self) -> None:
        self.backwards: list[tuple[int, bool]] = []
        self.finished: list[int] = []

    def before_backward(self, stage: StageModule, micro_batch: int, last: bool) -> None:
        self.backwards.append((stage.index, last))

    def after_last_backward(self, stage: StageModule) -> None:
        self.finished.append(stage.index)


def _train(kind: str, schedule: str, per_rank: int, count: int, steps: int, split: bool = True) -> dict[str, Any]:
    """Losses and gradients of some steps; what is asked of hooks is checked on the way."""
    torch.manual_seed(0)
    hooks = _Counts()
    runner, stages = _runner(kind, schedule, per_rank, dist.get_rank(), dist.get_world_size(), hooks=hooks, split=split)
    example = EXAMPLES[kind]
    losses: list[float] = []
    evaluated: list[float] = []
    for step in range(steps):
        inputs = example.make(samples=2 * count, size=8 - step)[1]  # another length each time
        parts = [part for part, _ in split_batch(inputs, torch.zeros(2 * count), count)]

        def loss(index: int, output: Any) -> torch.Tensor:
            value = example.loss(output)
            losses.append(value.item())
            return value / count

        runner.step(parts, loss)
        runner.forward(parts, lambda index, output: evaluated.append(example.loss(output).item()))
    for stage in stages:
        mine = [last for index, last in hooks.backwards if index == stage.index]
        assert mine == ([False] * (count - 1) + [True]) * steps, mine
    assert sorted(hooks.finished) == sorted([stage.index for stage in stages] * steps)
    gradients: dict[str, list[torch.Tensor]] = {}
    seen: set[int] = set()
    for stage in stages:
        for name, parameter in stage.module.named_parameters():
            if parameter.grad is not None and id(parameter) not in seen:  # shared by this rank's stages: one object
                seen.add(id(parameter))
                gradients.setdefault(name, []).append(parameter.grad)
    return {"losses": losses, "evaluated": evaluated, "gradients": {n: sum(g) for n, g in gradients.items()}}


def _reference(kind: str, count: int, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    example = EXAMPLES[kind]
    model, _ = example.make()
    model.eval()
    losses = []
    for step in range(steps):
        inputs = example.make(samples=2 * count, size=8 - step)[1]
        for part, _ in split_batch(inputs, torch.zeros(2 * count), count):
            loss = example.loss(call_model(model, part))
            losses.append(loss.item())
            (loss / count).backward()
    return losses, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _check(results: list[dict[str, Any]], kind: str, count: int, steps: int) -> None:
    losses, gradients = _reference(kind, count, steps)
    found = next(result for result in results if result["losses"])
    torch.testing.assert_close(torch.tensor(found["losses"]), torch.tensor(losses), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.tensor(found["evaluated"]), torch.tensor(losses), rtol=1e-5, atol=1e-5)
    summed: dict[str, torch.Tensor] = {}
    for result in results:
        for name, gradient in result["gradients"].items():
            summed[name] = summed[name] + gradient if name in summed else gradient
    assert summed.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(summed[name], gradient, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_trains_as_one_process_does(ranks, schedule):
    per_rank = SCHEDULES[schedule].stages_per_rank or 2
    _check(ranks(2, _train, "gpt_tied", schedule, per_rank, 4, 2), "gpt_tied", 4, 2)


def _train_by_the_rules(schedule: str, per_rank: int) -> tuple[dict[str, Any], list[strict_nccl.Logged]]:
    rank_of = [find_schedule(schedule).rank_of(stage, 4) for stage in range(4 * per_rank)]
    connect(dist.group.WORLD, rank_of, torch.device("cpu"))
    return _train(DEEP, schedule, per_rank, 8, 2), strict_nccl.log()


@pytest.mark.slow
@pytest.mark.parametrize("backend", strict_nccl.NAMES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_keeps_the_rules_of_nccl(ranks, schedule, backend):
    per_rank = SCHEDULES[schedule].stages_per_rank or 2
    found = ranks(4, _train_by_the_rules, schedule, per_rank, backend=backend, group_timeout=60)
    _check([result for result, _ in found], DEEP, 8, 2)
    strict_nccl.check_order([log for _, log in found])


@pytest.mark.parametrize(
    ("kind", "schedule"),
    [("unet", "1f1b"), ("mixer", "interleaved_zero_bubble"), ("bare", "zbv"), ("pairs", "dualpipev"), ("vit", "zbv")],
)
def test_models_of_other_shapes_on_schedules(ranks, kind, schedule):
    per_rank = SCHEDULES[schedule].stages_per_rank or 2
    _check(ranks(2, _train, kind, schedule, per_rank, 4, 1), kind, 4, 1)


def test_backward_may_be_kept_in_one_piece(ranks):
    _check(ranks(2, _train, "gpt", "zbv", 2, 4, 1, split=False), "gpt", 4, 1)


def _run_with_wrong_stages() -> str:
    try:
        _runner("gpt", "zbv", 1, dist.get_rank(), dist.get_world_size())
    except ValueError as error:
        return str(error)
    return ""


def test_stages_must_be_those_of_the_schedule(ranks):
    assert "needs 2 stages" in ranks(2, _run_with_wrong_stages)[0]


def _fails() -> str:
    import torch.distributed as dist

    example = EXAMPLES["gpt"]
    runner, stages = _runner("gpt", "gpipe", 1, dist.get_rank(), dist.get_world_size())
    parts = [example.make()[1] for _ in range(3)]
    found = ""
    try:
        runner.step(parts, lambda index, output: example.loss(output)[None].expand(2))
    except RuntimeError as error:
        found = str(error)
    return found if stages[0].is_last else "sent"


def test_an_error_of_the_loss_is_raised_by_its_rank(ranks):
    with pytest.raises(AssertionError, match="grad can be implicitly created only for scalar outputs"):
        ranks(2, _raise_on_last, timeout=20)


def _raise_on_last() -> None:
    import torch.distributed as dist

    message = _fails()
    if dist.get_rank() == 1:
        raise RuntimeError(message)


def _failing_loss() -> list[str]:
    example = EXAMPLES["gpt"]
    runner, _ = _runner("gpt", "gpipe", 1, 0, 1)

    def loss(index: int, output: Any) -> torch.Tensor:
        if index == 1:
            raise ArithmeticError("no loss today")
        return example.loss(output)

    try:
        runner.step([example.make()[1] for _ in range(3)], loss)
    except ArithmeticError as error:
        return error.__notes__
    return []


def test_an_error_of_the_loss_says_where(ranks):
    assert ranks(1, _failing_loss) == [["in the loss of micro-batch 1 (pipeline rank 0)"]]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("count", "micro_batches"), [(2, 4), (4, 8), (4, 16)])
def test_bubble_and_memory_are_those_of_the_table(name, count, micro_batches):
    schedule = SCHEDULES[name]
    v = schedule.stages_per_rank or 2
    played = timeline(name, ranks=count, stages_per_rank=v, micro_batches=micro_batches)
    known = {"p": count, "v": v, "m": micro_batches}
    assert played.bubble == pytest.approx(eval(schedule.bubble, known))
    assert max(played.kept(rank) for rank in range(count)) == pytest.approx(eval(schedule.memory, known) * v)


def test_pictures(tmp_path):
    played = timeline("1f1b", ranks=2, stages_per_rank=1, micro_batches=3)
    assert played.text().splitlines() == [
        "1f1b: 2 ranks, 3 micro-batches; bubble 25.0%",
        "rank 0  F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2",
        "rank 1  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 .  .",
        "F: forward, B: backward, .: waiting",
    ]
    played.save(tmp_path / "schedule.svg")
    import xml.etree.ElementTree as ET

    picture = ET.parse(tmp_path / "schedule.svg").getroot()
    assert len(picture.findall("{http://www.w3.org/2000/svg}g")) == 2 * 2 * 3
    with pytest.raises(ValueError, match=r"ends in '\.png'"):
        played.save(tmp_path / "schedule.png")


@pytest.mark.parametrize(
    ("name", "numbers", "message"),
    [
        ("1f1b", (4, None, 3), "at least micro_batches=4"),
        ("dualpipev", (2, None, 3), "at least micro_batches=4"),
        ("interleaved_1f1b", (2, None, 5), "use 4 or 6"),
        ("interleaved_zero_bubble", (4, 1, 8), "at least 2 stages a rank"),
        ("gpipe", (2, 2, 8), "needs 1 stage a rank"),
        ("zbv", (2, 3, 8), "needs 2 stages a rank"),
        ("interleaved", (2, 2, 8), "did you mean 'interleaved_1f1b'"),
        ("1F1B", (2, 3, 8), "did you mean '1f1b'"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(name, numbers, message):
    ranks, stages, micro_batches = numbers
    with pytest.raises(ValueError, match=message):
        check_schedule(name, ranks=ranks, stages_per_rank=stages, micro_batches=micro_batches)


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_accepted_torch_accepts(name):
    """Whatever check_schedule lets pass, torch's own schedule can be made of and played through."""
    for count in (2, 3, 4):
        for stages in (1, 2, 3):
            for micro_batches in range(1, 10):
                numbers = {"ranks": count, "stages_per_rank": stages, "micro_batches": micro_batches}
                try:
                    check_schedule(name, **numbers)
                except ValueError:
                    continue
                played = timeline(name, **numbers)
                done = {timed.action for rank in played.ranks for timed in rank if timed.action.kind == "F"}
                assert len(done) == count * stages * micro_batches
