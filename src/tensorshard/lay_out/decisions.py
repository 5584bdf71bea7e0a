"""What one rank has decided about a model and a plan, for another rank of the same plan in the same process."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tensorshard.heads.under_plan.head_updates import HeadUpdate
    from tensorshard.materialize.recording import Recording
    from tensorshard.pipeline.run.crossings import Shapes
    from tensorshard.pipeline.trace.call_graph import CallGraph
    from tensorshard.pipeline.trace.tracer import Tracer
    from tensorshard.tensor_parallel.search.find_table import VerifiedTable


class Traced(NamedTuple):
    """What a pipeline is cut by.

    Args:
        tracer: runs the model. graph: of its run on the sample inputs.
        graphs: of further runs, by what tells their inputs and modes apart.
        table: that the model is split by.
    """

    tracer: "Tracer"
    graph: "CallGraph"
    graphs: "dict[Any, CallGraph]"
    table: "VerifiedTable | None"


@dataclass
class Decisions:
    """Filled by the first rank that is laid out with it, and taken from it by the next.

    Ranks of a world decide together. One process that tries one rank after the other (an estimate) would decide the
    same again for each.

    Attributes:
        table: of tensor parallelism; None if there is none yet.
        recorded: the constructor's run, with a module that nobody has laid out, and what its heads were to update;
            None if there is none yet, or it cannot be used twice.
        shapes: the model's run and its cut into stages, as a rank with this place along ``tp`` sees it; None likewise.
        traced: the model's runs, which plans that cut it elsewhere may share; None where nobody tries other plans.
    """

    table: "VerifiedTable | None" = None
    recorded: "tuple[Recording, list[HeadUpdate]] | None" = None
    shapes: "Shapes | None" = None
    traced: dict[Any, Traced] | None = None
