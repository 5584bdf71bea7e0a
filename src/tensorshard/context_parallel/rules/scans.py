"""Running sums and differences along the positions: each rank's own, and what comes from the ranks before it."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tensorshard.context_parallel.exchanges import stack_ranks
from tensorshard.context_parallel.rule_table import Signature, rule
from tensorshard.context_parallel.rules.reductions import along
from tensorshard.context_parallel.sequence_tensor import SequenceTensor

_CALL = Signature(lambda input, dim, dtype=None: 0)


_MOST_RUNS = 64
_DIFF = Signature(lambda input, n=1, dim=-1, prepend=None, append=None: 0)


@rule("diff")
def diff(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Differences of neighbours: two slices."""
    call = _DIFF.bind(args, kwargs)
    if call is None or call["n"] != 1 or call["input"].dtype == torch.bool:
        return NotImplemented
    dim = call["dim"] % call["input"].ndim
    pieces = [piece for piece in (call["prepend"], call["input"], call["append"]) if piece is not None]
    x = torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0]
    return x.narrow(dim, 1, x.shape[dim] - 1) - x.narrow(dim, 0, x.shape[dim] - 1)


@rule("cumsum")
def cumsum(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A running sum. The order within a rank may be any, as long as the ranks' runs are known."""
    call = _CALL.bind(args, kwargs)
    if call is None:
        return along(func, args, kwargs)
    x, dim, dtype = call["input"], call["dim"], call["dtype"]
    if (
        not isinstance(x, SequenceTensor)
        or not isinstance(dim, int)
        or dim % x.ndim != x.split_dim
        or dtype is not None
    ):
        return along(func, args, kwargs)
    most = max(len(runs) for runs in x.sequence.runs)
    return along(func, args, kwargs) if most > _MOST_RUNS else x.like(_by_runs(x, most))


def _by_runs(x: SequenceTensor, most: int) -> torch.Tensor:
    """The sums of all runs are exchanged, and each run begins with those before it."""
    dim, rank = x.split_dim, x.group.rank
    lengths = [int(stop - start) for start, stop in x.sequence.runs[rank]]
    parts = x.local.split([*lengths, *[0] * (most - len(lengths))], dim)
    sums = torch.stack([part.sum(dim, keepdim=True) for part in parts])
    everyone = stack_ranks(sums, "cumsum", x.group).flatten(0, 1)  # [ranks * most, ...]
    starts = np.full((x.group.size, most), x.sequence.length)
    for each, runs in zip(starts, x.sequence.runs, strict=True):
        each[: len(runs)] = runs[:, 0]
    out = []
    for at, part in enumerate(parts):
        earlier = torch.from_numpy(np.flatnonzero(starts.reshape(-1) < starts[rank, at])).to(x.device)
        total = part.cumsum(dim)
        out.append(total + everyone.index_select(0, earlier).sum(0).to(total.dtype))
    return torch.cat(out, dim)
