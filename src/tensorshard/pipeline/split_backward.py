"""Whether a stage's backward may be cut in two: gradients of inputs, which are waited for, and of parameters."""

from tensorshard.plan import Plan


def may_split_backward(plan: Plan) -> bool:
    """Whether gradients of inputs and of parameters may be computed apart.

    Not where that would compute (or send) things twice, recomputed blocks and split layers among them, nor where
    parameters are there for one of the two alone.
    """
    whole_parameters = plan.zero < 3 or plan.dp_shard == 1  # type: ignore[operator]
    return plan.tp == 1 and whole_parameters and plan.recompute == "none" and not plan.compile
