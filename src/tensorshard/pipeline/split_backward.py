"""Whether a stage's backward may be split in two: first the gradients of inputs, then those of parameters."""

from tensorshard.plan.plan import Plan


def may_split_backward(plan: Plan) -> bool:
    """Whether gradients of inputs and of parameters may be computed apart.

    They may not where something would be computed or sent twice, as in recomputed blocks and split layers, nor where
    parameters are held during only one of the two.
    """
    whole_parameters = plan.zero < 3 or plan.dp_shard == 1  # type: ignore[operator]
    return plan.tp == 1 and whole_parameters and plan.recompute == "none" and not plan.compile
