"""Context parallelism on CPU ranks: time, bytes and memory of long sequences, and how long they can be."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import date

from rich.console import Console

from benchmarks.harness.contender import Contender
from benchmarks.harness.hardware import installed_versions
from benchmarks.harness.memory_group import can_limit
from benchmarks.harness.report import make_console, print_group, write_results
from benchmarks.harness.results import Group, Quantity, make_rows
from benchmarks.harness.sequences import SequenceMeasurement, measure_sequences, trains_in
from benchmarks.registry import Suite, positive_int
from benchmarks.sequences import SequenceWork

ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": ""}
RUN_TIMEOUT = 500.0  # seconds

LLAMA = SequenceWork("llama", length=4096)
MAMBA = SequenceWork("mamba", length=512, width=128)
LONGEST = SequenceWork("llama", length=0, width=128, heads=4, key_heads=1)
LIMIT = 400_000_000  # bytes of each rank, of which the process itself takes the most
STEP = 2048  # lengths that are tried are multiples of it
DEGREES = (1, 2, 4)

QUANTITIES = (
    Quantity("step_seconds", "step time", "s"),
    Quantity("cpu_seconds", "CPU time of all ranks", "s"),
    Quantity("peak_bytes", "peak memory of a rank", "bytes"),
    Quantity("received_bytes", "a rank receives for attention", "bytes"),
    Quantity("of_formula", "times the bytes of gathering, by the formula", "times"),
    Quantity("tokens", "longest sequence", "tokens"),
)


def ours(degree: int, order: str | None = None) -> Contender:
    """tensorshard on `degree` ranks, with an order of positions if it is not the default."""
    options = {} if order is None else {"cp_order": order}
    return Contender(
        f"tensorshard cp={degree}{'' if order is None else f', {order}'}",
        "sequence_ours",
        "tensorshard.engine",
        options,
    )


def measure_peers(rounds: int) -> Group:
    """A Llama on 2 ranks beside the ring that is written by hand."""
    lineup = [Contender("ring attention by hand", "sequence_ring", "transformers")]
    lineup += [ours(2, order) for order in ("contiguous", "zigzag")]
    alone = _alone(LLAMA, 1)
    measurements = measure_sequences(
        LLAMA, lineup, 2, rounds=rounds, expected=alone.loss, environment=ENVIRONMENT, timeout=RUN_TIMEOUT
    )
    samples = _samples(measurements)
    samples["of_formula"] = {
        c.name: [
            measurements[c.name].received_bytes / LLAMA.attention_bytes(2, c.options.get("cp_order", "contiguous"))
        ]
        for c in lineup
    }
    # torch refuses before it computes anything: NotImplementedError, no operator for CPU tensors.
    notes = {"torch context_parallel": "has no operator for CPUs"}
    return _group(f"Llama, {LLAMA.length} tokens, 2 ranks", LLAMA, samples, lineup, rounds, notes)


def measure_degrees(work: SequenceWork, rounds: int) -> Group:
    """One model on 1, 2 and 4 ranks."""
    lineup = [ours(degree) for degree in DEGREES]
    measurements = {lineup[0].name: _alone(work, rounds)}
    for degree, contender in zip(DEGREES[1:], lineup[1:], strict=True):
        measurements |= measure_sequences(
            work,
            [contender],
            degree,
            rounds=rounds,
            expected=measurements[lineup[0].name].loss,
            environment=ENVIRONMENT,
            timeout=RUN_TIMEOUT,
        )
    return _group(f"{work.kind.title()}, {work.length} tokens", work, _samples(measurements), lineup, rounds, {})


def measure_longest() -> Group:
    """The longest sequences that train on 1, 2 and 4 ranks, each with the same memory."""
    longest: dict[str, list[float]] = {}
    shortest = STEP
    for degree in DEGREES:
        contender, length = ours(degree), shortest

        def fits(length: int, contender: Contender = contender, degree: int = degree) -> bool:
            work = replace(LONGEST, length=length)
            return trains_in(work, contender, degree, limit_bytes=degree * LIMIT, environment=ENVIRONMENT)

        low, high = 0, length
        while fits(high):
            low, high = high, 2 * high
        while high - low > max(STEP, low // 8):
            middle = (low + high) // (2 * STEP) * STEP
            low, high = (middle, high) if fits(middle) else (low, middle)
        longest[contender.name] = [low]
        shortest = max(low, STEP)
    title = f"Llama of width {LONGEST.width}, {LIMIT // 1_000_000} MB for each rank"
    return _group(title, LONGEST, {"tokens": longest}, [ours(degree) for degree in DEGREES], 1, {})


def _alone(work: SequenceWork, rounds: int) -> SequenceMeasurement:
    name = ours(1).name
    return measure_sequences(
        work, [ours(1)], 1, rounds=rounds, expected=None, environment=ENVIRONMENT, timeout=RUN_TIMEOUT
    )[name]


def _samples(measurements: dict[str, SequenceMeasurement]) -> dict[str, dict[str, list[float]]]:
    return {
        "step_seconds": {name: of.step_seconds for name, of in measurements.items()},
        "cpu_seconds": {name: of.cpu_seconds for name, of in measurements.items()},
        "peak_bytes": {name: [of.peak_bytes] for name, of in measurements.items()},
        "received_bytes": {name: [of.received_bytes] for name, of in measurements.items()},
    }


def _group(
    title: str,
    work: SequenceWork,
    samples: dict[str, dict[str, list[float]]],
    lineup: Sequence[Contender],
    rounds: int,
    notes: dict[str, str],
) -> Group:
    return Group(
        title=title,
        date=date.today().isoformat(),
        versions=installed_versions(["torch", "transformers", "tensorshard"]),
        settings={"rounds": rounds, **asdict(work)},
        # Degrees of ours alone are compared with the best of them.
        rows=make_rows(
            samples, ours=[c.name for c in lineup if c.ours] if any(not c.ours for c in lineup) else [], notes=notes
        ),
    )


def run(arguments: argparse.Namespace) -> int:
    console = make_console()
    rounds = 2 if arguments.quick else arguments.rounds
    parts = {
        "peers": lambda: measure_peers(rounds),
        "llama": lambda: measure_degrees(LLAMA, rounds),
        "mamba": lambda: measure_degrees(MAMBA, rounds),
        "longest": measure_longest,
    }
    for name in arguments.only or parts:
        if name == "longest" and not can_limit():
            console.print("the longest sequences are left out: this user cannot limit memory by a cgroup")
            continue
        _measure(console, name, parts[name], write=not arguments.quick)
    return 0


def _measure(console: Console, name: str, part: Callable[[], Group], *, write: bool) -> None:
    with console.status(name):
        group = part()
    print_group(console, group, [q for q in QUANTITIES if q.key in group.rows[0].values])
    if write:  # at once, so that an interrupted run keeps what it has measured
        write_results(console, "context", QUANTITIES, [group])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=["peers", "llama", "mamba", "longest"], help="these parts")
    parser.add_argument(
        "--rounds", type=positive_int, default=5, help="how many turns each contender has (default %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="two turns, of which nothing is written")


SUITE = Suite("context", "context parallelism: time, bytes, memory, and the longest sequences", add_arguments, run)
