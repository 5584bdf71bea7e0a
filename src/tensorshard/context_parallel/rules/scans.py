"""Running sums and differences along the positions: each rank's own, and what comes from the ranks before it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tensorshard.context_parallel.exchanges import stack_ranks
from tensorshard.context_parallel.rule_table import Signature, rule
from tensorshard.context_parallel.rules.reductions import along
from tensorshard.context_parallel.sequence_tensor import SequenceTensor

_CALL = Signature(lambda input, dim, dtype=None: 0)


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
    runs = [runs for runs in x.sequence.runs]
    if max(map(len, runs)) > 2 or (x.local.is_floating_point() is False and x.dtype == torch.bool):
        return along(func, args, kwargs)
    return x.like(_by_runs(x))


def _by_runs(x: SequenceTensor) -> torch.Tensor:
    """At most two runs on a rank (contiguous or zig-zag): the sums of all runs are exchanged."""
    dim, rank = x.split_dim, x.group.rank
    lengths = [int(stop - start) for start, stop in x.sequence.runs[rank]]
    lengths += [0] * (2 - len(lengths))
    parts = x.local.split(lengths, dim)
    sums = torch.stack([part.sum(dim, keepdim=True) for part in parts])
    everyone = stack_ranks(sums, "cumsum", x.group)  # [ranks, 2, ...]
    starts = [[int(run[0]) for run in runs] for runs in x.sequence.runs]
    out = []
    for at, part in enumerate(parts):
        own = starts[rank][at] if at < len(starts[rank]) else 0
        before = everyone[0, 0] * 0
        for other, others in enumerate(starts):
            for number, start in enumerate(others):
                if start < own:
                    before = before + everyone[other, number]
        out.append(part.cumsum(dim) + before.to(part.cumsum(dim).dtype))
    return torch.cat(out, dim)
