"""`profile_memory`: what the steps of a real run hold, in the same terms as an estimate."""

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from tensorshard.engine.engine import Engine
from tensorshard.plan.plan import Plan
from tensorshard.plan.storage import DeviceStorage
from tensorshard.predict.describe import rank_lines, tensor_lines
from tensorshard.predict.estimate import Estimate
from tensorshard.predict.page import Side, page, picture
from tensorshard.predict.rank_estimate import RankEstimate, summarize
from tensorshard.predict.storage_ledger import StorageLedger
from tensorshard.predict.watched_steps import StepWatcher

_CPU_NOTES = (
    "bytes of live tensors, which the ledger saw operations make and drop. What kernels and libraries take for "
    "themselves is not in it",
    "reserved bytes are those of a model of torch's caching allocator for CUDA: CPU ranks have none",
)
_CUDA_NOTES = (
    "bytes of live tensors, which the ledger saw operations make and drop; reserved bytes, and those on the "
    "device, are what torch's caching allocator said",
)


@dataclass
class MemoryProfile:
    """The memory that a rank held while it was profiled.

    Args:
        plan: the Engine's plan. world_size: the number of its ranks.
        ranks: this rank's memory; :meth:`joined` adds other ranks. Empty until the ``with`` statement has ended.
    """

    plan: Plan
    world_size: int
    ranks: list[RankEstimate] = field(default_factory=list)
    device: str = "cpu"

    @property
    def rank(self) -> RankEstimate:
        """The rank that held the most.

        Raises:
            ValueError: the ``with`` statement has not ended yet.
        """
        if not self.ranks:
            raise ValueError("nothing is recorded yet: ask after the end of `with profile_memory(engine)`")
        return max(self.ranks, key=lambda rank: rank.peak_allocated)

    def joined(self, others: list["MemoryProfile"]) -> "MemoryProfile":
        """A profile with the fullest rank of each stage, among this profile and `others`."""
        fullest: dict[int, RankEstimate] = {}
        for rank in (rank for profile in (self, *others) for rank in profile.ranks):
            if rank.stage not in fullest or rank.peak_allocated > fullest[rank.stage].peak_allocated:
                fullest[rank.stage] = rank
        return replace(self, ranks=[fullest[stage] for stage in sorted(fullest)])

    def describe(self) -> str:
        """What was held at the peak, in lines of at most 80 columns."""
        return "\n".join([*rank_lines(self.rank), "", "largest tensors then:", *tensor_lines(self.rank.largest)])

    def _repr_svg_(self) -> str:
        """What a notebook shows: the memory of the fullest rank over the steps."""
        return picture("measured", self.rank)

    def to_html(self, path: str | Path, estimate: Estimate | None = None) -> None:
        """Writes a page that needs nothing else: memory over the steps, and `estimate` beside it."""
        notes = _CUDA_NOTES if self.device == "cuda" else _CPU_NOTES
        sides = [Side("measured", [self.rank] if len(self.ranks) == 1 else self.ranks, notes)]
        if estimate is not None:
            sides.insert(0, estimate.side())
        Path(path).write_text(page(self.plan, self.world_size, sides), encoding="utf-8")


@contextmanager
def profile_memory(engine: Engine) -> Iterator[MemoryProfile]:
    """Records how much memory the steps inside the ``with`` statement hold on this rank, in bytes by category.

    Any number of ranks may record. Steps are slower meanwhile. Parameters, buffers, gradients and optimizer states
    that exist already count from the start. Every other tensor counts from the operation that makes it until it is
    freed. What is on another device, or offloaded to disk, does not count.

    Examples:
        >>> adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
        >>> build = functools.partial(torch.nn.Linear, 16, 4)
        >>> engine = ts.parallelize(build, ts.Plan(), optimizer=adamw, loss_fn=torch.nn.functional.mse_loss)
        >>> with ts.profile_memory(engine) as profile:
        ...     loss = engine.step(torch.randn(8, 16), torch.randn(8, 4))
        >>> sum(profile.rank.by_category.values()) == profile.rank.peak_allocated  # bytes
        True
        >>> profile.to_html("memory.html")
    """
    mesh = engine.mesh
    profile = MemoryProfile(engine.plan, mesh.world_size, device=engine.device.type)
    on_gpu = engine.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(engine.device)
    files = MappedFiles()

    def counts(storage: torch.UntypedStorage) -> bool:
        return storage.device.type == engine.device.type and not (not on_gpu and files.hold(storage.data_ptr()))

    with StorageLedger(counts, is_late=True) as ledger, StepWatcher(ledger, engine) as watcher:
        ledger.initialized()
        yield profile
    rank = summarize(
        ledger, watcher.known, rank=mesh.rank, stage=mesh.index("pp"), device_bytes=0, storage=DeviceStorage()
    )
    if on_gpu:
        reserved = torch.cuda.max_memory_reserved(engine.device)
        rank = replace(rank, peak_reserved=reserved, peak_device=reserved)
    profile.ranks.append(rank)


_MAPS = Path("/proc/self/maps")
_IN_MEMORY = ("/dev/shm", "/memfd:", "/dev/zero")


class MappedFiles:
    """The files on disks that are mapped as shared at this moment; see proc_pid_maps(5)."""

    def __init__(self) -> None:
        spans = []
        try:
            lines = _MAPS.read_text().splitlines()
        except OSError:
            lines = []  # not Linux
        for line in lines:
            span, permissions, _, _, inode, *path = line.split(maxsplit=5)
            if permissions.endswith("s") and inode != "0" and not (path and path[0].startswith(_IN_MEMORY)):
                start, _, end = span.partition("-")
                spans.append((int(start, 16), int(end, 16)))
        self._spans = sorted(spans)

    def hold(self, address: int) -> bool:
        """Whether `address` is in one of them."""
        place = bisect_right(self._spans, (address, 1 << 64)) - 1
        return place >= 0 and address < self._spans[place][1]
