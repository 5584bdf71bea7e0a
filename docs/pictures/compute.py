"""Computes what held.svg, recompute.svg and table.svg show: ``python docs/pictures/compute.py`` writes held.json,
recompute.json and table.json anew, ``python docs/pictures/compute.py table`` one of them. It takes some minutes, for it
runs the library's own estimates and search."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

import tensorshard as ts
from tensorshard.models import GPT, next_token_loss
from tensorshard.predict.rank_estimate import CATEGORIES, RankEstimate
from tensorshard.tensor_parallel import find_tensor_plan

_RANKS = 4
_MOMENTS = 90  # that are drawn
_HELD: dict[str, dict[str, Any]] = {
    "ZeRO 0": dict(zero=0),
    "ZeRO 1": dict(zero=1),
    "ZeRO 2": dict(zero=2),
    "ZeRO 3": dict(zero=3),
    "ZeRO 2, offload": dict(zero=2, offload="cpu"),
    "ZeRO 3, offload": dict(
        zero=3, offload=ts.Offload(optimizer="cpu", gradients="cpu", parameters="cpu", activations="cpu")
    ),
}


def main(names: list[str]) -> None:
    for name in names or _COMPUTED:
        path = Path(__file__).with_name(f"{name}.json")
        path.write_text(json.dumps(_COMPUTED[name](), indent=None if name == "recompute" else 1) + "\n")


def _held() -> dict[str, Any]:
    """What the fullest rank of four holds of a GPT-2 XL, on the device and on its host."""
    tokens = torch.zeros(2, 512, dtype=torch.long)
    plans = {}
    model = partial(GPT, vocab_size=50257, context_length=1024, num_layers=48, num_heads=25, width=1600)
    for name, fields in _HELD.items():
        found = _fullest_rank(model, ts.Plan(precision="bf16", recompute="full", **fields), tokens, _RANKS)
        plans[name] = {
            "device": found.peak_allocated,
            "by_category": found.by_category,
            "host_bytes": found.host_bytes,
            "disk_bytes": found.disk_bytes,
        }
    title = "GPT-2 XL, 1.5 billion parameters, on four GPUs of 24 GiB: what a rank holds at its peak"
    return {"title": title, "memory": 24 * 2**30, "plans": plans}


def _recompute() -> dict[str, Any]:
    """A step of a GPT on one rank under each kind of recomputation."""
    tokens = torch.zeros(8, 256, dtype=torch.long)
    plans = {}
    model = partial(GPT, vocab_size=512, context_length=256, num_layers=8, num_heads=4, width=256)
    for kind in ("none", "selective", "full"):
        found = _fullest_rank(model, ts.Plan(zero=0, recompute=kind), tokens, 1)
        phases = [moment.phase for moment in found.history]
        begins = max(i for i in range(1, len(phases)) if phases[i - 1 : i + 1] == ["update", "forward"])
        history = found.history[begins:]  # of the second step
        every = max(1, len(history) // _MOMENTS)
        fullest = [max(history[i : i + every], key=lambda m: m.total) for i in range(0, len(history), every)]
        plans[kind] = {"peak": found.peak_allocated, "held": [moment.held for moment in fullest]}
    return {"categories": CATEGORIES, "plans": plans}


def _fullest_rank(model: Any, plan: ts.Plan, tokens: torch.Tensor, world_size: int) -> RankEstimate:
    """What an estimate of training `model` on `tokens` says of the rank that holds the most."""
    return ts.estimate(
        model,
        plan,
        world_size=world_size,
        inputs=tokens,
        targets=tokens,
        optimizer=partial(torch.optim.AdamW, lr=3e-4),
        loss_fn=next_token_loss,
        hardware="rtx-4090",
    ).largest


def table() -> list[dict[str, Any]]:
    """The table of a small Llama at ``tp=2``: each weight's name, its style, and its shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=96, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    weights = dict(model.named_parameters())
    entries = find_tensor_plan(model, 2).plan.entries.items()
    named = {name: f"{name.replace('*', '0')}.weight" for name, _ in entries}
    return [
        {"name": name, "style": str(style), "shape": list(weights[named[name]].shape)}
        for name, style in entries
        if named[name] in weights
    ]


_COMPUTED = {"held": _held, "recompute": _recompute, "table": table}

if __name__ == "__main__":
    main(sys.argv[1:])
