"""Heads of many classes on one GPU: one step of training, and how many classes can be trained in a card's memory. With
--first or --multi: checks of a machine with GPUs that is new to tensorshard."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.harness.contender import Contender
from benchmarks.harness.gpu_checks import FIRST, MULTI, Verdict, run_checks, write_verdicts
from benchmarks.harness.hardware import installed_versions
from benchmarks.harness.heads_fit import Fit, FitJob, measure_fit
from benchmarks.harness.heads_group import measure_in_turn
from benchmarks.harness.report import make_console, print_group, write_results
from benchmarks.harness.results import Group, Quantity, make_rows
from benchmarks.heads import HeadWork
from benchmarks.registry import Suite, positive_int
from benchmarks.suites.heads import NO_GPU, RUN_TIMEOUT, SMALL, SMALLEST, WIDTHS, obstacle
from tensorshard.commands.env import describe_machine

PACKAGES = ("torch", "triton", "liger-kernel", "cut-cross-entropy", "tensorshard")

# All multiply in bf16, as they do in a model that is trained in it.
WORKS = {
    work.name: work
    for work in (
        HeadWork("128 thousand classes", samples=4096, features=2048, classes=128_000, device="cuda", dtype="bfloat16"),
        HeadWork("1 million classes", samples=4096, features=2048, classes=1_000_000, device="cuda", dtype="bfloat16"),
    )
}
_QUICK = HeadWork("4 thousand classes", samples=16, features=64, classes=4_000, dtype="bfloat16")
STATES = ("fp32", "bf16")

QUANTITIES = (
    Quantity("step_seconds", "step time", "s"),
    Quantity("peak_bytes", "peak memory above the states", "bytes"),
    Quantity("bytes_per_class", "states per class", "B"),
    Quantity("error", "largest error against fp64", "error"),
)

RANKS = 8
_FIT_SAMPLES = 1024
CARDS = {f"{RANKS} x {size} GB": size * 10**9 for size in (12, 32, 80)}
# What CUDA itself (0.3 to 0.6 GiB) and NCCL (0.1 to 0.5) take of a card, beside what PyTorch allocates.
RESERVED = 10**9
_QUICK_CARDS = {f"{RANKS} x 60 MB": 60 * 10**6}
_QUICK_WIDTHS = (64,)
_CHECK_SECONDS = 1200.0


def contenders(states: str) -> list[Contender]:
    """Those whose weight and momentum are of a type, tensorshard last.

    Args:
        states: "fp32", or "bf16", where ours may also have a momentum of 8 bits.

    Raises:
        ValueError: there are no such states.
    """
    if states not in STATES:
        raise ValueError(f"no states of {states!r}; there are {' and '.join(STATES)}")
    narrow = states == "bf16"
    options: dict[str, Any] = {"dtype": "bfloat16" if narrow else "float32"}
    peers = [
        Contender("plain PyTorch", "head_plain", "torch", options),
        Contender("plain PyTorch, torch.compile", "head_plain", "torch", {**options, "compiled": True}),
        Contender("Liger fused linear cross entropy", "head_liger", "liger_kernel.transformers", options),
    ]
    if narrow:  # it takes features and weight of one type
        cut = {**options, "implementation": "cce"}
        peers.append(Contender("cut cross entropy, Triton", "head_cut_cross_entropy", "cut_cross_entropy", cut))
    update = SMALL if narrow else {}
    ours: dict[str, dict[str, Any]] = {
        "gradients": {**options, "update": False, "keep_logits": False},
        "gradients, logits kept": {**options, "update": False, "keep_logits": True},
        "update": {**update, "keep_logits": False},
        "update, logits kept": {**update, "keep_logits": True},
    }
    if narrow:
        ours["update, 8 bits"] = {**SMALLEST, "keep_logits": False}
    return [
        *peers,
        *(Contender(f"tensorshard, {name}", "head_ours", "tensorshard.nn", given) for name, given in ours.items()),
    ]


def designs() -> list[Contender]:
    """What is held of a head that is split over ranks: the peer's, then ours from the largest to the smallest."""
    forms: dict[str, dict[str, Any]] = {
        "fp32, gradients": {"update": False},
        "fp32, update": {},
        "bf16 weight and momentum, update": SMALL,
        "bf16 weight, 8-bit momentum, update": SMALLEST,
    }
    return [
        Contender("torch loss_parallel, fp32", "head_loss_parallel", "torch.distributed.tensor.parallel"),
        *(
            Contender(f"tensorshard, {name}", "head_ours", "tensorshard.nn", {**options, "keep_logits": False})
            for name, options in forms.items()
        ),
    ]


def obstacle_on(contender: Contender, device: str) -> str:
    """Why a contender cannot be measured on "cuda" or "cpu"; empty if it can."""
    own_kernels = contender.builder == "head_liger" or contender.options.get("implementation") == "cce"
    if device == "cpu" and own_kernels:
        return "needs a GPU"
    return obstacle(contender)


def measure_steps(
    work: HeadWork, states: str, *, rounds: int, measured_steps: int, console: Console, only: Sequence[str] = ()
) -> Group:
    """Measures the contenders with states of a type in turn, `rounds` times over."""
    lineup = [c for c in contenders(states) if not only or c.name in only]
    return measure_in_turn(
        work,
        lineup,
        1,
        title=f"{work.name}, {states} states",
        quantities=QUANTITIES,
        obstacles={c.name: reason for c in lineup if (reason := obstacle_on(c, work.device))},
        packages=PACKAGES,
        rounds=rounds,
        measured_steps=measured_steps,
        threads=1,
        environment=_environment(work.device),
        timeout=RUN_TIMEOUT,
        console=console,
    )


def measure_designs(work: HeadWork, cards: Mapping[str, int], *, console: Console) -> Group:
    """How many classes one rank's part of a head could be trained for, in each card's memory.

    Args:
        work: what is trained, with any number of classes.
        cards: bytes that PyTorch may allocate, by the name of the cards.
    """
    lineup = designs()
    fits: dict[str, Fit] = {}
    for contender in lineup:
        probe = replace(work, classes=RANKS * 2048)
        job = FitJob(probe, contender.builder, contender.options, RANKS, list(cards.values()))
        with console.status(f"{work.features} features: {contender.name}"):
            fits[contender.name] = measure_fit(job, environment=_environment(work.device), timeout=RUN_TIMEOUT)
    samples = {"bytes_per_class": {name: [fit.bytes_per_class] for name, fit in fits.items()}}
    for number, card in enumerate(cards):
        samples[card] = {name: [float(fit.classes[number])] for name, fit in fits.items()}
    return Group(
        title=f"{work.features} features, {work.samples} samples",
        date=date.today().isoformat(),
        versions=installed_versions(PACKAGES),
        settings={"ranks": RANKS, "bytes of a card": dict(cards), **asdict(work)},
        rows=make_rows(samples, ours=[contender.name for contender in lineup if contender.ours]),
    )


def fit_quantities(cards: Mapping[str, int]) -> tuple[Quantity, ...]:
    """What :func:`measure_designs` measures."""
    return (Quantity("bytes_per_class", "states per class", "B"), *(Quantity(card, card, "classes") for card in cards))


def usable_cards() -> dict[str, int]:
    """What PyTorch may allocate of each card that is no larger than this GPU."""
    memory = torch.cuda.get_device_properties().total_memory
    return {name: size - RESERVED for name, size in CARDS.items() if size <= memory}


def run(arguments: argparse.Namespace) -> int:
    device = arguments.device
    if device == "cuda" and not torch.cuda.is_available():
        print(
            "error: the benchmark gpu needs a GPU, and PyTorch sees none here. With --device cpu it runs on the "
            "processor, to try its code: small sizes, and nothing is written",
            file=sys.stderr,
        )
        return 1
    if arguments.first or arguments.multi:
        return _run_checks(arguments)
    quick = arguments.quick or device == "cpu"
    console = make_console()
    if "steps" in arguments.parts:
        works = [replace(_QUICK, device=device)] if quick else [WORKS[name] for name in arguments.work or WORKS]
        _run_steps(works, arguments, quick, console)
    if "fit" in arguments.parts:
        cards = _QUICK_CARDS if quick else usable_cards()
        for features in _QUICK_WIDTHS if quick else arguments.features:
            samples = _QUICK.samples if quick else _FIT_SAMPLES
            group = measure_designs(HeadWork("", samples, features, 0, device, "bfloat16"), cards, console=console)
            print_group(console, group, fit_quantities(cards))
            if not quick:
                write_results(console, "gpu-fit", fit_quantities(cards), [group], device)
    return 0


def _run_steps(works: Sequence[HeadWork], arguments: argparse.Namespace, quick: bool, console: Console) -> None:
    rounds, measured_steps = (2, 2) if quick else (arguments.rounds, 10)
    for work in works:
        for states in arguments.states:
            group = measure_steps(
                work,
                states,
                rounds=rounds,
                measured_steps=measured_steps,
                console=console,
                only=arguments.only or (),
            )
            print_group(console, group, QUANTITIES)
            if not quick:  # at once, so that an interrupted run keeps what it has measured
                write_results(console, "gpu", QUANTITIES, [group], work.device)


def _run_checks(arguments: argparse.Namespace) -> int:
    """Runs the checks of one GPU, or of all; says what came of each."""
    device = arguments.device
    ranks = 1
    if arguments.multi:
        ranks = 2 if device == "cpu" else min(8, torch.cuda.device_count()) // 2 * 2
        if not ranks:
            print("error: --multi needs at least 2 GPUs, and PyTorch sees 1; --first checks that one", file=sys.stderr)
            return 1

    def tell(verdict: Verdict) -> None:
        print(f"{verdict.verdict:<8}{verdict.seconds:6.1f} s  {verdict.what}", flush=True)
        for line in verdict.wrong:
            print(f"          {line}", flush=True)

    checks = MULTI if arguments.multi else FIRST
    chosen = tuple(check for check in checks if not arguments.only or check.name in arguments.only)
    if not chosen:
        names = ", ".join(check.name for check in checks)
        print(f"error: --only names no check; there are {names}", file=sys.stderr)
        return 1
    verdicts = run_checks(chosen, device, ranks, _CHECK_SECONDS, tell)
    kind = "multi" if arguments.multi else "first"
    output = Path(arguments.output or f"gpu-{kind}-{date.today().isoformat()}.json")
    about = {
        "ranks": ranks,
        "device": device,
        "machine": describe_machine(sys.stdout),
        "versions": installed_versions(PACKAGES),
    }
    write_verdicts(output, verdicts, about)
    bad = [verdict.name for verdict in verdicts if verdict.verdict in ("wrong", "failed")]
    print(f"{len(verdicts) - len(bad)} of {len(verdicts)} checks found nothing wrong; all of it is in {output}")
    return 1 if bad else 0


def _environment(device: str) -> Mapping[str, str]:
    return NO_GPU if device == "cpu" else {}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--first", action="store_true", help="check one GPU that is new to tensorshard, in 20 minutes")
    kinds.add_argument("--multi", action="store_true", help="check 2 to 8 GPUs of this machine, in 20 minutes")
    parser.add_argument("--output", help="with --first or --multi: the file of what was found, JSON")
    parser.add_argument("--parts", choices=("steps", "fit"), nargs="+", default=["steps", "fit"], help="not all of it")
    parser.add_argument("--work", choices=list(WORKS), nargs="+", help="steps of these heads instead of all")
    parser.add_argument(
        "--states", choices=STATES, nargs="+", default=list(STATES), help="steps with weights of these types"
    )
    parser.add_argument("--only", nargs="+", metavar="CONTENDER", help="these contenders or checks instead of all")
    parser.add_argument(
        "--rounds", type=positive_int, default=3, help="how many turns each contender has (default %(default)s)"
    )
    parser.add_argument(
        "--features",
        type=positive_int,
        nargs="+",
        default=list(WIDTHS),
        help="how many classes fit at these widths (default 512 2048)",
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: to try the benchmark's code without a GPU, with small sizes, of which nothing is written",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes and few steps, of which nothing is written")


SUITE = Suite(
    "gpu",
    "heads of many classes on one GPU against plain PyTorch, torch.compile, Liger and cut cross entropy",
    add_arguments,
    run,
)
