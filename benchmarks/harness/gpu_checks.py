"""The first checks of a machine with GPUs: each in processes of its own, with a verdict and what was found."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.harness.jobs import run_job
from benchmarks.harness.ranks import RankError, run_ranks

_RANK_MODULE = "benchmarks.harness.gpu_checks_rank"
_LOG_CHARACTERS = 1500


@dataclass(frozen=True)
class Check:
    """A question about the machine.

    Args:
        name: of the function of the rank's module that answers it. what: in words.
        seconds: after which its processes are ended.
        on_cpu: whether it can be tried on the processor.
        ends: "" if all ranks end by themselves; else what the error of the one that fails has to say.
        tests: arguments of pytest, which runs in place of ranks.
    """

    name: str
    what: str
    seconds: float = 180.0
    on_cpu: bool = True
    ends: str = ""
    tests: tuple[str, ...] = ()


@dataclass
class Verdict:
    """What came of a check.

    Args:
        verdict: "ok", "wrong", "failed" (it raised, hung or died) or "skipped".
        found: numbers and texts, by their names. wrong: what is not as it should be.
    """

    name: str
    what: str
    verdict: str
    seconds: float = 0.0
    found: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class CheckJob:
    """What a rank is told."""

    name: str
    device: str


FIRST = (
    Check("self_test", "a few steps of every ZeRO level against plain PyTorch"),
    Check("parity", "20 steps of each precision with SGD and AdamW against plain PyTorch"),
    Check("host_waits", "how often a step waits for the GPU", on_cpu=False),
    Check("failed_steps", "a step that is not taken changes no weight and no state, though its update was launched"),
    Check("logits", "losses of whole logits, of tiles, and of tiles without a compiler"),
    Check("random_numbers", "random numbers, and a training with dropout, against those of the CPU"),
    Check("recompute", "recomputation with dropout against none"),
    Check("compiled", "compiled blocks against plain ones, and how often they are compiled", 240.0),
    Check("offload", "offload of states, gradients, activations, and updates in the background"),
    Check("checkpoints", "ZeRO 3; what the GPU saves read on the CPU, and back"),
    Check("memory", "memory as estimated against the allocator's", on_cpu=False),
    Check("speed", "seconds of a step beside plain PyTorch"),
    Check("gpu_tests", "pytest -m gpu", 420.0, on_cpu=False, tests=("-m", "gpu", "-q", "-x", "tests/offload")),
)
MULTI = (
    Check("self_test", "a few steps under every axis against plain PyTorch"),
    Check("own_devices", "device='cuda' takes a GPU of its own for each rank"),
    Check("plans", "20 steps under the plans of the parity tests against plain PyTorch", 300.0),
    Check("tensor_replicas", "replicated weights are equal over tp after 100 steps", 240.0),
    Check("schedules", "all schedules of pipelines, with full state dicts, and with offload", 300.0),
    Check("communicators", "as many communicators as estimates count", on_cpu=False),
    Check("rank_raises", "a rank that raises ends the others, which name it", 120.0, ends="one rank alone"),
    Check("leaves", "the processes end by themselves"),
)


def run_checks(
    checks: tuple[Check, ...], device: str, ranks: int, seconds: float, tell: Callable[[Verdict], None]
) -> list[Verdict]:
    """Runs one check after the other, for `seconds` at most: those that are left are skipped."""
    deadline, verdicts = time.monotonic() + seconds, []
    for check in checks:
        started = time.monotonic()
        if device == "cpu" and not check.on_cpu:
            verdict = Verdict(check.name, check.what, "skipped", wrong=["it needs a GPU"])
        elif started > deadline:
            verdict = Verdict(check.name, check.what, "skipped", wrong=[f"the {seconds / 60:.0f} minutes were over"])
        else:
            verdict = _run(replace(check, seconds=min(check.seconds, deadline - started)), device, ranks)
        verdict.seconds = round(time.monotonic() - started, 1)
        verdicts.append(verdict)
        tell(verdict)
    return verdicts


def _run(check: Check, device: str, ranks: int) -> Verdict:
    if check.tests:
        return _run_tests(check)
    environment = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    job = CheckJob(check.name, device)
    try:
        if check.ends:
            run_ranks(_RANK_MODULE, [json.dumps(asdict(job))], ranks, environment=environment, timeout=check.seconds)
            return Verdict(check.name, check.what, "wrong", wrong=["all ranks ended as if nothing had happened"])
        outcomes = run_job(_RANK_MODULE, job, ranks, environment=environment, timeout=check.seconds)
    except RankError as error:
        message = str(error)
        if check.ends and check.ends in message and "seconds" not in message.splitlines()[0]:
            return Verdict(check.name, check.what, "ok", found={"said": message[-_LOG_CHARACTERS:]})
        return Verdict(check.name, check.what, "failed", wrong=[message[-_LOG_CHARACTERS:]])
    wrong = list(dict.fromkeys(line for outcome in outcomes for line in outcome["wrong"]))
    return Verdict(check.name, check.what, "wrong" if wrong else "ok", found=outcomes[0]["found"], wrong=wrong)


def _run_tests(check: Check) -> Verdict:
    command = [sys.executable, "-m", "pytest", *check.tests]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=check.seconds, check=False)
    except subprocess.TimeoutExpired:
        return Verdict(check.name, check.what, "failed", wrong=[f"took more than {check.seconds:.0f} seconds"])
    output = (done.stdout + done.stderr)[-_LOG_CHARACTERS:]
    if done.returncode:
        return Verdict(check.name, check.what, "failed", wrong=[output])
    return Verdict(check.name, check.what, "ok", found={"said": output})


def write_verdicts(path: Path, verdicts: list[Verdict], about: Mapping[str, Any]) -> None:
    """Writes all that was found as JSON."""
    content = {"date": date.today().isoformat(), **about, "checks": [asdict(verdict) for verdict in verdicts]}
    path.write_text(json.dumps(content, indent=2) + "\n")
