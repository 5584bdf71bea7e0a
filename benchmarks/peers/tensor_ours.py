"""tensorshard: a Plan with ``tp``, or its parallel layers put in by hand."""

from functools import partial

import torch
from torch import Tensor, nn
from torch import distributed as dist

import tensorshard as ts
from benchmarks.layers import LayerWork, LlamaLayers
from tensorshard.models.layers import MLP


def build(
    work: LayerWork, rank: int, world_size: int, *, by_hand: bool = False, sequence_parallel: bool = False
) -> nn.Module:
    """Options: `by_hand` puts ``ts.nn.ParallelLinear`` into an MLP; otherwise a Plan does everything, with
    `sequence_parallel` if that is set, and the model is called in a raw loop."""
    if by_hand:
        return _by_hand(work)
    plan = ts.Plan(tp=world_size, zero=0, sequence_parallel=sequence_parallel)
    optimizer = partial(torch.optim.SGD, lr=0.0)  # never steps
    layer = work.module()
    model = parallelized(layer)
    parameter_count = sum(p.numel() for p in model.parameters())
    engine = ts.parallelize(
        model,
        plan,
        optimizer=optimizer,
        loss_fn=nn.functional.mse_loss,
        device="cpu",
        sample_inputs=sample_inputs(work, model),
    )
    if engine.summary().updated_parameters >= parameter_count:  # the model's own parameters look whole
        raise RuntimeError("the plan split nothing, so that this is not tensor parallelism")
    engine.model.engine = engine  # whose gradients' hooks it needs, and nobody else here holds
    if isinstance(layer, LlamaLayers):
        return LlamaLayers(work.width, work.num_heads, work.sequence, engine.model)
    return engine.model


def parallelized(layer: nn.Module) -> nn.Module:
    """The part of a plain layer that a Plan is applied to: Transformers' own model where there is one."""
    return layer.model if isinstance(layer, LlamaLayers) else layer


def sample_inputs(work: LayerWork, model: nn.Module) -> Tensor | None:
    """Inputs for the search of what can be split in `model`; None where it guesses them from the model's config."""
    return None if hasattr(model, "config") else work.batch()[0].detach()


def _by_hand(work: LayerWork) -> nn.Module:
    mlp = work.module()
    if not isinstance(mlp, MLP):
        raise ValueError(f"the parallel layers are put into an 'mlp' by hand, not into {work.kind!r}")
    group = dist.group.WORLD
    ts.nn.ParallelLinear.convert_parallel_linear(mlp, 1, ["up"], group)
    ts.nn.ParallelLinear.convert_parallel_linear(mlp, 0, ["down"], group)
    return mlp
