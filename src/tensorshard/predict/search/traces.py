"""Steps of one data rank, or of those that share experts, from which many plans are predicted."""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from tensorshard.model.model_errors import raised_by_model
from tensorshard.plan.plan import Plan
from tensorshard.predict.estimate import REFUSALS
from tensorshard.predict.operation_ledger import BACKWARD, FORWARD, SECTIONS, UPDATE, Kernel, Transfer
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
from tensorshard.predict.search.model_facts import KEPT, extrapolate
from tensorshard.predict.search.problem import SearchProblem
from tensorshard.predict.step_time import kernel_time

logger = logging.getLogger("tensorshard.predict")


class TraceKey(NamedTuple):
    """The fields that plans must share to be predicted from one trace."""

    tp: int
    sequence_parallel: bool
    recompute: str
    cp: int = 1
    ep: int = 1

    @property
    def ranks(self) -> int:
        """How many ranks take the step together."""
        return self.tp * self.cp * self.data_ranks

    @property
    def data_ranks(self) -> int:
        """How many ranks with other samples there are, so that `ep` ranks share experts."""
        return self.ep // math.gcd(self.ep, self.cp)


BASE = TraceKey(1, False, "none")


def trace_key(plan: Plan) -> TraceKey:
    """The key of the trace that `plan` is predicted from."""
    return TraceKey(plan.tp, plan.sequence_parallel, plan.recompute, plan.cp, plan.ep)


@dataclass
class Trace:
    """One step of one data rank, without a pipeline, with one micro-batch.

    Args:
        samples: the samples of the step.
        kernels: the kernels by section, with their counts.
        transfers: the transfers along tp, cp and ep in forward and backward.
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
        self, section: str, problem: SearchProblem, samples: float, split: float = 1, others: float | None = None
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
                scaled_kernel_time(kernel, problem, share / (split if kernel.flops else others)) * count
                for kernel, count in self.kernels[section]
            )
        return self._times[key]


def scaled_kernel_time(kernel: Kernel, problem: SearchProblem, share: float) -> float:
    """Seconds of a kernel with `share` times the work."""
    scaled = Kernel(
        kernel.section, kernel.name, kernel.dtype, round(kernel.flops * share), round(kernel.nbytes * share)
    )
    return kernel_time(scaled, problem.rates)


def run_trace(problem: SearchProblem, key: TraceKey, samples: int, equal_blocks: Sequence[str] = ()) -> Trace:
    """Takes steps of the Engine on `samples` samples.

    Args:
        equal_blocks: names of blocks that are built alike. If there are any, the trace is extrapolated from those of
            the model with a few of them.

    Raises:
        ValueError, NotImplementedError: the model does not take such plans.
    """
    problem = problem.under(key.ep)
    if equal_blocks and problem.can_be_shortened:
        # What fewer tp ranks can split is rarely too much for more of them; if it is, the model says so.
        borrows = problem.has_table_of_fewer(key.tp, sequence_parallel=key.sequence_parallel)
        for searches in (False, True) if borrows else (True,):
            try:
                if searches:
                    search_table(
                        problem, key.tp, samples, equal_blocks, sequence_parallel=key.sequence_parallel, ep=key.ep
                    )
                few, more = problem.with_few_blocks(
                    partial(_run, key=key, samples=samples),
                    equal_blocks,
                    key.tp,
                    sequence_parallel=key.sequence_parallel,
                )
                return _extrapolated(few, more, equal_blocks)
            except Exception as error:
                check_needs_all_blocks(error)
    return _run(problem, key, samples)


def check_needs_all_blocks(error: Exception) -> None:
    """Raises `error` again, unless it says that the model cannot run with a few of its blocks."""
    if not (isinstance(error, REFUSALS) or raised_by_model(error)):
        raise error
    logger.debug("the model needs all of its blocks: %r", error)


def search_table(
    problem: SearchProblem,
    tp: int,
    samples: int,
    equal_blocks: Sequence[str],
    *,
    sequence_parallel: bool,
    ep: int = 1,
) -> None:
    """Searches for the table of `tp` ranks on the model with a few of its equal blocks; keeps that of the full model.

    `problem` has the tables of plans with this `ep`. If there is one for these ranks, or the model cannot be shortened,
    this does nothing: its estimate searches on the full model.
    """
    possible = tp > 1 and equal_blocks and problem.can_be_shortened
    if not possible or problem.has_table(tp, sequence_parallel=sequence_parallel):
        return
    kept = KEPT[0]
    short = problem.without_tables().with_blocks(kept, equal_blocks, tp, sequence_parallel=sequence_parallel)
    try:
        key = TraceKey(tp, sequence_parallel, "none", ep=ep)
        short.estimate(_alone(short, key), key.ranks, samples)
    except Exception as error:
        check_needs_all_blocks(error)
        return
    table = short.tables.get((tp, sequence_parallel))
    if table is not None:
        problem.keep_table(table, equal_blocks, kept, sequence_parallel=sequence_parallel)


def _run(problem: SearchProblem, key: TraceKey, samples: int) -> Trace:
    # Plans hold less of the model than one data rank, so that they compute more logits in tiles. So does a trace whose
    # model counts as having no parameters. It takes the least memory, which a bound needs.
    tiled = replace(problem, parameters=0)
    return _trace_of(tiled.estimate(_alone(problem, key), key.ranks, samples, borrow=True).ranks[0], samples)


def _alone(problem: SearchProblem, key: TraceKey) -> Plan:
    """The plan of one data rank for a trace, or of the `ep` ranks that share experts, without a pipeline."""
    alone: dict[str, Any] = dict.fromkeys(("pp_split", "pp_stages_per_rank", "pp_units"), None)
    alone |= {
        "dp_replicate": 1,
        "dp_shard": key.data_ranks,
        "pp": 1,
        "pp_schedule": "1f1b",
        "zero": 0,
        "micro_batches": 1,
    }
    alone |= {"offload": None, **key._asdict()}
    if key.tp == 1:
        alone["tp_plan"] = None
    if key.cp == 1:
        alone |= {"cp_dims": None, "cp_order": "auto"}
    return Plan(**{**problem.fixed, **alone}).resolve(key.ranks)


def _extrapolated(few: Trace, more: Trace, blocks: Sequence[str]) -> Trace:
    """The trace of a model with all `blocks`, from those with a few.

    A kernel that works on all blocks at once has another size in each trace. So some counts are negative; the sum is
    the time of the kernel for all blocks.
    """

    def counts(of_few: Iterable[tuple[Any, int]], of_more: Iterable[tuple[Any, int]]) -> list[tuple[Any, int]]:
        small, large = Counter(dict(of_few)), Counter(dict(of_more))
        extrapolated = {one: int(extrapolate(small[one], large[one], blocks)) for one in {**large, **small}}
        return [(one, count) for one, count in extrapolated.items() if count]

    def nbytes(name: str) -> int:
        return int(extrapolate(getattr(few, name), getattr(more, name), blocks))

    return Trace(
        more.samples,
        {section: counts(few.kernels[section], more.kernels[section]) for section in SECTIONS},
        counts(few.transfers, more.transfers),
        nbytes("parameters"),
        nbytes("gradients"),
        nbytes("optimizer"),
        nbytes("activations"),
        nbytes("working"),
    )


def _trace_of(rank: RankEstimate, samples: int) -> Trace:
    kernels = {section: list(rank.operations.of(section)) for section in SECTIONS}
    along = rank.operations.transfers.items()
    transfers = [(t, n) for t, n in along if t.section != UPDATE and t.axis in ("tp", "cp", "ep")]
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
