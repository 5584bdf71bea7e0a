"""Gradients of parameters that stages on several pipeline ranks use, such as tied ones."""

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tensorshard.comm.sharding import dtensor_like, to_local


class SharedGradients:
    """Adds up the gradients of all ranks that have a parameter, on each of them.

    Every rank sends its gradient to the others and sums in the order of the ranks. So all get the same to the last bit,
    and equal weights stay equal.

    Args:
        ranks: for each parameter, the pipeline ranks that have it.
        masters: this rank's parameters.
        is_trained: says of a name whether it is trained now. Those that are not at first are left out.
        group: of the pipeline.
        device: from which the ranks send tensors.
    """

    def __init__(
        self,
        ranks: Mapping[str, Sequence[int]],
        masters: Mapping[str, nn.Parameter],
        is_trained: Callable[[str], bool],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._group = group
        self._device = device
        self._is_trained = is_trained
        self._ranks = {name: list(who) for name, who in sorted(ranks.items()) if len(who) > 1 and name in masters}
        self._masters = {name: masters[name] for name in self._ranks}
        # A frozen one stays in: the ranks need not agree about that. One that is unfrozen comes in on all at once.
        self._active = {name for name in self._ranks if is_trained(name)}

    @property
    def is_stale(self) -> bool:
        """Whether a parameter of this rank is trained whose gradients are not added up."""
        return any(self._is_trained(name) for name in self._ranks.keys() - self._active)

    def take_all(self) -> None:
        """Adds up the gradients of all parameters from now on. Called on all ranks at the same time."""
        self._active = set(self._ranks)

    @property
    def names(self) -> Collection[str]:
        """This rank's parameters that other ranks have, too."""
        return self._ranks.keys()

    @torch.no_grad()
    def add(self) -> None:
        """A collective of the ranks that have any of the parameters. A parameter without a gradient on any rank gets
        none."""
        ranks = {name: who for name, who in self._ranks.items() if name in self._active}
        if not ranks:
            return
        mine = self._group.rank()
        own: dict[str, torch.Tensor] = {}
        received: dict[str, dict[int, torch.Tensor]] = {}
        counts: dict[str, dict[int, torch.Tensor]] = {}
        operations: list[dist.P2POp] = []
        for name, who in ranks.items():
            master = self._masters[name]
            has = master.grad is not None
            sent = to_local(master.grad if has else torch.zeros_like(master))  # type: ignore[arg-type]
            own[name] = sent.contiguous().to(self._device)
            flag = torch.full((1,), float(has), device=own[name].device)
            received[name], counts[name] = {}, {}
            for rank in who:
                if rank == mine:
                    continue
                peer = dist.get_global_rank(self._group, rank)
                received[name][rank] = torch.empty_like(own[name])
                counts[name][rank] = torch.empty_like(flag)
                pairs = [(flag, counts[name][rank]), (own[name], received[name][rank])]
                for sent, room in pairs if own[name].numel() else pairs[:1]:
                    operations.append(dist.P2POp(dist.isend, sent, peer, self._group))
                    operations.append(dist.P2POp(dist.irecv, room, peer, self._group))
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        for name, who in ranks.items():
            master = self._masters[name]
            if master.grad is None and not any(count.item() for count in counts[name].values()):
                continue
            terms = [own[name] if rank == mine else received[name][rank] for rank in who]
            total = terms[0].clone()
            for term in terms[1:]:
                total.add_(term)
            total = total.to(master.device)
            master.grad = dtensor_like(total, master) if isinstance(master, DTensor) else total

    def spread(self, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The sums of further gradients of the parameters, which one rank or several have. A collective as `add`."""
        if not self._ranks:
            return {}
        before = {name: master.grad for name, master in self._masters.items()}
        for name, master in self._masters.items():
            given = gradients.get(name)
            master.grad = None if given is None else given.to(master.device)
        self.add()
        sums = {name: master.grad for name, master in self._masters.items() if master.grad is not None}
        for name, master in self._masters.items():
            master.grad = before[name]
        return sums
