"""Models that nothing trains give the outputs of one process under every plan, beside Engines of other plans."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import parity
import tensorshard as ts

PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero3": (2, dict(zero=3)),
    "zero1": (2, dict(zero=1)),
    "zero0": (1, dict()),
    "tp": (2, dict(tp=2)),
    "pp": (2, dict(pp=2, micro_batches=2)),
    "cp": (2, dict(cp=2)),
    "tp-zero3": (4, dict(tp=2, zero=3, recompute="full")),
    "hybrid": (4, dict(dp_replicate=2, zero=3)),
    "pp-zero3": (4, dict(pp=2, zero=3, micro_batches=2)),
    "offload": (2, dict(zero=3, offload="cpu")),
    "tiled": (2, dict(zero=3, logits="tiled")),
    "tiled-tp": (2, dict(tp=2, logits="tiled")),
    "tiled-pp": (2, dict(pp=2, micro_batches=2, logits="tiled")),
    "bf16": (2, dict(zero=3, precision="bf16")),
}
KINDS = ("gpt", "llama")


def _outputs(kind: str, fields: dict[str, Any], as_callable: bool) -> Any:
    build = partial(parity.build, kind)
    frozen = ts.parallelize_frozen(build if as_callable else build(), ts.Plan(**fields))
    tokens, targets = parity.shard(frozen, *parity.batch(kind, 0))
    targets = targets.masked_fill(torch.arange(targets.size(1)) == 2, -100)
    output = frozen(tokens)
    again = frozen(**tokens) if isinstance(tokens, dict) else frozen((tokens,))
    logits = [o if isinstance(o, torch.Tensor) else o.logits for o in (output, again)]
    torch.testing.assert_close(*logits)  # a view's memory may be aligned in another way
    assert not logits[0].requires_grad and logits[0].dtype == torch.float32
    engine = frozen._engine
    assert not any(p.requires_grad for p in engine.sharded.masters().values()) and not engine.optimizer.state
    state = frozen.full_state_dict()
    gathered = engine.gather({"logits": logits[0], "log_probs": frozen.log_probs(tokens, targets)})
    return gathered["logits"], gathered["log_probs"], state


def _alone(kind: str) -> Any:
    model = parity.build(kind).eval()
    tokens, targets = parity.batch(kind, 0)
    targets = targets.masked_fill(torch.arange(targets.size(1)) == 2, -100)
    with torch.no_grad():
        output = model(**tokens) if isinstance(tokens, dict) else model(tokens)
    logits = output if isinstance(output, torch.Tensor) else output.logits
    picked = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return logits, picked.masked_fill(targets == -100, 0.0), model.state_dict()


@pytest.mark.fast_cases("zero3-gpt")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", PLANS)
def test_outputs_are_those_of_one_process(ranks, plan, kind):
    size, fields = PLANS[plan]
    logits, log_probs, state = ranks(1, _alone, kind)[0]
    tolerance = 5e-2 if "precision" in fields else 1e-5
    for rank, found in enumerate(ranks(size, _outputs, kind, fields, plan != "zero1")):
        torch.testing.assert_close(found[0], logits, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(found[1], log_probs, rtol=tolerance, atol=tolerance)
        if rank == 0:
            parity.assert_same_state(found[2], state, 1e-6)


def _bad_calls() -> list[str]:
    frozen = ts.parallelize_frozen(partial(nn.Linear, 6, 3), ts.Plan(zero=3))
    x = torch.randn(4, 6)
    calls = [
        lambda: frozen.step(x, x),
        lambda: frozen.optimiser,
        lambda: frozen(x, input=x),
        lambda: frozen.log_probs(x, torch.zeros(4, 2, dtype=torch.long)),
        lambda: ts.parallelize(frozen.model, ts.Plan(), optimizer=parity.ADAMW, loss_fn=F.mse_loss),
    ]
    found = []
    for call in calls:
        with pytest.raises((AttributeError, TypeError, ValueError)) as error:
            call()
        found.append(str(error.value))
    return found


def test_what_it_cannot_do_says_so(ranks):
    words = ("nothing trains it", "log_probs(inputs, targets)", "name all of them", "logits of the targets' shape")
    for found, wanted in zip(ranks(1, _bad_calls)[0], (*words, "is laid out already"), strict=True):
        assert wanted in found
