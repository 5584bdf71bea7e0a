"""Compares over the data ranks what user code has written to parameters: it must be the same on all of them."""

from collections.abc import Mapping, Sequence
from typing import Any

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


class WrittenShards:
    """What user code has written to parameters of which a rank holds shards, since the last comparison.

    Args:
        names: of the parameters.
        group: the data ranks.
        holders: the ranks that hold a parameter, by parameter, where these are not all data ranks.
    """

    def __init__(
        self,
        names: Mapping[Any, str],
        group: dist.ProcessGroup,
        device: torch.device,
        holders: Mapping[Any, dist.ProcessGroup],
    ) -> None:
        self._names, self._holders = dict(names), dict(holders)
        self._group, self._device = group, device
        self._prints: dict[Any, torch.Tensor] = {}
        self.compares = group.size() > 1

    def __bool__(self) -> bool:
        return bool(self._prints)

    def note(self, parameter: Any, *values: torch.Tensor) -> None:
        """Notes that `values`, of which every rank has all, were written to a `parameter`."""
        if not self.compares or parameter not in self._names:
            return
        for value in values:
            mine = fingerprint(value).to(self._device)
            known = self._prints.get(parameter)
            self._prints[parameter] = mine if known is None else known + mine

    def forget(self) -> None:
        """Drops what was noted."""
        self._prints.clear()

    def compare(self) -> None:
        """Called by all data ranks, if one of them has noted something.

        Raises:
            RuntimeError: the ranks wrote different values. It names the first parameter.
        """
        prints, self._prints = self._prints, {}
        parameters = list(self._names)
        written = gather_flags([p in prints for p in parameters], self._group, self._device)
        members = [p for p, flag in zip(parameters, written, strict=True) if flag]
        nothing = torch.zeros(2, dtype=torch.float64, device=self._device)
        for group in {id(group): group for group in (self._group, *self._holders.values())}.values():
            own = [p for p in members if self._holders.get(p, self._group) is group]
            if own:
                compare_fingerprints([self._names[p] for p in own], [prints.get(p, nothing) for p in own], group)
