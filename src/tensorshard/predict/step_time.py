"""How long a step takes, from what each rank computes and sends and from how fast the hardware is.

Each operator takes as long as its arithmetic or its memory traffic, whichever is longer (the roofline of Williams et
al. 2009). A collective takes a latency for each message, and its bytes at the link's bandwidth (Hockney 1994; rings as
in Thakur et al. 2005). A pipeline is simulated in the order of its own schedule. The hardware reaches a share of its
peaks that is known only between two limits. So a time is an interval.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tensorshard.plan.plan import AXES, Plan
from tensorshard.predict.hardware import Link, Rates
from tensorshard.predict.operation_ledger import BACKWARD, FORWARD, SECTIONS, UPDATE, Kernel, Operations, Transfer
from tensorshard.predict.rank_estimate import RankEstimate

if TYPE_CHECKING:
    from tensorshard.pipeline.run.draw_schedule import Timeline

COMPUTE = "compute"
COMMUNICATION = "exposed communication"
BUBBLE = "bubble"
OPTIMIZER = "optimizer"
OFFLOAD = "offload"
TIME_CATEGORIES = (COMPUTE, COMMUNICATION, BUBBLE, OPTIMIZER, OFFLOAD)

_SENDS = ("send", "receive")
_LAUNCHES = 1.5  # launches may take longer or shorter than their known time by this factor
_WORST, _MIDDLE, _BEST = 0.0, 0.5, 1.0  # places between the least and the most that the hardware reaches of its peaks


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, on the rank that takes the longest.

    Args:
        seconds: the middle. low, high: the times if the hardware reaches the most, and the least, of its peaks.
        by_category: seconds by what they are spent on (:data:`TIME_CATEGORIES`); they add up to `seconds`.
        busy: seconds in which ranks compute or send, of all ranks together.
    """

    seconds: float
    low: float
    high: float
    by_category: dict[str, float]
    busy: float = 0.0

    def on_cores(self, cores: int) -> float:
        """Seconds of a step whose ranks share so many cores, and wait for each other there."""
        return max(self.seconds, self.busy / cores)


@dataclass(frozen=True)
class _RankTime:
    """Seconds of the parts of one rank's step, without waiting for other stages."""

    forward: float
    backward: float
    update: float
    blocking: dict[str, float]  # transfers that are waited for at once, by section
    exposed: float  # the part of overlapping transfers that kernels do not hide
    message: float  # of the largest message to another stage
    offload: float
    transfers: float  # of all that the rank sends, waited for or not

    @property
    def busy(self) -> float:
        """Seconds of the rank's own work."""
        return self.forward + self.backward + self.update + self.transfers + self.offload

    def section(self, name: str) -> float:
        """Seconds of forward or of backward, with the transfers in it that are waited for."""
        return (self.forward if name == FORWARD else self.backward) + self.blocking[name]


def step_time(ranks: Sequence[RankEstimate], plan: Plan, world_size: int, rates: Rates) -> StepTime:
    """The time of a step of a resolved `plan`.

    Args:
        ranks: one for each pipeline rank, in order.
    """
    worst, middle, best = (
        [_rank_time(rank, plan, world_size, rates, place) for rank in ranks] for place in (_WORST, _MIDDLE, _BEST)
    )
    seconds, by_category = _slowest(middle, plan)
    low, high = _slowest(best, plan)[0], _slowest(worst, plan)[0]
    busy = sum(time.busy for time in middle) * (world_size // len(ranks))
    return StepTime(seconds, low, high, by_category, busy)


def _slowest(times: Sequence[_RankTime], plan: Plan) -> tuple[float, dict[str, float]]:
    """Seconds of the rank that takes the longest, and what they are spent on."""
    if plan.pp == 1:
        ends = [time.section(FORWARD) + time.section(BACKWARD) for time in times]
    else:
        ends = [rank[-1].end for rank in _simulate_schedule(times, plan).ranks]
    totals = [
        end + time.exposed + time.update + time.blocking[UPDATE] + time.offload
        for end, time in zip(ends, times, strict=True)
    ]
    slowest = max(range(len(totals)), key=totals.__getitem__)
    time, end = times[slowest], ends[slowest]
    by_category = {
        COMPUTE: time.forward + time.backward,
        COMMUNICATION: sum(time.blocking.values()) + time.exposed,
        BUBBLE: end - time.section(FORWARD) - time.section(BACKWARD),
        OPTIMIZER: time.update,
        OFFLOAD: time.offload,
    }
    return totals[slowest], by_category


def _simulate_schedule(times: Sequence[_RankTime], plan: Plan) -> "Timeline":
    """The schedule of a plan. All stages of one rank are taken to be equally long."""
    from tensorshard.pipeline.run.draw_schedule import timeline
    from tensorshard.pipeline.run.split_backward import may_split_backward

    stage_runs = plan.micro_batches * plan.stages_per_rank
    split = may_split_backward(plan)
    durations = []
    for time in times:
        backward = time.section(BACKWARD) / stage_runs
        inputs = backward / 2 if split else backward
        durations.append({"F": time.section(FORWARD) / stage_runs, "B": backward, "I": inputs, "W": backward - inputs})
    return timeline(
        plan.pp_schedule,
        ranks=plan.pp,
        stages_per_rank=plan.stages_per_rank,
        micro_batches=plan.micro_batches,
        durations=durations,
        message=max(time.message for time in times),
    )


def _rank_time(rank: RankEstimate, plan: Plan, world_size: int, rates: Rates, place: float) -> _RankTime:
    operations = rank.operations
    kernels = {name: _kernels_time(operations, name, rates, place) for name in SECTIONS}
    blocking = dict.fromkeys(SECTIONS, 0.0)
    hidden: dict[str, list[tuple[float, int]]] = {name: [] for name in SECTIONS}
    message = sent = 0.0
    for transfer, count in operations.transfers.items():
        seconds = transfer_time(transfer, plan, world_size, rates, place)
        sent += seconds * count if transfer.collective != "receive" else 0.0
        if transfer.axis == "pp" and transfer.collective in _SENDS:
            message = max(message, seconds)
        elif transfer.collective == "receive":
            pass  # it takes no time of its own: the rank receives while it sends
        elif transfer.overlaps and rates.asynchronous:
            hidden[transfer.section].append((seconds, count))
        else:
            blocking[transfer.section] += seconds * count
    exposed = sum(_left_over(hidden[name], _window(name, kernels, plan)) for name in SECTIONS)
    offload = _offload_time(rank, world_size, rates)
    return _RankTime(kernels[FORWARD], kernels[BACKWARD], kernels[UPDATE], blocking, exposed, message, offload, sent)


def _kernels_time(operations: Operations, section: str, rates: Rates, place: float) -> float:
    return sum(kernel_time(kernel, rates, place) * count for kernel, count in operations.of(section))


def kernel_time(kernel: Kernel, rates: Rates, place: float = _MIDDLE) -> float:
    """Seconds of one call: of its arithmetic, or of its memory traffic if that is longer (the roofline).

    Args:
        place: between 0 for the least that hardware reaches of its peaks, and 1 for the most.
    """
    arithmetic = kernel.flops / (rates.peak(kernel.dtype) * _share(rates.matmul_efficiency, place))
    memory = kernel.nbytes / (rates.memory_bandwidth * _share(rates.memory_efficiency, place))
    work = max(arithmetic, memory)
    launch = rates.launch * _LAUNCHES ** (1 - 2 * place)
    # The host launches ahead of an asynchronous device, which waits only if its work is shorter than the launch.
    return max(work, launch) if rates.asynchronous else work + launch


def transfer_time(transfer: Transfer, plan: Plan, world_size: int, rates: Rates, place: float = _MIDDLE) -> float:
    """Seconds of one collective, send or receive. `place`: as for :func:`kernel_time`."""
    link = link_of(transfer.axis, transfer.ranks, plan, world_size, rates)
    nbytes = transfer.sent if transfer.collective != "receive" else float(transfer.nbytes)
    ring = 1 if transfer.collective in _SENDS else transfer.ranks - 1
    if rates.asynchronous:  # a tree, if the ring has more steps
        ring = min(ring, 2 * math.ceil(math.log2(transfer.ranks)))
    messages = 2 * ring if transfer.collective == "all_reduce" else ring
    return messages * link.latency + nbytes / (link.bandwidth * _share(link.efficiency, place))


def link_of(axis: str, ranks: int, plan: Plan, world_size: int, rates: Rates) -> Link:
    """The link of the slowest part of a ring along `axis`.

    If several devices of a node are in the group, the ring uses the network adapters of all of them.
    """
    stride = 1
    if axis in AXES:
        stride = math.prod(getattr(plan, inner) for inner in AXES[AXES.index(axis) + 1 :])
    elif axis == "dp":
        stride = plan.cp * plan.tp
    elif axis in ("shard", "gradients", "ep"):
        stride = plan.tp
    elif axis == "experts":
        stride = plan.tp * plan.ep
    if stride * (ranks - 1) < rates.devices_per_node:
        return rates.within_node
    together = max(1, rates.devices_per_node // stride)
    between = rates.between_nodes
    bandwidth = min(between.bandwidth * together, rates.within_node.bandwidth)
    return Link(bandwidth, between.latency, between.efficiency)


def _share(limits: tuple[float, float], place: float) -> float:
    low, high = limits
    return low * (high / low) ** place


def _window(section: str, kernels: dict[str, float], plan: Plan) -> float:
    """Seconds of the kernels that run while the transfers of a section are under way."""
    if plan.zero == 3 or (plan.zero == 2 and section == BACKWARD):
        return kernels[section]
    # Gradients are reduced in the last micro-batch's backward, and weights gathered in the next step's first forward.
    return kernels[BACKWARD if section == BACKWARD else FORWARD] / plan.micro_batches


def _left_over(transfers: list[tuple[float, int]], window: float) -> float:
    """Seconds of transfers that kernels do not hide: at least one, before the first or after the last kernel."""
    if not transfers:
        return 0.0
    total = sum(seconds * count for seconds, count in transfers)
    return max(total - window, *(seconds for seconds, _ in transfers))


def _offload_time(rank: RankEstimate, world_size: int, rates: Rates) -> float:
    """Seconds in which the update waits for offloaded values to be moved. A node's devices share its disk."""
    disk = 0.0
    if rank.disk_traffic and rates.disk_bandwidth:
        disk = rank.disk_traffic * min(world_size, rates.devices_per_node) / rates.disk_bandwidth
    return disk + rank.host_traffic / rates.host_bandwidth
