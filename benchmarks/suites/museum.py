"""Silent faults of the field, rebuilt small, and faults planted in an Engine: does `verify` find and name them?"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import date
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness.hardware import hardware_name, installed_versions
from benchmarks.harness.page_blocks import replace_block
from benchmarks.harness.results import RESULTS
from benchmarks.registry import Suite

DOCUMENT = RESULTS / "museum.md"
_FILE = RESULTS / "museum" / "museum.json"
_PLANTED = RESULTS / "museum" / "planted.json"
_PLANS: dict[str, dict[str, Any]] = {
    "zero=0, 2 data ranks": {"zero": 0},
    "zero=3, 2 data ranks": {"zero": 3},
    "tp=2": {"dp_shard": 1, "tp": 2},
    "pp=2": {"dp_shard": 1, "pp": 2, "micro_batches": 2},
}


@dataclass(frozen=True)
class Found:
    """What was found of one fault.

    Args:
        caught: whether something differed.
        kind, module: as the culprit has them; empty where nothing was found.
        is_right: whether the kind is the fault's.
        is_correct_exact: whether the layout without the fault was found exact; None if there is none.
        seconds: of the wall clock, for the layout with the fault.
    """

    name: str
    report: str
    said: str
    caught: bool
    kind: str
    module: str
    is_right: bool
    is_correct_exact: bool | None
    seconds: float


def exhibits(names: list[str]) -> Iterator[Found]:
    """What is found of each exhibit."""
    import tensorshard as ts
    from benchmarks.museum import EXHIBITS

    for one in EXHIBITS:
        if names and not any(fnmatch(one.name, name) for name in names):
            continue
        begin = time.monotonic()
        verification = ts.verify_layout(one.reference, one.parallel, ranks=one.ranks, gather=one.gather)
        seconds = time.monotonic() - begin
        right: bool | None = None
        if one.correct is not None:
            right = bool(ts.verify_layout(one.reference, one.correct, ranks=one.ranks, gather=one.gather))
        culprit = verification.culprit
        kind, module = ("", "") if culprit is None else (culprit.kind, culprit.module or "")
        named = not verification and kind in one.kinds
        yield Found(one.name, one.report, one.said, not verification, kind, module, named, right, round(seconds, 1))


def planted_faults(names: list[str]) -> Iterator[Found]:
    """What is found of each fault that is planted in an Engine, under each plan that can have it."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))
    import torch

    import tensorshard as ts
    from injected_faults import FAULTS, Transformer, batch, planted, token_loss

    inputs, targets = batch()
    adamw = partial(torch.optim.AdamW, lr=1e-2, eps=1e-4)
    for fault, (plant, kind) in FAULTS.items():
        if names and not any(fnmatch(fault, name) for name in names):
            continue
        for plan, fields in _PLANS.items():
            if kind == "not reduced" and plan[:4] in ("zero=3", "pp=2"):  # no rank has a copy of the gradient
                continue
            options = {**fields, **({"clip_grad_norm": 0.1} if kind == "norm" else {})}
            begin = time.monotonic()
            with planted(plant):
                verification = ts.verify(
                    Transformer, ts.Plan(**options), inputs=inputs, targets=targets, optimizer=adamw, loss_fn=token_loss
                )
            culprit = verification.culprit
            named, module = ("", "") if culprit is None else (culprit.kind, culprit.module or "")
            seconds = round(time.monotonic() - begin, 1)
            yield Found(
                fault, plan, kind, not verification, named, module, not verification and named == kind, None, seconds
            )


def run(arguments: argparse.Namespace) -> int:
    findings = []
    for one in (planted_faults if arguments.planted else exhibits)(arguments.names):
        findings.append(one)
        caught = "caught" if one.caught else "MISSED"
        named = "named" if one.is_right else f"called {one.kind!r}"
        alarm = ", FALSE ALARM without it" if one.is_correct_exact is False else ""
        print(f"{one.name:<64} {caught}, {named}{alarm}  {one.seconds:.1f} s", flush=True)
    print(_summary(findings))
    if not arguments.names:
        target = _PLANTED if arguments.planted else _FILE
        target.parent.mkdir(parents=True, exist_ok=True)
        document = {
            "hardware": hardware_name("cpu"),
            "date": date.today().isoformat(),
            "versions": installed_versions(["torch", "tensorshard"]),
            "found": [asdict(one) for one in findings],
        }
        target.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(one.caught and one.is_correct_exact is not False for one in findings) else 1


def _summary(findings: list[Found]) -> str:
    caught, named = sum(one.caught for one in findings), sum(one.is_right for one in findings)
    slowest = max((one.seconds for one in findings), default=0.0)
    tried = [one.is_correct_exact for one in findings if one.is_correct_exact is not None]
    alarms = f"; {len(tried) - sum(tried)} false alarms in {len(tried)} layouts without a fault" if tried else ""
    return f"{len(findings)} faults: {caught} caught, {named} named rightly, the slowest in {slowest:.0f} s{alarms}"


def write_document() -> Path:
    """Writes the table of ``benchmarks/results/museum.md`` from the results; returns its path."""
    document = json.loads(_FILE.read_text())
    findings = [Found(**one) for one in document["found"]]
    stated = ", ".join(f"{package} {version}" for package, version in document["versions"].items())
    measured = f"{_summary(findings)}. {document['hardware']}, {document['date']}; {stated}."
    text = replace_block(DOCUMENT.read_text(), "museum", "\n".join([*_museum_rows(findings), "", measured]))
    DOCUMENT.write_text(text)
    return DOCUMENT


def _museum_rows(findings: list[Found]) -> list[str]:
    lines = ["| fault | reported | found | named |", "|---|---|---|---|"]
    for one in findings:
        named = f"{one.kind}" if one.is_right else f"{one.kind or '-'} (wrongly)"
        lines.append(f"| {one.name} | {_link(one.report)} | {'yes' if one.caught else '**no**'} | {named} |")
    return lines


def _link(report: str) -> str:
    repository, _, number = report.partition("#")
    return f"[{report}](https://github.com/{repository}/issues/{number})" if number.isdecimal() else report


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults, as globs (default: all)")
    parser.add_argument("--planted", action="store_true", help="faults planted in an Engine instead of the museum's")


SUITE = Suite("museum", __doc__.splitlines()[0], _add_arguments, run)
