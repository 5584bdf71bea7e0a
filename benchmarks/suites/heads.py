"""Heads of many classes on CPU: one step of training, and how many classes would fit on GPUs of some sizes."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date

from rich.console import Console

from benchmarks.harness.contender import Contender
from benchmarks.harness.hardware import installed_versions
from benchmarks.harness.heads import job_of, measure_head
from benchmarks.harness.heads_group import measure_in_turn
from benchmarks.harness.report import make_console, print_group, write_results
from benchmarks.harness.results import Group, Quantity, make_rows
from benchmarks.heads import HeadWork
from benchmarks.registry import Suite, positive_int

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
RUN_TIMEOUT = 900.0  # seconds; some peers take a minute a step

WORKS = {
    work.name: work
    for work in (
        HeadWork("200 thousand classes", samples=256, features=512, classes=200_000),
        HeadWork("1 million classes", samples=256, features=512, classes=1_000_000),
    )
}
_QUICK = HeadWork("4 thousand classes", samples=16, features=64, classes=4_000)

QUANTITIES = (
    Quantity("step_seconds", "step time", "s"),
    Quantity("cpu_seconds", "CPU time", "s", headline=False),
    Quantity("peak_bytes", "peak memory above the states", "bytes"),
    Quantity("bytes_per_class", "states per class", "B"),
    Quantity("error", "largest error against fp64", "error"),
)

# What a card holds, in GB (1e9 bytes), and how many there are.
CARDS = {"8 x 12 GB": 8 * 12, "16 x 12 GB": 16 * 12, "8 x 32 GB": 8 * 32, "8 x 80 GB": 8 * 80}
WIDTHS = (512, 2048)
# Of a card's memory, for the states of the head; the rest is for the backbone, its activations and a tile of logits.
HEAD_SHARE = 0.9
FIT_QUANTITIES = (
    Quantity("bytes_per_class", "states per class", "B"),
    *(Quantity(cards, cards, "classes") for cards in CARDS),
)

# Options of our head: its narrower states.
SMALL = {"dtype": "bfloat16", "momentum_dtype": "bf16"}
SMALLEST = {"dtype": "bfloat16", "momentum_dtype": "int8"}


def contenders(world_size: int, classes: int) -> list[Contender]:
    """The peers for one process or several, then tensorshard.

    Args:
        classes: above a quarter of a million, peers that take minutes a step are left out.
    """
    torchshard = Contender("TorchShard, functional", "head_torchshard", "torchshard")
    if world_size > 1:
        peers = [
            torchshard,
            Contender("torch loss_parallel", "head_loss_parallel", "torch.distributed.tensor.parallel"),
        ]
        return [*peers, *_ours()]
    peers = [
        Contender("plain PyTorch", "head_plain", "torch"),
        torchshard,
        Contender("cut cross entropy, torch_compile", "head_cut_cross_entropy", "cut_cross_entropy"),
    ]
    if classes <= 250_000:
        peers.append(Contender("torch F.linear_cross_entropy, chunked", "head_torch_chunked", "torch"))
    return [*peers, *_ours()]


def _ours() -> list[Contender]:
    def ours(name: str, **options: object) -> Contender:
        return Contender(f"tensorshard, {name}", "head_ours", "tensorshard.nn", dict(options))

    return [
        ours("gradients", update=False),
        ours("update in backward"),
        ours("update, no logits kept", keep_logits=False),
        ours("update, bf16 logits kept", keep_logits=True),
        ours("update, bf16 states", keep_logits=False, **SMALL),
        ours("update, bf16 and 8 bits", keep_logits=False, **SMALLEST),
        ours("update, bf16 and 8 bits, bf16 logits kept", keep_logits=True, **SMALLEST),
    ]


def obstacle(contender: Contender) -> str:
    """Why a contender cannot be measured here; empty if it can."""
    if not contender.installed:
        return "not installed"
    if contender.builder == "head_torch_chunked":
        from torch import nn

        if not hasattr(nn, "LinearCrossEntropyOptions"):
            return "not in this version of torch"
    return ""


def measure_group(
    work: HeadWork,
    world_size: int,
    *,
    rounds: int,
    measured_steps: int,
    console: Console,
    only: Sequence[str] = (),
) -> Group:
    """Measures the contenders in turn, `rounds` times over; one process has two threads, ranks have one each."""
    lineup = [c for c in contenders(world_size, work.classes) if not only or c.name in only]
    ranks = "one process" if world_size == 1 else f"{world_size} ranks"
    return measure_in_turn(
        work,
        lineup,
        world_size,
        title=f"{work.name}, {ranks}",
        quantities=QUANTITIES,
        obstacles={contender.name: reason for contender in lineup if (reason := obstacle(contender))},
        packages=("torch", "torchshard", "cut-cross-entropy", "tensorshard"),
        rounds=rounds,
        measured_steps=measured_steps,
        threads=2 if world_size == 1 else 1,
        environment=NO_GPU,
        timeout=RUN_TIMEOUT,
        console=console,
    )


def measure_fit(features: int, *, classes: int = 2048) -> Group:
    """How many classes the states of a head leave room for, by the bytes per class of a small head that was trained."""
    work = HeadWork("", samples=8, features=features, classes=classes)
    forms = {
        "tensorshard, fp32, update": {},
        "tensorshard, bf16 weight and momentum, update": SMALL,
        "tensorshard, bf16 weight, 8-bit momentum, update": SMALLEST,
    }
    # A plain layer also holds a gradient of its weight, and logits and their gradients, which are not counted here.
    lineup = [Contender("plain PyTorch, with its gradient", "head_plain", "torch")]
    lineup += [Contender(name, "head_ours", "tensorshard.nn", dict(options)) for name, options in forms.items()]
    samples: dict[str, dict[str, list[float]]] = {q.key: {} for q in FIT_QUANTITIES}
    for contender in lineup:
        job = job_of(contender, work, threads=1, exact=False, warmup_steps=1, measured_steps=1)
        bytes_per_class = measure_head(job, 1, environment=NO_GPU, timeout=RUN_TIMEOUT).bytes_per_class
        if contender.builder == "head_plain":
            bytes_per_class += 4 * features
        samples["bytes_per_class"][contender.name] = [bytes_per_class]
        for cards, gigabytes in CARDS.items():
            samples[cards][contender.name] = [HEAD_SHARE * gigabytes * 1e9 / bytes_per_class]
    return Group(
        title=f"{features} features",
        date=date.today().isoformat(),
        versions=installed_versions(["torch", "tensorshard"]),
        settings={"share of memory for the head": HEAD_SHARE, **asdict(work)},
        rows=make_rows(samples, ours=[contender.name for contender in lineup if contender.ours]),
    )


def run(arguments: argparse.Namespace) -> int:
    console = make_console()
    works = [_QUICK] if arguments.quick else [WORKS[name] for name in arguments.work or WORKS]
    rounds, measured_steps = (2, 2) if arguments.quick else (arguments.rounds, 3)
    for work in [] if arguments.fit else works:
        for world_size in arguments.ranks:
            group = measure_group(
                work,
                world_size,
                rounds=rounds,
                measured_steps=measured_steps,
                console=console,
                only=arguments.only or (),
            )
            print_group(console, group, QUANTITIES)
            if not arguments.quick:  # at once, so that an interrupted run keeps what it has measured
                write_results(console, "heads", QUANTITIES, [group])
    fits = [measure_fit(features) for features in WIDTHS]
    for group in fits:
        print_group(console, group, FIT_QUANTITIES)
    if not arguments.quick:
        write_results(console, "heads-fit", FIT_QUANTITIES, fits)
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--work", choices=list(WORKS), nargs="+", help="these heads instead of all")
    parser.add_argument("--ranks", type=positive_int, nargs="+", default=[1, 2], help="numbers of ranks (default 1 2)")
    parser.add_argument("--only", nargs="+", metavar="CONTENDER", help="these contenders instead of all")
    parser.add_argument(
        "--rounds", type=positive_int, default=5, help="how many turns each contender has (default %(default)s)"
    )
    parser.add_argument(
        "--fit", action="store_true", help="only the table of how many classes fit, which takes no time"
    )
    parser.add_argument("--quick", action="store_true", help="a small head and few steps, of which nothing is written")


SUITE = Suite(
    "heads",
    "heads of many classes on CPU against plain PyTorch, TorchShard, loss_parallel and cut cross entropy",
    add_arguments,
    run,
)
