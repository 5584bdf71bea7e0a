"""Which table a plan uses: the one given, checked, or one that is found."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from tensorshard.tensor_parallel.search.check_table import check_tensor_plan
from tensorshard.tensor_parallel.search.find_table import VerifiedTable, find_tensor_plan, split_share
from tensorshard.tensor_parallel.table.table import TensorPlan


def choose_tensor_plan(
    model: nn.Module,
    size: int,
    table: Mapping[str, str] | None = None,
    *,
    inputs: Any = None,
    check: bool = True,
    sequence_parallel: bool = False,
) -> VerifiedTable:
    """The table for `model` on `size` ranks: `table` if given, else one that is found.

    Deterministic: every rank that calls it with the same model gets the same table.

    Args:
        model: on any device, the meta device included; left as it is.
        table: as ``Plan(tp_plan=...)`` takes it.
        inputs: as for ``Engine.step``; None to guess from the model.
        check: whether a given table is checked by numbers. Without, only names, styles and sizes are.
        sequence_parallel: whether its blocks are to compute on parts of a sequence.

    Raises:
        ValueError: the table given is wrong for this model, or none can be found.
    """
    if table is None:
        return find_tensor_plan(model, size, inputs=inputs, sequence_parallel=sequence_parallel)
    plan = TensorPlan.from_dict(table)
    share = split_share(model, plan, size)
    if not check:
        if sequence_parallel:
            raise ValueError(
                "sequence_parallel=True needs the check of the table, which finds out where a sequence can be split; "
                "set tp_check=True"
            )
        return VerifiedTable(plan, {}, share, size, [], checked=False)
    checked = check_tensor_plan(model, plan, size, inputs=inputs, sequence_parallel=sequence_parallel)
    return VerifiedTable(
        checked.plan,
        checked.not_in_parts,
        share,
        size,
        checked.shared_inputs,
        sequence=checked.sequence,
        not_random=checked.not_random,
    )
