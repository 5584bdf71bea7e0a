"""The decisions of one rank about a model and a plan, for another rank of the same plan in the same process."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tensorshard.expert_parallel.search import SplitExperts
    from tensorshard.model.trains_itself import OwnRule
    from tensorshard.pipeline.run.cut_cache import CutCache
    from tensorshard.pipeline.trace.call_graph import CallGraph
    from tensorshard.pipeline.trace.tracer import Tracer
    from tensorshard.tensor_parallel.table.table import VerifiedTable
    from tensorshard.weights.initial.recording import Recording


class Traced(NamedTuple):
    """Runs of a model, from which a pipeline is cut.

    Args:
        tracer: runs the model. graph: the calls of its run on the sample inputs.
        graphs: the calls of further runs, by their inputs and modes.
        table: the table of tensor parallelism by which the model is split.
    """

    tracer: "Tracer"
    graph: "CallGraph"
    graphs: "dict[Any, CallGraph]"
    table: "VerifiedTable | None"


@dataclass
class Decisions:
    """Decisions that the first rank makes and later ranks use again.

    The ranks of a world decide together. But an estimate tries one rank after the other in one process, and would make
    the same decisions again for each.

    Attributes:
        table: the table of tensor parallelism; None if there is none yet.
        experts: the modules whose experts are split, by the number of ranks that share them.
        recorded: the constructor's run, with a module that is not laid out, and the rules of modules that train
            themselves; None if there is none yet, or if it cannot be used twice.
        shapes: the model's run and its cut into stages, as a rank with this place along ``tp`` sees it; None if there
            is none yet, or if it cannot be used twice.
        traced: the model's runs, which plans with other cuts may share; None if no other plans are tried.
        parameters: how many elements of parameters the model counts as having, where it stands for a larger one.
    """

    table: "VerifiedTable | None" = None
    experts: "dict[int, dict[str, SplitExperts]]" = field(default_factory=dict)
    recorded: "tuple[Recording, list[OwnRule]] | None" = None
    shapes: "CutCache | None" = None
    traced: dict[Any, Traced] | None = None
    parameters: int | None = None
