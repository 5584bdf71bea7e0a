"""Which of a model's blocks make random numbers in training, found by running them on fake tensors."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from tensorshard.model.fake_copies import follow_run
from tensorshard.model.model_errors import raised_by_model
from tensorshard.model.provenance import Provenance
from tensorshard.tensor_parallel.verify.block_calls import BlockCall
from tensorshard.tensor_parallel.verify.model_run import ModelRun
from tensorshard.torch_private.fake_tensors import FakeTensorMode


def blocks_without_random_numbers(units: Mapping[str, nn.Module], run: ModelRun) -> frozenset[str]:
    """Names of the blocks that ran without random numbers (dropout, say). Of blocks that are alike, one is run."""
    known: dict[int, bool] = {}
    for name, call in run.calls.items():
        kind = run.kinds[name]
        if kind not in known:
            known[kind] = _makes_random_numbers(units[name], call)
    return frozenset(name for name in run.calls if not known[run.kinds[name]])


def _makes_random_numbers(block: nn.Module, call: BlockCall) -> bool:
    """Whether training runs a random operation in `block`; True if that cannot be found out."""

    def watch(fake: FakeTensorMode, fake_copy: nn.Module, samples: Any) -> Provenance[Any]:
        return Provenance(fake)

    try:
        provenance = follow_run(block, (call.args, call.kwargs), watch, _train)
    except Exception as error:  # a block that evaluates on fake tensors may fail to train on them
        if not raised_by_model(error):
            raise
        return True
    return provenance.rng_ops > 0


def _train(copied: nn.Module, samples: Any, provenance: Provenance[Any]) -> None:
    args, kwargs = samples
    copied.train()
    copied(*args, **kwargs)
