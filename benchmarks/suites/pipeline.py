"""Pipelines on CPU ranks: bubbles against the formula, time against torch's and DeepSpeed's, and layouts compared."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date

from benchmarks.harness.contender import Contender
from benchmarks.harness.hardware import installed_versions
from benchmarks.harness.pipelines import measure_pipelines
from benchmarks.harness.report import make_console, print_group, write_results
from benchmarks.harness.results import Group, Quantity, make_rows
from benchmarks.pipelines import PipelineWork
from benchmarks.registry import Suite, positive_int

ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
RUN_TIMEOUT = 900.0  # seconds

SLEEPING = PipelineWork("sleeping stages", blocks=4, width=64, tokens=8, micro_batches=8, sleep_seconds=0.1)
COMPUTING = PipelineWork("8 MLP blocks", blocks=8, width=512, tokens=256, micro_batches=8)

QUANTITIES = (
    Quantity("step_seconds", "step time", "s"),
    Quantity("cpu_seconds", "CPU time of all ranks", "s"),
    Quantity("bubble", "bubble", "share"),
)


def formula(ranks: int, micro_batches: int) -> float:
    """The share of a step that a rank waits, with equal stages and free communication (Narayanan et al. 2019)."""
    return (ranks - 1) / (micro_batches + ranks - 1)


def peers() -> list[Contender]:
    """What pipelines are compared with."""
    return [
        Contender("torch pipelining, 1f1b", "pipeline_torch", "torch.distributed.pipelining"),
        Contender("torch pipelining, gpipe", "pipeline_torch", "torch.distributed.pipelining", {"schedule": "gpipe"}),
        Contender("DeepSpeed PipelineModule", "pipeline_deepspeed", "deepspeed"),
    ]


def ours(ranks: int, *, stages_per_rank: bool) -> list[Contender]:
    """tensorshard's schedules; with `stages_per_rank` those, too, that give a rank two stages."""
    names = ["1f1b", "gpipe"]
    names += ["interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"] if stages_per_rank else []
    return [
        Contender(f"tensorshard pp={ranks}, {name}", "pipeline_ours", "tensorshard.engine", {"pp_schedule": name})
        for name in names
    ]


def layouts(ranks: int) -> list[Contender]:
    """Ways to lay the same work out over `ranks`."""
    plans = {
        f"dp_shard={ranks}, zero=1": {"pp": 1, "zero": 1},
        f"dp_shard={ranks}, zero=3": {"pp": 1, "zero": 3},
        f"tp={ranks}": {"pp": 1, "tp": ranks},
        f"dp_shard={ranks // 2}, tp=2": {"pp": 1, "tp": 2, "zero": 1},
        f"pp=2, dp_shard={ranks // 2}": {"pp": 2, "zero": 1},
        "pp=2, tp=2": {"pp": 2, "tp": 2, "zero": 0},
        f"pp={ranks}": {"pp": ranks, "zero": 0},
    }
    return [
        Contender(f"tensorshard {name}", "pipeline_ours", "tensorshard.engine", plan) for name, plan in plans.items()
    ]


def measure_group(
    title: str, work: PipelineWork, lineup: Sequence[Contender], ranks: int, *, rounds: int, measured_steps: int
) -> Group:
    """Measures contenders on the same work in turn."""
    measured = measure_pipelines(
        work,
        [contender for contender in lineup if contender.installed],
        ranks,
        rounds=rounds,
        warmup_steps=2,
        measured_steps=measured_steps,
        environment=ENVIRONMENT,
        timeout=RUN_TIMEOUT,
    )
    samples = {q: {name: getattr(of, q) for name, of in measured.items()} for q in ("step_seconds", "cpu_seconds")}
    if work.sleep_seconds:
        ideal = work.ideal_seconds(ranks)
        samples = {
            "step_seconds": samples["step_seconds"],
            "bubble": {name: [1 - ideal / s for s in of.step_seconds] for name, of in measured.items()},
        }
    return Group(
        title=title,
        date=date.today().isoformat(),
        versions=installed_versions(["torch", "deepspeed", "tensorshard"]),
        settings={"ranks": ranks, "rounds": rounds, "measured_steps": measured_steps, **asdict(work)},
        rows=make_rows(
            samples,
            # Layouts of ours alone are compared with the best of them.
            ours=[c.name for c in lineup if c.ours] if any(not c.ours for c in lineup) else [],
            notes={contender.name: "not installed" for contender in lineup if not contender.installed},
        ),
    )


def groups() -> dict[str, tuple[PipelineWork, list[Contender], int]]:
    """What is measured, by title: the work, its contenders and the number of ranks."""
    groups: dict[str, tuple[PipelineWork, list[Contender], int]] = {}
    for ranks in (2, 4):
        share = formula(ranks, SLEEPING.micro_batches)
        title = f"sleeping stages, {ranks} ranks, {SLEEPING.micro_batches} micro-batches: (p-1)/(m+p-1) = {share:.1%}"
        groups[title] = (SLEEPING, [*peers(), *ours(ranks, stages_per_rank=ranks == 2)], ranks)
    for ranks in (2, 4):
        lineup = [*peers(), *ours(ranks, stages_per_rank=False)]
        groups[f"{COMPUTING.name}, {ranks} ranks"] = (COMPUTING, lineup, ranks)
    groups[f"{COMPUTING.name}, layouts of 4 ranks"] = (COMPUTING, layouts(4), 4)
    return groups


def run(arguments: argparse.Namespace) -> int:
    console = make_console()
    rounds, measured_steps = (2, 1) if arguments.quick else (arguments.rounds, 3)
    for title, (work, lineup, ranks) in groups().items():
        if arguments.only and not any(part in title for part in arguments.only):
            continue
        with console.status(title):
            steps = 1 if work.sleep_seconds else measured_steps  # sleeping takes long, and equally long
            group = measure_group(title, work, lineup, ranks, rounds=rounds, measured_steps=steps)
        print_group(console, group, [q for q in QUANTITIES if q.key in group.rows[0].values])
        if not arguments.quick:  # at once, so that an interrupted run keeps what it has measured
            write_results(console, "pipeline", QUANTITIES, [group])
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", help="groups whose title has one of these in it")
    parser.add_argument(
        "--rounds", type=positive_int, default=8, help="how many turns each contender has (default %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="two turns of one step, of which nothing is written")


SUITE = Suite(
    "pipeline", "pipelines: bubbles, time against torch's and DeepSpeed's, layouts compared", add_arguments, run
)
