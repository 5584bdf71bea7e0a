"""Pipeline schedules by name: their classes in torch.distributed.pipelining, and what each needs of a pipeline."""

import difflib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Schedule:
    """A way to order forwards and backwards.

    Args:
        name: as in ``Plan(pp_schedule=...)``.
        torch_name: its class in ``torch.distributed.pipelining``.
        stages_per_rank: how many stages each rank must have; None for two or more.
        placement: "loop": rank r has the stages r, r + ranks, ...; "v": each rank has two, the r-th from the start and
            the r-th from the end.
        splits_backward: whether gradients of inputs and of parameters are computed separately.
        bubble: the idle share of the ranks' time, with p ranks, v stages a rank and m >= 2p micro-batches. It assumes
            equal stages, and that a forward takes as long as a backward for inputs, or one for parameters.
        memory: the number of micro-batches for which the busiest rank keeps the activations of all its layers.
        source: the paper or code that it comes from.
    """

    name: str
    torch_name: str
    stages_per_rank: int | None
    placement: str
    splits_backward: bool
    bubble: str
    memory: str
    source: str

    @property
    def single(self) -> bool:
        """Whether each rank has one stage."""
        return self.stages_per_rank == 1

    def torch_class(self) -> Any:
        """The class in ``torch.distributed.pipelining``."""
        from torch.distributed import pipelining  # importing it takes a second, and a Plan does not need it

        return getattr(pipelining, self.torch_name)

    def rank_of(self, stage: int, ranks: int) -> int:
        """The rank that has `stage`."""
        turn, place = divmod(stage, ranks)
        return ranks - 1 - place if self.placement == "v" and turn % 2 else place

    def stages_of(self, rank: int, ranks: int, stages_per_rank: int) -> list[int]:
        """The stages of `rank`, in order."""
        return [stage for stage in range(ranks * stages_per_rank) if self.rank_of(stage, ranks) == rank]


SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule("gpipe", "ScheduleGPipe", 1, "loop", False, "(p-1)/(m+p-1)", "m", "Huang et al. 2019"),
        Schedule("1f1b", "Schedule1F1B", 1, "loop", False, "(p-1)/(m+p-1)", "p", "Narayanan et al. 2021"),
        Schedule(
            "interleaved_1f1b", "ScheduleInterleaved1F1B", None, "loop", False, "(p-1)/(v*m+p-1)", "p + (p-1)/v",
            "Narayanan et al. 2021",
        ),
        Schedule("looped_bfs", "ScheduleLoopedBFS", None, "loop", False, "(p-1)/(v*m+p-1)", "m", "Lamy-Poirier 2022"),
        Schedule(
            "interleaved_zero_bubble", "ScheduleInterleavedZeroBubble", None, "loop", True, "(p-1)/(3*v*m+p-1)",
            "p", "Qi et al. 2023",
        ),
        Schedule("zbv", "ScheduleZBVZeroBubble", 2, "v", True, "(p-1)/(3*v*m+p-1)", "p", "Qi et al. 2023"),
        Schedule(
            "dualpipev", "ScheduleDualPipeV", 2, "v", True, "(p-1)/(3*v*m+p-1)", "p + 1/v",
            "DeepSeek-AI 2024, cut in half by Qi et al.",
        ),
    )
}  # fmt: skip


def find_schedule(name: str) -> Schedule:
    """The schedule of that name.

    Raises:
        ValueError: there is none. The message lists the names.
    """
    if name in SCHEDULES:
        return SCHEDULES[name]
    near = difflib.get_close_matches(str(name).lower().replace("-", "_"), SCHEDULES, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"pp_schedule is {name!r}; {hint}It must be one of {', '.join(map(repr, SCHEDULES))}")


def check_schedule(name: str, *, ranks: int, stages_per_rank: int | None, micro_batches: int | None) -> int:
    """Checks a schedule, and returns how many stages each rank has.

    Args:
        ranks: of the pipeline.
        stages_per_rank: None for the fewest that the schedule works with.
        micro_batches: of one step; None if they are not known yet.

    Raises:
        ValueError: the schedule does not work with these numbers. The message says which ones would work.
    """
    schedule = find_schedule(name)
    fewest = schedule.stages_per_rank or 2
    stages_per_rank = fewest if stages_per_rank is None else stages_per_rank
    if schedule.stages_per_rank is not None and stages_per_rank != schedule.stages_per_rank:
        others = [s.name for s in SCHEDULES.values() if s.stages_per_rank is None]
        raise ValueError(
            f"the {name} schedule needs {fewest} stage{'s' * (fewest > 1)} a rank, and there are {stages_per_rank}; "
            f"use {fewest * ranks} stages on {ranks} ranks"
            + (f", or one of {', '.join(others)} for several stages a rank" if schedule.single else "")
        )
    if stages_per_rank < fewest:
        raise ValueError(
            f"the {name} schedule needs at least {fewest} stages a rank, and there is {stages_per_rank}; use "
            f"{fewest * ranks} stages on {ranks} ranks, or the 1f1b schedule"
        )
    if micro_batches is None:
        return stages_per_rank
    least = {"1f1b": ranks, "dualpipev": 2 * ranks}.get(name, 1)
    if micro_batches < least:
        raise ValueError(
            f"the {name} schedule on {ranks} ranks needs at least micro_batches={least}, and micro_batches is "
            f"{micro_batches}; use {least} or more, or the gpipe schedule, which works with any number"
        )
    if name in ("interleaved_1f1b", "interleaved_zero_bubble"):
        fits = lambda m: m % max(1, m // ranks) == 0  # noqa: E731
        if not fits(micro_batches):
            lower = next(m for m in range(micro_batches, 0, -1) if fits(m))
            higher = next(m for m in range(micro_batches, 2 * micro_batches + ranks) if fits(m))
            raise ValueError(
                f"the {name} schedule on {ranks} ranks runs micro-batches in {micro_batches // ranks} rounds, which do "
                f"not divide micro_batches={micro_batches}; use {lower} or {higher}"
            )
    return stages_per_rank
