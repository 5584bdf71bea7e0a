"""The samples of all data ranks, for losses that compare samples with each other."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from tensorshard.comm.differentiable import gather_for_sum
from tensorshard.plan.mesh import Mesh
from tensorshard.plan.plan import Plan


@dataclass(frozen=True)
class _Call:
    """A call of an Engine that is under way.

    Args:
        call: its name.
        counts: whether the samples at hand are this rank's own, and not one that stands in.
    """

    call: str
    plan: Plan
    mesh: Mesh
    counts: bool = True


_calls: list[_Call] = []  # not of a thread: backward recomputes in others


@contextmanager
def samples_of(call: str, plan: Plan, mesh: Mesh) -> Iterator[None]:
    """The context of a call of an Engine."""
    _calls.append(_Call(call, plan, mesh))
    try:
        yield
    finally:
        _calls.pop()


@contextmanager
def standing_in() -> Iterator[None]:
    """A context in which the sample at hand stands in where this rank has none."""
    _calls[-1] = replace(_calls[-1], counts=False)
    try:
        yield
    finally:
        _calls[-1] = replace(_calls[-1], counts=True)


def gather_samples(tensor: torch.Tensor, mesh: Mesh | None = None) -> torch.Tensor:
    """`tensor` of all data ranks, in the order of the batch, for a loss that compares samples: contrastive ones, say.

    It is called in a loss function or a forward, on every rank. Compute the loss of the whole batch from what it
    returns, as one process would: losses, gradients and weights are then those of one process under any plan. A loss of
    this rank's own samples against all of them is as exact, and cheaper. Backward sums what all ranks' losses ask of a
    rank's samples.

    Args:
        tensor: of this data rank's samples, the first dimension; features, labels or losses. Ranks may have different
            numbers.
        mesh: ``engine.mesh``, in a loop of your own. Within the calls of an Engine it is known.

    Returns:
        The samples of all data ranks, differentiable. In an epoch's last batch, samples that stand in are left out.

    Raises:
        RuntimeError: no Engine's call is under way, and there is no `mesh`.
        ValueError: the plan cuts the batch into micro-batches, so that samples of different ones cannot be compared;
            `tensor` is a scalar.

    Examples:
        >>> def loss_fn(features, _):
        ...     features = torch.nn.functional.normalize(ts.gather_samples(features))
        ...     scores = features @ features.T / 0.1
        ...     return torch.nn.functional.cross_entropy(scores, torch.arange(len(scores)))
        >>> adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
        >>> engine = ts.parallelize(torch.nn.Linear(16, 4), ts.Plan(zero=3), optimizer=adamw, loss_fn=loss_fn)
        >>> loss = engine.step(torch.randn(8, 16), torch.zeros(8))
    """
    if tensor.dim() == 0:
        raise ValueError(
            "gather_samples was given a scalar, which has no samples; give it a tensor whose first dimension is the "
            "samples, such as losses of reduction='none'"
        )
    if mesh is None:
        if not _calls:
            raise RuntimeError(
                "gather_samples was called outside of an Engine's calls, so it is not known which ranks share the "
                "batch: in a loop of your own call gather_samples(tensor, engine.mesh)"
            )
        call = _calls[-1]
        mesh = call.mesh
        if call.plan.micro_batches > 1 and (call.plan.pp > 1 or call.call in ("step", "replay")):
            raise ValueError(
                f"gather_samples was called under micro_batches={call.plan.micro_batches}: the loss would compare the "
                f"samples of one micro-batch alone, and depend on the number of ranks. Set micro_batches=1 "
                f"(recompute='full' spares memory; with pp take pp_schedule='gpipe'); or, if you want that, call "
                f"tensorshard.distributed.gather_for_sum(tensor, dim=0, group=engine.mesh.dp_group)"
            )
        if not call.counts:
            tensor = tensor[:0]
    return tensor if mesh.dp_size == 1 else gather_for_sum(tensor, 0, mesh.dp_group)
