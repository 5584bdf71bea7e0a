"""What one rank has decided about a model and a plan, for another rank of the same plan in the same process."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensorshard.heads.under_plan.head_updates import HeadUpdate
    from tensorshard.materialize.recording import Recording
    from tensorshard.pipeline.run.crossings import Shapes
    from tensorshard.tensor_parallel.search.find_table import VerifiedTable


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
    """

    table: "VerifiedTable | None" = None
    recorded: "tuple[Recording, list[HeadUpdate]] | None" = None
    shapes: "Shapes | None" = None
