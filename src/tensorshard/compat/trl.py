"""TRL's ``SFTTrainer`` and ``DPOTrainer`` with a Plan: ``from tensorshard.compat.trl import SFTTrainer``.

Everything else is TRL's own; see :class:`tensorshard.compat.transformers.WithPlan`, on which other Trainers of TRL can
be built in the same way.
"""

import os
from typing import Any

from tensorshard.compat.taken_over import given_plan
from tensorshard.compat.transformers import AUTO, WithPlan
from tensorshard.plan.plan import Plan

try:
    import trl  # type: ignore[import-not-found, unused-ignore]
except ImportError as error:
    raise ImportError(
        "tensorshard.compat.trl has subclasses of TRL's Trainers, and TRL is not installed: pip install trl"
    ) from error


class _OnDataRanks(WithPlan):
    """A Trainer whose Plan has data ranks alone."""

    def __init__(self, *args: Any, plan: Plan | str | os.PathLike[str] | None = None, **kwargs: Any) -> None:
        given = "plan='auto'" if plan == AUTO else _split_axes(given_plan(plan))
        if given:
            raise ValueError(
                f"{given} was given to TRL's {type(self).__name__}, which puts a forward of its own, with a fused last "
                f"layer, in the place of the model's, and nothing can be split along tp, cp or pp there: take dp_shard "
                f"and dp_replicate with any zero, or call tensorshard.parallelize with a loss_fn"
            )
        super().__init__(*args, plan=plan, **kwargs)


def _split_axes(plan: Plan) -> str:
    return ", ".join(f"{axis}={getattr(plan, axis)}" for axis in ("tp", "cp", "pp") if getattr(plan, axis) > 1)


class SFTTrainer(_OnDataRanks, trl.SFTTrainer):  # type: ignore[misc, unused-ignore]
    """TRL's SFTTrainer with a Plan of data ranks: ZeRO 0 to 3 and hybrid sharding.

    Raises:
        ValueError: the Plan has another axis, or as :class:`tensorshard.compat.transformers.WithPlan`.
    """


class DPOTrainer(_OnDataRanks, trl.DPOTrainer):  # type: ignore[misc, unused-ignore]
    """TRL's DPOTrainer with a Plan, as :class:`SFTTrainer`. Each rank holds the whole reference model."""
