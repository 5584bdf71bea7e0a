"""Two small runs of ``tensorshard check``: predicted and written down, and then measured on this machine."""

import json
import statistics
import time
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tensorshard.comm.world import default_device, join_world
from tensorshard.common.paths import write_whole
from tensorshard.common.words import flops_words, size_text, span_words, speed_words
from tensorshard.models import GPT, next_token_loss
from tensorshard.parallelize.build import parallelize
from tensorshard.plan.plan import Plan
from tensorshard.predict import Estimate, estimate
from tensorshard.predict.hardware import Hardware
from tensorshard.trainer.memory import PeakMemory, held_now

_SIZES: dict[str, dict[str, Any]] = {
    "cpu": {"vocab_size": 4096, "context_length": 128, "num_layers": 4, "num_heads": 4, "width": 256},
    "cuda": {"vocab_size": 32768, "context_length": 1024, "num_layers": 12, "num_heads": 16, "width": 1024},
}
_SAMPLES = {"cpu": 4, "cuda": 8}  # of a data rank
_STEPS, _WARM_UP = 8, 3
_OPTIMIZER = partial(torch.optim.AdamW, lr=1e-3)


def plans(world_size: int, device: str) -> dict[str, Plan]:
    """The plans of the runs, by the words that stand for them."""
    precision = "bf16" if device == "cuda" else "fp32"
    fields: tuple[dict[str, Any], ...] = ({"zero": 0}, {"zero": 0, "recompute": "full"})
    if world_size % 2 == 0:
        fields = ({"zero": 3}, {"tp": 2, "zero": 1})
    found = [Plan(precision=precision, **one) for one in fields]
    return {plan.resolve(world_size).in_short(): plan for plan in found}


def predict(world_size: int, device: str, hardware: Hardware | None) -> dict[str, Estimate]:
    """The estimate of each run, by its plan.

    Args:
        device: "cpu" or "cuda". hardware: what the times are of; None for none.
    """
    tokens = torch.zeros(_SAMPLES[device], _SIZES[device]["context_length"], dtype=torch.long)
    found = {}
    for words, plan in plans(world_size, device).items():
        batch = tokens.repeat(world_size // plan.resolve(world_size).dp_size, 1)  # as many samples under each plan
        found[words] = estimate(
            partial(GPT, **_SIZES[device]),
            plan,
            world_size=world_size,
            inputs=batch,
            targets=batch,
            optimizer=_OPTIMIZER,
            loss_fn=next_token_loss,
            hardware=hardware,
            device=device,
        )
    return found


def prediction(found: Estimate) -> dict[str, Any]:
    """What `found` says of a run, as values of JSON: bytes of each rank beyond what its process held before, seconds
    of a step with their bounds, and floating-point operations of a step."""
    return {
        "memory": [rank.peak_measured for rank in found.of_each_rank],
        "step_seconds": found.step_seconds,
        "step_span": found.step_span,
        "flops": found.model_flops,
        "times": None if found.hardware is None else found.hardware.basis,
    }


def document(found: dict[str, Estimate], world_size: int, device: str, name: str) -> dict[str, Any]:
    """The file before anything is measured.

    Args:
        name: of the device.
    """
    from tensorshard import __version__

    hardware = next(iter(found.values())).hardware
    runs = [
        {"plan": words, "predicted": prediction(one), "at_measured_rates": None, "measured": None}
        for words, one in found.items()
    ]
    return {
        "device": name,
        "profile": None if hardware is None else hardware.name,
        "ranks": world_size,
        "date": datetime.now(UTC).date().isoformat(),
        "tensorshard": __version__,
        "torch": torch.__version__,
        "model": f"GPT{tuple(_SIZES[device].values())}, {_SAMPLES[device]} samples a rank",
        "runs": runs,
    }


def write(path: Path, values: dict[str, Any]) -> None:
    """Writes the file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(values, indent=2) + "\n")


def measure(words: str, results: str) -> None:
    """Takes the steps of the run `words` on the ranks of this world; rank 0 writes what it measured to `results`.

    A process measures one run: what it has freed of an earlier one would count.
    """
    device = default_device()
    join_world(device)
    size = dist.get_world_size()
    held_before = held_now(device)
    engine = parallelize(
        partial(GPT, **_SIZES[device.type]),
        plans(size, device.type)[words],
        optimizer=_OPTIMIZER,
        loss_fn=next_token_loss,
    )
    memory = PeakMemory(device)
    memory.reset()
    samples = _SAMPLES[device.type] * size // engine.mesh.dp_size
    tokens = torch.randint(0, 4096, (samples, _SIZES[device.type]["context_length"]), device=device)
    if engine.plan.tp > 1:
        dist.broadcast(tokens, src=0)
    seconds = []
    for _ in range(_STEPS):
        begin = time.perf_counter()
        engine.step(tokens, tokens).item()
        seconds.append(time.perf_counter() - begin)
    peaks: list[Any] = [None] * size
    dist.all_gather_object(peaks, memory.bytes() - held_before)
    if dist.get_rank() == 0:
        measured = {"memory": peaks, "step_seconds": statistics.median(seconds[_WARM_UP:])}
        Path(results).write_text(json.dumps(measured))
    dist.destroy_process_group()


def at_measured_rates(found: Estimate, measured: Hardware) -> dict[str, Any]:
    """The prediction of the same operations, by the rates that were measured meanwhile."""
    return prediction(replace(found, hardware=measured))


def describe(values: dict[str, Any]) -> str:
    """A few lines for each run: what was predicted, and what was measured if it was."""
    lines = []
    for run in values["runs"]:
        before, rates, measured = run["predicted"], run["at_measured_rates"], run["measured"]
        lines.append(f"{run['plan']}: {flops_words(before['flops'])} a step")
        worth = before["times"].partition(";")[0] if before["step_seconds"] else ""
        lines.append(f"  predicted  {_line(before)}" + f", {worth}" * bool(worth))
        if rates is not None:
            lines.append(f"             {_line(rates)}, {rates['times']}")
        if measured is not None:
            speed = speed_words(before["flops"] / measured["step_seconds"])
            lines.append(f"  measured   {_line(measured)}, {speed}")
    return "\n".join(lines)


def _line(values: dict[str, Any]) -> str:
    words = f"{size_text(max(values['memory'])):>8} a rank"
    seconds, span = values["step_seconds"], values.get("step_span")
    if seconds is None:
        return words
    return f"{words}, a step {span_words(seconds, span)}"
