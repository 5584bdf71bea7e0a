"""How much of what a step sends is hidden behind what it computes: a timeline from the recorded order, on fake tensors.

Nothing is measured. See :mod:`benchmarks.harness.overlap`.
"""

import argparse
import platform
from datetime import date
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from benchmarks.harness.overlap import MAIN, MESSAGES, Timeline, durations, play, record_steps
from benchmarks.harness.report import make_console, print_group
from benchmarks.harness.results import Group, Quantity, Results, make_rows, save_results
from benchmarks.registry import Suite
from tensorshard.engine.engine import Engine
from tensorshard.parallelize.build import build_engine
from tensorshard.plan.plan import Plan
from tensorshard.predict.hardware import find_hardware

HARDWARE, WORLD_SIZE = "h100", 16
QUANTITIES = (
    Quantity("seconds", "step", "s"),
    Quantity("messages_seconds", "messages, one after another", "s"),
    Quantity("waiting", "the model waits", "s"),
    Quantity("hidden", "hidden", "share"),
    Quantity("messages", "messages", "count"),
    Quantity("at_once", "waited for at once", "count"),
)
PLANS: dict[str, dict[str, Any]] = {
    "ZeRO 0": dict(zero=0),
    "ZeRO 1": dict(zero=1),
    "ZeRO 2, 2 micro-batches": dict(zero=2, micro_batches=2),
    "ZeRO 3": dict(zero=3),
    "ZeRO 1, 2 replicas": dict(zero=1, dp_replicate=2),
    "ZeRO 3, 2 replicas": dict(zero=3, dp_replicate=2),
    "ZeRO 1, tp=8": dict(zero=1, tp=8),
}
_SAMPLES, _TOKENS = 2, 2048  # of a rank
_GAP = 20e-6  # seconds; what follows sooner is drawn as one


def llama() -> nn.Module:
    """A small Llama: 0.5 billion parameters in 8 layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=8, num_attention_heads=16,
        num_key_value_heads=16, max_position_embeddings=_TOKENS, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def mean_loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


def timeline(fields: dict[str, Any], model: Any = llama, tokens: int = _TOKENS) -> tuple[Timeline, dict[str, str]]:
    """A step of a bf16 plan with these `fields`, and the axis of each group."""
    plan = Plan(precision="bf16", **fields).resolve(WORLD_SIZE)
    samples = _SAMPLES * plan.micro_batches

    def engine() -> Engine:
        adamw = partial(torch.optim.AdamW, lr=1e-4)
        sample = torch.zeros(1, 16, dtype=torch.long)
        return build_engine(model, plan, optimizer=adamw, loss_fn=mean_loss, sample_inputs=sample, off_device=True)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(samples, tokens, dtype=torch.long), torch.zeros(samples, tokens, dtype=torch.long)

    record, axes = record_steps(engine, batch, WORLD_SIZE)
    hardware = find_hardware(HARDWARE)
    assert hardware is not None and hardware.rates is not None
    return play(record, durations(plan, WORLD_SIZE, hardware.rates, axes)), axes


def lanes(step_timeline: Timeline, axes: dict[str, str]) -> dict[str, list[list[Any]]]:
    """By stream, what is drawn: [kind, first microsecond, last one]."""
    drawn: dict[str, list[list[Any]]] = {}
    for span in step_timeline.spans:
        if span.stream == MAIN:
            lane, kind = MAIN, MAIN
        elif span.stream.startswith(MESSAGES):
            lane, kind = f"messages, {axes[span.stream.removeprefix(MESSAGES)]}", span.name
        else:
            continue  # copies of FSDP, beside both
        start, end = max(0.0, span.start), min(step_timeline.seconds, span.end)
        row = drawn.setdefault(lane, [])
        if row and row[-1][0] == kind and start - row[-1][2] / 1e6 < _GAP:
            row[-1][2] = round(end * 1e6)
        else:
            row.append([kind, round(start * 1e6), round(end * 1e6)])
    return drawn


def run(arguments: argparse.Namespace) -> int:
    console = make_console()
    samples: dict[str, dict[str, list[float]]] = {quantity.key: {} for quantity in QUANTITIES}
    drawn = {}
    for name, fields in PLANS.items():
        with console.status(name):
            step_timeline, axes = timeline(fields)
        drawn[name] = lanes(step_timeline, axes)
        values = (
            step_timeline.seconds,
            step_timeline.messages,
            step_timeline.waiting,
            step_timeline.hidden,
            step_timeline.count,
            step_timeline.at_once,
        )
        for quantity, value in zip(QUANTITIES, values, strict=True):
            samples[quantity.key][name] = [float(value)]
    versions = {"Python": platform.python_version(), **{name: version(name) for name in ("torch", "transformers")}}
    settings = {"ranks": WORLD_SIZE, "samples": _SAMPLES, "tokens": _TOKENS, "lanes": drawn}
    rows = make_rows(samples, ours=list(PLANS))
    title = "Llama, 8 layers of width 2048, bf16"
    group = Group(title, date.today().isoformat(), versions, settings, rows)
    print_group(console, group, QUANTITIES)
    hardware = f"computed-{WORLD_SIZE}-{HARDWARE}"
    console.print(f"Written to {save_results(Results('overlap', hardware, 'cuda', QUANTITIES, (group,)))}")
    return 0


SUITE = Suite(
    "overlap", "how much of what a step sends is hidden, by a timeline of fake tensors", lambda parser: None, run
)
