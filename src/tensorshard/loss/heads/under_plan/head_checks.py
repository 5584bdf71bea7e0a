"""Checks whether a plan can train a head that computes its own loss."""

from typing import Any

from torch import nn

from tensorshard.loss.heads.module.parallel_linear_cross_entropy import ParallelLinearCrossEntropy


def check_heads(model: nn.Module) -> None:
    """Refuses heads of `model` that do by themselves what a plan does.

    Raises:
        ValueError: a head was built with ``gather_inputs=`` or ``grad_scale=``. The message names the field of the plan
            that contradicts it.
    """
    for name, head in find_heads(model).items():
        if head.gathers_inputs:
            raise ValueError(
                f"module {name!r} is a ParallelLinearCrossEntropy built with gather_inputs=, but under a plan each "
                f"data rank has a loss of its own, which the Engine averages. Leave gather_inputs= out: tp splits the "
                f"classes over ranks that see the same batch, and zero=3 splits what is left over dp_shard"
            )
        if head.grad_scale != 1.0:
            raise ValueError(
                f"module {name!r} is a ParallelLinearCrossEntropy built with grad_scale={head.grad_scale}, which "
                f"undoes an average over ranks whose batches were gathered; under a plan none are, and the "
                f"Engine weighs the gradients. Leave grad_scale= out"
            )


def find_heads(model: nn.Module) -> dict[str, ParallelLinearCrossEntropy]:
    """The heads of `model`, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, ParallelLinearCrossEntropy)}


def refuse_updates(model: nn.Module) -> None:
    """Refuses heads with ``update=``, for a caller whose optimizer exists already and cannot take over a head's rule.

    Raises:
        ValueError: a head was built with ``update=``.
    """
    for name, head in find_heads(model).items():
        if head.optimizer is not None:
            raise ValueError(
                f"module {name!r} is a ParallelLinearCrossEntropy built with update=, which changes its weight during "
                f"backward, before the ranks' gradients are averaged. Build it without update= and give its parameters "
                f"to the optimizer; or use tensorshard.parallelize, which makes an SGD train it so"
            )


def check_loss_function(loss_fn: Any) -> None:
    """Refuses a loss function with parameters, which nothing would train, split or save.

    Raises:
        ValueError: it is a module with parameters.
    """
    if not isinstance(loss_fn, nn.Module):
        return
    trained = [name for name, parameter in loss_fn.named_parameters()]
    if trained:
        raise ValueError(
            f"loss_fn is a {type(loss_fn).__name__} with parameters ({', '.join(trained[:3])}), which the Engine would "
            f"not train, split or save: make it the model's last layer, called with the targets in the model's "
            f"forward, pass (inputs, targets) as inputs, and loss_fn=lambda output, targets: output"
        )
