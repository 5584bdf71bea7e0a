"""For tests of your own: that a plan trains your model exactly as one device would."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from tensorshard.engine.engine import LossFunction
    from tensorshard.engine.optimizer import OptimizerFactory
    from tensorshard.plan.plan import Plan
    from tensorshard.verify.verification import Verification

__all__ = ["assert_exact"]


def assert_exact(
    model: "nn.Module | Callable[[], nn.Module]",
    plan: "Plan",
    *,
    inputs: Any,
    targets: Any,
    optimizer: "OptimizerFactory",
    loss_fn: "LossFunction",
    world_size: int | None = None,
    steps: int = 3,
) -> "Verification":
    """Trains a small version of `model` on CPU processes under `plan`, and asserts that one process gets the same.

    Arguments and errors are those of :func:`tensorshard.verify`. It takes seconds, and no GPU.

    Returns:
        What was found, whose ``hash`` changes with the model, the plan and the versions.

    Raises:
        AssertionError: something differs. The message is that of :meth:`tensorshard.Verification.describe`.

    Examples:
        >>> from tensorshard.testing import assert_exact
        >>> adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
        >>> build = functools.partial(torch.nn.Linear, 16, 4)
        >>> batch = dict(inputs=torch.randn(8, 16), targets=torch.randn(8, 4))
        >>> loss_fn = torch.nn.functional.mse_loss
        >>> found = assert_exact(build, ts.Plan(zero=2), **batch, optimizer=adamw, loss_fn=loss_fn)
    """
    from tensorshard.verify import verify

    found = verify(
        model,
        plan,
        inputs=inputs,
        targets=targets,
        optimizer=optimizer,
        loss_fn=loss_fn,
        world_size=world_size,
        steps=steps,
    )
    if not found:
        raise AssertionError(found.describe())
    return found
