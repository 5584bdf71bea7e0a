"""What passes are applied to, and what they all depend on.

Also here: the decisions of one rank about a model and a plan, for another rank of the same plan in the same process.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from tensorshard.comm.marks import ParallelMark
from tensorshard.data_parallel.sharded_model import ShardedModel
from tensorshard.loss.logits.output_layers import OutputLogits
from tensorshard.model.whole_sequences import PositionOrder, WholeSequences
from tensorshard.plan.mesh import Mesh
from tensorshard.plan.plan import Plan
from tensorshard.plan.storage import DeviceStorage, Storage
from tensorshard.tensor_parallel.apply.tensor_split import TensorSplit

if TYPE_CHECKING:
    from tensorshard.expert_parallel.search import SplitExperts
    from tensorshard.model.trains_itself import OwnRule
    from tensorshard.pipeline.run.cut_cache import CutCache
    from tensorshard.pipeline.trace.call_graph import CallGraph
    from tensorshard.pipeline.trace.tracer import Tracer
    from tensorshard.tensor_parallel.table.table import VerifiedTable
    from tensorshard.weights.initial.recording import Recording


@dataclass(frozen=True)
class PassContext:
    """What the passes of all of a rank's parts depend on.

    Args:
        device: where the rank computes.
        table: the table of tensor parallelism; None if no table splits the model.
        experts: the modules whose experts are split, by their names.
        by_hand: how the parallel layers that the user built are split, by the names of their tensors. Then there is no
            table.
        storage: where values are kept.
        parameters: as in :class:`tensorshard.parallelize.part.Decisions`.
        order: in which order ranks hold the positions of sequences.
        gathered_operations: those on whole sequences that were found before training.
    """

    plan: Plan
    mesh: Mesh
    device: torch.device
    table: "VerifiedTable | None" = None
    by_hand: Mapping[str, ParallelMark] = field(default_factory=dict)
    experts: "Mapping[str, SplitExperts]" = field(default_factory=dict)
    storage: Storage = field(default_factory=DeviceStorage)
    parameters: int | None = None
    order: PositionOrder = field(default_factory=PositionOrder)
    gathered_operations: Collection[tuple[str, str]] = ()


@dataclass
class Part:
    """What one rank computes of a model: all of it, or a stage of a pipeline, which is a model with parts elsewhere.

    Args:
        module: on the meta device. The passes change it.
        value_of: the full value of a parameter or buffer, by its name, on this rank's device. It is called for one name
            after the other, in the model's order if other ranks depend on the order.
        blocks: they are recomputed and compiled one by one; the module itself if it has none.
        units: lists of modules whose parameters are gathered and reduced together.
        computed: names and modules of what this rank computes.
        full_model: the model that this is a stage of, which no pass changes; else `module`.
        elsewhere: names of the modules that only other stages compute, and of the modules inside of them.
        calls: for a stage: names of the units that the model calls, in order.
        returns_output: whether it returns the model's output, and not the input of another stage.

    Attributes:
        split: how its parameters are split over the tensor-parallel ranks.
        logits: which of its layers may return logits that are not computed.
        sequences: how sequences are split over the ranks of context parallelism.
        sharded: what the passes have made of it, from the pass :func:`data_parallel` on.
    """

    module: nn.Module
    value_of: Callable[[str], torch.Tensor]
    blocks: list[nn.Module]
    units: list[list[nn.Module]]
    computed: Mapping[str, nn.Module]
    full_model: nn.Module
    elsewhere: frozenset[str] = frozenset()
    calls: tuple[str, ...] = ()
    returns_output: bool = True
    split: TensorSplit = field(default_factory=TensorSplit, init=False)
    logits: OutputLogits = field(default_factory=OutputLogits, init=False)
    sequences: WholeSequences = field(default_factory=WholeSequences, init=False)
    sharded: ShardedModel | None = field(default=None, init=False)

    def local_value(self, name: str) -> torch.Tensor:
        """This tensor-parallel rank's shard of a parameter or buffer."""
        return self.split.local(name, self.value_of(name))


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
