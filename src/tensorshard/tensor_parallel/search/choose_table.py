"""Chooses the table of a plan: the one given, checked; or one that is found now, or was found earlier."""

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from tensorshard.tensor_parallel.search.check_table import check_tensor_table
from tensorshard.tensor_parallel.search.find_table import VerifiedTable, find_tensor_plan, split_share
from tensorshard.tensor_parallel.search.table_cache import KeptTable, TableFile
from tensorshard.tensor_parallel.table.styles import Gather
from tensorshard.tensor_parallel.table.table import TensorTable

logger = logging.getLogger("tensorshard")


def choose_tensor_table(
    model: nn.Module,
    size: int,
    table: Mapping[str, str] | None = None,
    *,
    inputs: Any = None,
    check: bool = True,
    sequence_parallel: bool = False,
) -> VerifiedTable:
    """The table for `model` on `size` ranks: `table` if given, else one that is found.

    A table that is found is kept on disk (:mod:`tensorshard.tensor_parallel.search.table_cache`). The next time it is
    taken from there if it still passes the check by numbers. If it does not, the search runs again.

    Args:
        model: on any device, the meta device included; left as it is.
        table: as ``Plan(tp_plan=...)`` takes it.
        inputs: as for ``Engine.step``; None to guess from the model.
        check: whether a given table is checked by numbers. If False, only names, styles and sizes are checked.
        sequence_parallel: whether the model's blocks are to compute on parts of a sequence.

    Raises:
        ValueError: the table given is wrong for this model, or none can be found.
    """
    if table is None:
        return _kept_or_found(model, size, inputs, sequence_parallel)
    plan = TensorTable.from_dict(table)
    share = split_share(model, plan, size)
    if not check:
        if sequence_parallel:
            raise ValueError(
                "sequence_parallel=True needs the check of the table, which finds out where a sequence can be split; "
                "set tp_check=True"
            )
        return VerifiedTable(plan, {}, share, size, [], checked=False)
    return _checked(model, KeptTable(plan, {}, {}), size, inputs, sequence_parallel)


def _kept_or_found(model: nn.Module, size: int, inputs: Any, sequence_parallel: bool) -> VerifiedTable:
    file = TableFile.of(model, size, inputs, sequence_parallel)
    kept = file.read() if file is not None else None
    if file is not None and kept is not None:
        try:
            found = _checked(model, kept, size, inputs, sequence_parallel)
        except ValueError as error:  # the kept table is wrong for this model now: search again
            logger.info(
                "the tensor-parallel table in %s does not fit any more, and is searched again: %s", file.path, error
            )
        else:
            logger.info("the tensor-parallel table is from %s, and passed its check again", file.path)
            return found
    found = find_tensor_plan(model, size, inputs=inputs, sequence_parallel=sequence_parallel)
    if file is not None:
        file.write(KeptTable(found.plan, found.whole, found.alone))
    return found


def _checked(model: nn.Module, table: KeptTable, size: int, inputs: Any, sequence_parallel: bool) -> VerifiedTable:
    checked = check_tensor_table(model, table.plan, size, inputs=inputs, sequence_parallel=sequence_parallel)
    return VerifiedTable(
        checked.plan,
        {**table.whole, **checked.not_in_parts},
        split_share(model, checked.plan, size),
        size,
        checked.shared_inputs,
        sequence=checked.sequence,
        not_random=checked.not_random,
        alone=table.alone,
        kept_share=split_share(model, checked.plan, size, of=Gather),
    )
