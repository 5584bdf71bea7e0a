"""The cost of each unit call in time and memory, as exactly as a choice of cuts needs it."""

from dataclasses import dataclass

from tensorshard.pipeline.trace.call_graph import CallGraph

# Floating-point operations in the time that moving one byte takes: 10 to 20 on CPUs, 150 to 300 on GPUs in bf16. Fused
# operations and caches move fewer bytes than are counted here.
_FLOPS_PER_BYTE = 20.0
# A parameter, its gradient and Adam's two moments.
_COPIES = 4
# Time decides how long a step takes; memory only whether it fits. It counts less.
_MEMORY_WEIGHT = 0.25


@dataclass(frozen=True)
class CallCost:
    """Cost of one call.

    Args:
        time: in floating-point operations; moving bytes counts as the operations that would take as long.
        memory: bytes of parameters with their gradient and optimizer states, and of what is kept for backward.
        combined: the call's share of the model's time, and of its memory at a smaller weight.
    """

    time: float
    memory: float
    combined: float


def call_costs(graph: CallGraph) -> list[CallCost]:
    """Each call's cost. A parameter counts where it is first used."""
    seen: set[str] = set()
    times, memories = [], []
    for index, call in enumerate(graph.calls):
        names = graph.parameters_of(index, index + 1) - seen
        seen |= names
        times.append(call.flops + _FLOPS_PER_BYTE * call.written_bytes)
        memories.append(float(_COPIES * sum(graph.bytes_of[name] for name in names) + call.saved_bytes))
    time, memory = sum(times) or 1.0, sum(memories) or 1.0
    return [CallCost(t, m, t / time + _MEMORY_WEIGHT * m / memory) for t, m in zip(times, memories, strict=True)]
