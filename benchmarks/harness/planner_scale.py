"""Large models on many devices, on fake tensors: what the search chooses, and how published plans compare with it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.harness.headlines import ADAMW, SGD, Classifier, bert_large
from tensorshard.models import GPT, next_token_loss

_MODULE = "benchmarks.harness.planner_scale"
_TIMEOUT = 3600.0


@dataclass(frozen=True)
class Scale:
    """A model, and the machines for it.

    Args:
        name: of the model.
        devices, device: how many devices, and which.
        global_batch: samples of a step.
        build: makes the model.
        batch: makes a batch of one sample.
        memory: used in place of the device's memory, if given.
        fixed: fields of the Plan that are given.
        published: fields of a plan that others trained the model with.
        source: who they are.
    """

    name: str
    devices: int
    device: str
    global_batch: int
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Any, Any]]
    loss: Callable[[Any, Any], Any] = next_token_loss
    optimizer: Any = ADAMW
    memory: str | None = None
    fixed: dict[str, Any] = field(default_factory=lambda: {"precision": "bf16"})
    published: dict[str, Any] | None = None
    source: str = ""


@dataclass(frozen=True)
class ScaleFinding:
    """The result: seconds of a step, and bytes of the rank with the most.

    Args:
        plan: the chosen one, in words; or why there is none.
        took: seconds of the search.
        resident: the most bytes that the search's process held.
        published: the published plan's seconds and memory; None without one.
        why: why the published plan would not work, by its estimate.
    """

    name: str
    machines: str
    plan: str
    seconds: float
    memory: int
    considered: int
    estimated: int
    took: float
    resident: int
    source: str = ""
    published_plan: str = ""
    published: tuple[float, int] | None = None
    why: str = ""


def _tokens(length: int, samples: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.zeros(samples, length, dtype=torch.long)
    return tokens, tokens


def _images() -> tuple[Any, torch.Tensor]:
    targets = torch.zeros(32, dtype=torch.long)
    return (torch.zeros(32, 3, 224, 224), targets), targets


def _first(output: Any, targets: torch.Tensor) -> torch.Tensor:
    return output


def _logits(output: Any, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


def _llama(layers: int, width: int, heads: int, inner: int) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = dict(hidden_size=width, num_attention_heads=heads, num_key_value_heads=8, intermediate_size=inner)
        return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, vocab_size=128256, use_cache=False, **sizes))

    return build


_GPT3 = partial(GPT, vocab_size=51200, context_length=2048, num_layers=96, num_heads=96, width=12288)

SCALES = {
    scale.name: scale
    for scale in (
        Scale("ResNet-50 with 1M classes", 8, "titan-xp", 256, partial(Classifier, 1_000_000), _images, _first, SGD,
              fixed={"precision": "fp32", "tp_plan": {"head": "classes"}, "tp_check": False}),
        Scale("BERT-Large", 16, "v100-32", 1024, bert_large(), partial(_tokens, 512),
              published={"zero": 1, "recompute": "full"}, source="Paddle Fleet"),
        Scale("BERT-Large, 24 GB", 8, "rtx-3090", 1024, bert_large(), partial(_tokens, 512)),
        Scale("Llama 70B", 1024, "h100", 1024, _llama(80, 8192, 64, 28672), partial(_tokens, 4096), _logits),
        Scale("Llama 70B, 40 GB", 256, "a100-40", 512, _llama(80, 8192, 64, 28672), partial(_tokens, 4096), _logits),
        Scale("GPT-3 175B", 1024, "a100-80", 1536, _GPT3, partial(_tokens, 2048),
              published={"tp": 8, "pp": 16, "zero": 0, "recompute": "full", "micro_batches": 192},
              source="Megatron-LM's script for 175B"),
        Scale("115B", 128, "v100-32", 128, partial(GPT, 51200, 1024, 70, 96, 11712), partial(_tokens, 1024),
              published={"zero": 3, "recompute": "full"}, source="Paddle Fleet"),
        Scale("Llama 405B", 1024, "h100", 1024, _llama(126, 16384, 128, 53248), partial(_tokens, 8192), _logits,
              published={"tp": 8, "sequence_parallel": True, "pp": 16, "zero": 1, "micro_batches": 128},
              source="Llama 3, its 16,384 devices scaled down to eight data ranks"),
    )
}  # fmt: skip
"""By name."""


def find(scale: Scale) -> ScaleFinding:
    """Searches in a separate process.

    Raises:
        RuntimeError: the search failed. The message has the end of its output.
    """
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TENSORSHARD_CACHE": "off"}
    done = subprocess.run(
        [sys.executable, "-m", _MODULE, scale.name],
        env=environment,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the search for {scale.name} failed:\n{done.stderr[-2000:]}")
    content = json.loads(done.stdout.splitlines()[-1])
    if content["published"] is not None:
        content["published"] = tuple(content["published"])
    return ScaleFinding(**content)


def _search(scale: Scale) -> ScaleFinding:
    """Searches in this process."""
    import time

    import tensorshard as ts
    from tensorshard.predict.search.plan_search import plan_words

    inputs, targets = scale.batch()
    given = dict(optimizer=scale.optimizer, loss_fn=scale.loss, hardware=scale.device)
    begin = time.perf_counter()
    try:
        search = ts.find_plans(
            scale.build, world_size=scale.devices, inputs=inputs, targets=targets, memory=scale.memory,
            global_batch=scale.global_batch, fixed=scale.fixed, top=1, **given,
        )  # fmt: skip
    except ValueError as error:
        search, failure = None, str(error)
    took = time.perf_counter() - begin
    memory = f", {scale.memory} each" if scale.memory else ""
    machines = f"{scale.devices:,} x {scale.device}{memory}"
    if search is None:
        return ScaleFinding(scale.name, machines, failure, 0.0, 0, 0, 0, took, _resident(), scale.source)
    best = search.best
    result = ScaleFinding(
        scale.name, machines, plan_words(best.plan), best.seconds, best.memory, search.considered, search.estimated,
        took, _resident(), scale.source,
    )  # fmt: skip
    if scale.published is None:
        return result
    plan = ts.Plan.from_dict({**scale.fixed, **scale.published}).resolve(scale.devices)
    samples = scale.global_batch // plan.dp_size
    inputs, targets = _more(scale.batch, samples)
    published = ts.estimate(
        scale.build, plan, world_size=scale.devices, inputs=inputs, targets=targets, **given
    )  # fmt: skip
    assert published.step_time is not None
    time_of, total = published.step_time.by_category, published.step_time.seconds
    why = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in time_of.items() if seconds > total / 50)
    fits = "" if published.fits() else "does not fit; "
    return ScaleFinding(
        **{
            **asdict(result),
            "published_plan": plan_words(plan),
            "published": (total, published.largest.peak_device),
            "why": fits + why,
        }
    )


def _more(batch: Callable[[], tuple[Any, Any]], samples: int) -> tuple[Any, Any]:
    """A batch of `samples` samples like those of `batch`."""
    from tensorshard.model.tensors import map_tensors_once

    def resized(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:1].expand(samples, *tensor.shape[1:])

    inputs, targets = map_tensors_once(resized, list(batch()))
    return inputs, targets


def _resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    print(json.dumps(asdict(_search(SCALES[sys.argv[1]]))))
