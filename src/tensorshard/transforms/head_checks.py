"""What a head that computes its own loss must be like for a plan to train it."""

from typing import Any

from torch import nn

from tensorshard.nn.linear_cross_entropy import ParallelLinearCrossEntropy
from tensorshard.plan import Plan


def check_heads(model: nn.Module, plan: Plan) -> None:
    """Refuses heads of `model` that do by themselves what a plan does.

    Raises:
        ValueError: a head built with ``update=`` or ``gather_inputs=``; says what of the plan contradicts it.
    """
    for name, module in model.named_modules():
        if not isinstance(module, ParallelLinearCrossEntropy):
            continue
        if module.optimizer is not None:
            raise ValueError(
                f"module {name!r} is a ParallelLinearCrossEntropy built with update=, which changes its weight during "
                f"backward: {_contradiction(plan)}. Build it without update=, so that the plan's optimizer trains it "
                f"from gradients like every other parameter; or train without a Plan, calling head.optimizer.step()"
            )
        if module.gathers_inputs:
            raise ValueError(
                f"module {name!r} is a ParallelLinearCrossEntropy built with gather_inputs=, but under a plan each "
                f"data rank has a loss of its own, which the Engine averages. Leave gather_inputs= out: tp splits the "
                f"classes over ranks that see the same batch, and zero=3 splits what is left over dp_shard"
            )


def check_loss_function(loss_fn: Any) -> None:
    """Refuses a loss function with parameters, which nothing would train, split or save.

    Raises:
        ValueError: it is a module that has some.
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


def _contradiction(plan: Plan) -> str:
    if plan.clip_grad_norm is not None:
        return f"clip_grad_norm={plan.clip_grad_norm} scales gradients that would have been used by then"
    if plan.precision == "fp16":
        return "precision='fp16' scales losses and skips steps that overflow, and an update cannot be taken back"
    if plan.dp_size > 1:
        return f"gradients are averaged over dp_shard x dp_replicate = {plan.dp_size} data ranks after backward"
    return "the Engine divides by the count of a whole step and takes no step from a loss that is not finite"
