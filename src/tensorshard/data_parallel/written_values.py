"""The comparison over the data ranks of what user code has written to parameters. It must be the same on all."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from tensorshard.comm.collectives import all_gather_into, all_reduce_


@torch.no_grad()
def fingerprint(value: torch.Tensor) -> torch.Tensor:
    """[sum, norm] of a tensor, in fp64: equal on ranks that hold the same values."""
    value = value.detach()
    value = value if value.is_floating_point() else value.double()
    return torch.stack([value.sum(dtype=torch.float64), torch.linalg.vector_norm(value, dtype=torch.float64)])


def gather_flags(flags: Sequence[bool], group: dist.ProcessGroup, device: torch.device) -> list[bool]:
    """For each of `flags`, whether it is true on some rank."""
    message = torch.tensor([float(flag) for flag in flags], device=device)
    all_reduce_(message, group, what="which parameters were written")
    return [number > 0 for number in message.tolist()]


def compare_fingerprints(names: Sequence[str], prints: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Compares the fingerprints of the parameters with these `names`, the same on every rank of `group`.

    Raises:
        RuntimeError: the ranks have different values of one. It names the first.
    """
    mine = torch.stack(list(prints))
    everyone = mine.new_empty((group.size(), *mine.shape))
    all_gather_into(everyone.view(-1), mine.view(-1), group, what="the parameters that were written")
    bits = everyone.view(torch.int64)  # NaN equals NaN
    differ = (bits != bits[:1]).any(dim=2).any(dim=0).tolist()
    for index, (name, different) in enumerate(zip(names, differ, strict=True)):
        if different:
            sums = [f"{value:.6g}" for value in everyone[:, index, 0].tolist()]
            raise RuntimeError(
                f"the data ranks have different values of the parameter {name!r}, which your code has written "
                f"since the last update (their sums by rank: {', '.join(sums)}): make the same write on every "
                f"rank, or write on one and call torch.distributed.broadcast(parameter, src=0). What a forward "
                f"computes from its batch is each data rank's own: sum it over them with ts.distributed.reduce(sums, "
                f"group=engine.mesh.dp_group) or torch.distributed.all_reduce"
            )
