"""What a rank's step consists of: kernels and transfers with their counts, on any hardware."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

FORWARD = "forward"
BACKWARD = "backward"
UPDATE = "update"
SECTIONS = (FORWARD, BACKWARD, UPDATE)


@dataclass(frozen=True)
class Kernel:
    """Calls of one operator that do the same work.

    Args:
        section: of the step: "forward", "backward" (with what is recomputed there) or "update".
        name: the operator's name, such as "aten.mm".
        dtype: the type that it computes in, such as "bfloat16".
        flops: floating-point operations of one call; a multiplication and an addition count as two. 0 for operators
            that are bound by memory.
        nbytes: bytes that one call reads and writes.
    """

    section: str
    name: str
    dtype: str
    flops: int
    nbytes: int


@dataclass(frozen=True)
class Transfer:
    """Collectives, sends or receives of one size.

    Args:
        section: of the step, as for :class:`Kernel`.
        axis: the axis of the mesh along which the group lies; "dp" for both data axes at once, "shard" for dp_shard and
            cp, over which parameters are sharded, "gradients" for the data axes and cp, "ep" for the ranks that share
            experts, "experts" for those that hold the same ones, "world" for all ranks.
        collective: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send" or
            "receive".
        nbytes: bytes of the full tensor: the one that is gathered, or the one that is reduced.
        ranks: the number of ranks in the group.
        overlaps: whether the Engine goes on computing while the transfer is under way.
        part_of: the collective that a send or a receive belongs to; "" if it belongs to none.
    """

    section: str
    axis: str
    collective: str
    nbytes: int
    ranks: int
    overlaps: bool = False
    part_of: str = ""

    @property
    def sent(self) -> float:
        """Bytes that each rank sends, by the algorithms that send the fewest (rings)."""
        n = self.ranks
        if self.collective == "all_reduce":
            return 2 * self.nbytes * (n - 1) / n
        if self.collective in ("all_gather", "reduce_scatter", "all_to_all"):
            return self.nbytes * (n - 1) / n
        return 0.0 if self.collective == "receive" else float(self.nbytes)


@dataclass(frozen=True)
class Traffic:
    """What one kind of collective moves along one axis in a step of one rank.

    Args:
        nbytes: bytes of the full tensors. count: the number of calls. ranks: the number of ranks in the group.
        sent: bytes that the rank itself sends.
    """

    nbytes: int
    count: int
    ranks: int
    sent: float


@dataclass
class Operations:
    """The operations of one rank's step.

    Attributes:
        kernels, transfers: how often each occurs.
    """

    kernels: Counter[Kernel] = field(default_factory=Counter)
    transfers: Counter[Transfer] = field(default_factory=Counter)

    @property
    def flops(self) -> int:
        """Floating-point operations of matrix products, convolutions and attention."""
        return sum(kernel.flops * count for kernel, count in self.kernels.items())

    @property
    def memory_traffic(self) -> int:
        """Bytes that kernels read and write, if nothing stays in caches."""
        return sum(kernel.nbytes * count for kernel, count in self.kernels.items())

    def traffic(self) -> dict[str, dict[str, Traffic]]:
        """What is moved, by axis and collective. Groups of one rank move nothing, and are left out."""
        found: dict[str, dict[str, Traffic]] = {}
        for transfer, count in self.transfers.items():
            of_axis = found.setdefault(transfer.axis, {})
            before = of_axis.get(transfer.collective, Traffic(0, 0, transfer.ranks, 0.0))
            of_axis[transfer.collective] = Traffic(
                before.nbytes + transfer.nbytes * count,
                before.count + count,
                transfer.ranks,
                before.sent + transfer.sent * count,
            )
        return found

    def of(self, section: str) -> Iterator[tuple[Kernel, int]]:
        """The kernels of a section, with their counts."""
        return ((kernel, count) for kernel, count in self.kernels.items() if kernel.section == section)
