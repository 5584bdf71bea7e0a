"""Chooses the table of a plan: the one given, checked; or one from the cache; or one that is searched."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from tensorshard.tensor_parallel.apply.apply_table import split_shares
from tensorshard.tensor_parallel.search.check_table import check_tensor_table
from tensorshard.tensor_parallel.search.find_table import find_tensor_plan
from tensorshard.tensor_parallel.search.table_cache import CachedTable, TableFile
from tensorshard.tensor_parallel.table.table import TensorTable, VerifiedTable

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
    """The table for `model` on `size` ranks: `table` if given, else the result of the search.

    A result is cached on disk (:mod:`tensorshard.tensor_parallel.search.table_cache`). The next time it is taken from
    there if it still passes the check by numbers. If it does not, the search runs again.

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
        return _cached_or_found(model, size, inputs, sequence_parallel)
    given = TensorTable.from_dict(table)
    split, gathered = split_shares(model, given, size)
    if not check:
        if sequence_parallel:
            raise ValueError(
                "sequence_parallel=True needs the check of the table, which finds out where a sequence can be split; "
                "set tp_check=True"
            )
        return VerifiedTable(given, {}, split, size, [], checked=False, kept_share=gathered)
    return check_tensor_table(model, given, size, inputs=inputs, sequence_parallel=sequence_parallel)


def _cached_or_found(model: nn.Module, size: int, inputs: Any, sequence_parallel: bool) -> VerifiedTable:
    file = TableFile.of(model, size, inputs, sequence_parallel)
    cached = file.read() if file is not None else None
    if file is not None and cached is not None:
        try:
            verified = check_tensor_table(model, cached.plan, size, inputs=inputs, sequence_parallel=sequence_parallel)
        except ValueError as error:  # the cached table is wrong for this model now: search again
            logger.info(
                "the tensor-parallel table in %s does not fit any more, and is searched again: %s", file.path, error
            )
        else:
            logger.info("the tensor-parallel table is from %s, and passed its check again", file.path)
            return replace(verified, whole={**cached.whole, **verified.whole}, alone=cached.alone)
    found = find_tensor_plan(model, size, inputs=inputs, sequence_parallel=sequence_parallel)
    if file is not None:
        file.write(CachedTable(found.plan, found.whole, found.alone))
    return found
