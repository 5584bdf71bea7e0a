"""The update alone, without a disk: parameters a second of one AdamW step, and the share of the memory's bandwidth."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.harness.jobs import run_job
from benchmarks.offloads import OPTIMIZER
from tensorshard import Offload
from tensorshard.offload.offloaded_optimizer import OffloadedOptimizer
from tensorshard.offload.tiers import OffloadedMaster, SlotSpec, Tiers
from tensorshard.offload.transfers import Move

_FACTOR = 0.37  # the factor of a clipped gradient
_RANK_MODULE = "benchmarks.harness.updates_rank"

Step = Callable[[torch.Tensor | None], torch.Tensor]
"""One update. It takes the factor for gradients, or None, and returns the 16-bit weights."""


@dataclass(frozen=True)
class UpdateJob:
    """What a new process measures.

    Args:
        contender: a key of :data:`CONTENDERS`.
        numel: number of parameters, in one tensor.
        clip: whether gradients are multiplied by a factor.
        steps: number of steps after the first, which does not count. Their median counts.
        threads: number of CPU threads.
    """

    contender: str
    numel: int
    clip: bool
    steps: int
    threads: int


@dataclass(frozen=True)
class UpdateMeasurement:
    """The measurements.

    Args:
        triad_bytes_per_second: of ``a = b + s * c``, which reads two arrays and writes one, in the same process.
    """

    step_seconds: float
    triad_bytes_per_second: float

    def bandwidth_share(self, numel: int) -> float:
        """The bytes that a single pass has to move, over the triad's rate."""
        return numel * BYTES_PER_PARAMETER / self.step_seconds / self.triad_bytes_per_second


BYTES_PER_PARAMETER = 4 + 3 * 8 + 2
"""A gradient is read, a master and two states are read and written, a 16-bit weight is written."""


def measure_update(job: UpdateJob, *, timeout: float) -> UpdateMeasurement:
    """Runs `job` in a fresh process."""
    environment = {"OMP_NUM_THREADS": str(job.threads), "CUDA_VISIBLE_DEVICES": ""}
    return UpdateMeasurement(**run_job(_RANK_MODULE, job, 1, environment=environment, timeout=timeout)[0])


def run(job: UpdateJob) -> UpdateMeasurement:
    """Measures in this process."""
    triad = _triad(job.numel, job.steps)
    step = CONTENDERS[job.contender](job.numel)
    factor = torch.tensor(_FACTOR, dtype=torch.float64) if job.clip else None
    return UpdateMeasurement(_median_seconds(lambda: step(factor), job.steps), triad)


def _triad(numel: int, steps: int) -> float:
    a, b, c = (torch.ones(numel) for _ in range(3))
    return 3 * 4 * numel / _median_seconds(lambda: torch.add(b, c, alpha=3.0, out=a), steps)


def _median_seconds(call: Callable[[], object], steps: int) -> float:
    call()
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _weights(numel: int) -> tuple[torch.nn.Parameter, torch.Tensor]:
    """Masters with gradients, and their 16-bit copies."""
    master = torch.nn.Parameter(torch.linspace(-1e-3, 1e-3, numel))
    master.grad = torch.linspace(1, -1, numel)
    return master, torch.zeros(numel, dtype=torch.bfloat16)


def _clipped_and_cast(optimizer: torch.optim.Optimizer, master: torch.nn.Parameter, copy: torch.Tensor) -> Step:
    """A step of `optimizer`, with clipping before and the cast after it as separate passes."""

    @torch.no_grad()
    def step(factor: torch.Tensor | None) -> torch.Tensor:
        assert master.grad is not None
        if factor is not None:
            master.grad.mul_(factor.float())
        optimizer.step()
        return copy.copy_(master)

    return step


def _plain(numel: int) -> Step:
    master, copy = _weights(numel)
    return _clipped_and_cast(OPTIMIZER([master]), master, copy)


def _ours(numel: int) -> Step:
    master, copy = _weights(numel)
    tiers = Tiers(Offload(optimizer="cpu"))
    [place] = tiers.add("cpu", [SlotSpec("master weights", numel, torch.float32)])
    place.tensor.copy_(master.detach())
    offloaded = OffloadedOptimizer(
        OPTIMIZER([master]), {"p": master}, {}, tiers, offloaded={"p": OffloadedMaster(place, copy)}, agree=_nothing
    )
    [o] = offloaded._offloaded.values()

    @torch.no_grad()
    def step(factor: torch.Tensor | None) -> torch.Tensor:
        # What a step computes with tiles. All of them are in memory here, so there are no transfers.
        offloaded._begin([o])
        moved = [*o.states.values(), place]
        moves = [Move(slot, 0, numel, torch.float32) for slot in moved]
        offloaded._compute([(o, 0, moves)], factor, [slot.tensor for slot in moved])
        return copy

    return step


def _deepspeed(numel: int) -> Step:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    master, copy = _weights(numel)
    optimizer = DeepSpeedCPUAdam([master], lr=1e-4, weight_decay=0.1, adamw_mode=True)
    return _clipped_and_cast(optimizer, master, copy)


def _nothing(failure: Exception | None) -> None:
    if failure is not None:
        raise failure


CONTENDERS: dict[str, Callable[[int], Step]] = {
    "torch's fused AdamW, and casts": _plain,
    "DeepSpeedCPUAdam, and casts": _deepspeed,
    "tensorshard": _ours,
}
