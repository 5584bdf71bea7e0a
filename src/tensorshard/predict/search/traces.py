"""Runs of the Engine on one data rank, from which many plans are predicted."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tensorshard.plan.plan import Plan
from tensorshard.predict.operations import BACKWARD, FORWARD, SECTIONS, UPDATE, Kernel, Transfer
from tensorshard.predict.rank_estimate import (
    ACTIVATIONS,
    CATEGORIES,
    GRADIENTS,
    INPUTS,
    OPTIMIZER,
    PARAMETERS,
    TEMPORARIES,
    RankEstimate,
)
from tensorshard.predict.search.fewer_blocks import KEPT, additional_blocks
from tensorshard.predict.search.question import Question
from tensorshard.predict.step_time import kernel_time

Family = tuple[int, bool, str]
"""The fields that plans must share to be predicted from one trace: tp, sequence_parallel and recompute."""

BASE: Family = (1, False, "none")


def family_of(plan: Plan) -> Family:
    """The family that `plan` belongs to."""
    return plan.tp, plan.sequence_parallel, plan.recompute


@dataclass
class Trace:
    """One step of one data rank, without a pipeline, with one micro-batch.

    Args:
        samples: the samples of the step.
        kernels: the kernels by section, with their counts.
        transfers: the transfers along tp in forward and backward.
        parameters, gradients, optimizer, activations: the most bytes that were held of each at once.
        working: the most bytes of activations, temporaries and inputs that forward or backward held at once.
    """

    samples: int
    kernels: dict[str, list[tuple[Kernel, int]]]
    transfers: list[tuple[Transfer, int]]
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    working: int
    _times: dict[tuple[str, float, float, float], float] = field(default_factory=dict)

    def seconds(
        self, section: str, question: Question, samples: float, split: float = 1, others: float | None = None
    ) -> float:
        """Seconds of a section's kernels for `samples` samples, if `split` ranks share the work.

        Args:
            others: how many ranks share the work of kernels without products; None for `split`.
        """
        others = split if others is None else others
        key = (section, samples, split, others)
        if key not in self._times:
            share = 1.0 if section == UPDATE else samples / self.samples
            self._times[key] = sum(
                scaled_kernel_time(kernel, question, share / (split if kernel.flops else others)) * count
                for kernel, count in self.kernels[section]
            )
        return self._times[key]


def scaled_kernel_time(kernel: Kernel, question: Question, share: float) -> float:
    """Seconds of a kernel with `share` times the work."""
    scaled = Kernel(
        kernel.section, kernel.name, kernel.dtype, round(kernel.flops * share), round(kernel.nbytes * share)
    )
    if kernel.convolution is None:
        return kernel_time(scaled, question.rates)
    # Its shape with more or less work is not known, but how long it takes beside others with as much work.
    plain = replace(kernel, convolution=None)
    times = kernel_time(kernel, question.rates) / kernel_time(plain, question.rates)
    return kernel_time(scaled, question.rates) * times


def run_trace(question: Question, family: Family, samples: int, equal_blocks: Sequence[str] = ()) -> Trace:
    """Takes steps of the Engine for a family, on `samples` samples.

    Args:
        equal_blocks: names of blocks that are built alike. If there are any, the model is run with a few of them, and
            the cost of one more of these is added for each of the others.

    Raises:
        ValueError, NotImplementedError: the model does not take such plans.
    """
    if equal_blocks and question.can_be_shortened:
        with suppress(Exception):  # a model that needs all of its blocks may raise anything
            return _run_short(question, family, samples, equal_blocks)
    return _run(question, family, samples)


def _run_short(question: Question, family: Family, samples: int, equal_blocks: Sequence[str]) -> Trace:
    """The trace of the full model, from two models with a few of its blocks.

    Raises:
        Exception: a model that needs all of its blocks may raise anything.
    """
    tp, sequence_parallel, _ = family
    if question.table_for(tp, sequence_parallel=sequence_parallel) is None:
        search_table(question, tp, samples, equal_blocks, sequence_parallel=sequence_parallel)
    few, more = question.with_few_blocks(
        partial(_run, family=family, samples=samples), equal_blocks, tp, sequence_parallel=sequence_parallel
    )
    return _with_more_blocks(few, more, additional_blocks(equal_blocks))


def search_table(
    question: Question, tp: int, samples: int, equal_blocks: Sequence[str], *, sequence_parallel: bool
) -> None:
    """Searches for the table of `tp` ranks on the model with a few of its equal blocks; keeps that of the full model.

    If there is one, or the model cannot be shortened, this does nothing: its estimate searches on the full model.
    """
    possible = tp > 1 and equal_blocks and question.can_be_shortened
    if not possible or question.has_table(tp, sequence_parallel=sequence_parallel):
        return
    kept = KEPT[0]
    with suppress(Exception):  # a model that needs all of its blocks may raise anything
        short = replace(question, tables={}).with_blocks(kept, equal_blocks, tp, sequence_parallel=sequence_parallel)
        short.estimate(_alone(short, (tp, sequence_parallel, "none")), tp, samples)
        table = short.tables.get((tp, sequence_parallel))
        if table is not None:
            question.keep_table(table, equal_blocks, kept, sequence_parallel=sequence_parallel)


def _run(question: Question, family: Family, samples: int) -> Trace:
    return _trace_of(question.estimate(_alone(question, family), family[0], samples, borrow=True).ranks[0], samples)


def _alone(question: Question, family: Family) -> Plan:
    """The plan of one data rank for a family, without a pipeline."""
    tp, sequence_parallel, recompute = family
    alone: dict[str, Any] = {
        "dp_replicate": 1,
        "dp_shard": 1,
        "tp": tp,
        "pp": 1,
        "zero": 0,
        "micro_batches": 1,
        "offload": None,
    }
    alone |= {"sequence_parallel": sequence_parallel, "recompute": recompute}
    alone |= dict.fromkeys(("pp_split", "pp_stages_per_rank", "pp_units"), None) | {"pp_schedule": "1f1b"}
    if tp == 1:
        alone["tp_plan"] = None
    return Plan(**{**question.fixed, **alone}).resolve(tp)


def _with_more_blocks(few: Trace, more: Trace, times: int) -> Trace:
    """The trace `more`, plus `times` times what `more` has beyond `few`.

    A kernel that works on all blocks at once has another size in each trace. So some counts are negative; the sum is
    the time of the kernel for all blocks.
    """

    def extended(of_few: Iterable[tuple[Any, int]], of_more: Iterable[tuple[Any, int]]) -> list[tuple[Any, int]]:
        counts = Counter(dict(of_more))
        for one, count in of_more:
            counts[one] += times * count
        for one, count in of_few:
            counts[one] -= times * count
        return [(one, count) for one, count in counts.items() if count]

    def line(name: str) -> int:
        start, end = getattr(few, name), getattr(more, name)
        return int(end + times * (end - start))

    return Trace(
        more.samples,
        {section: extended(few.kernels[section], more.kernels[section]) for section in SECTIONS},
        extended(few.transfers, more.transfers),
        line("parameters"),
        line("gradients"),
        line("optimizer"),
        line("activations"),
        line("working"),
    )


def _trace_of(rank: RankEstimate, samples: int) -> Trace:
    kernels: dict[str, list[tuple[Kernel, int]]] = defaultdict(list)
    for section in SECTIONS:
        kernels[section] = list(rank.operations.of(section))
    transfers = [(t, n) for t, n in rank.operations.transfers.items() if t.section != UPDATE]
    most = {
        name: max([rank.by_category[name], *(moment.held[place] for moment in rank.history)])
        for place, name in enumerate(CATEGORIES)
    }
    places = [CATEGORIES.index(name) for name in (ACTIVATIONS, TEMPORARIES, INPUTS)]
    moments = [moment for moment in rank.history if moment.phase in (FORWARD, BACKWARD)]
    working = max((sum(moment.held[place] for place in places) for moment in moments), default=0)
    return Trace(
        samples, kernels, transfers, most[PARAMETERS], most[GRADIENTS], most[OPTIMIZER], most[ACTIVATIONS], working
    )  # fmt: skip
