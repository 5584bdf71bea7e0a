"""Why a model cannot be cut at a place."""

from tensorshard.pipeline.trace.call_graph import CallGraph

# The most tensors that a cut may send. If more cross, the model's code outside of blocks adds up what many units
# return, and each of these tensors would have to be sent.
_MOST_CROSSING = 16


def obstacle(graph: CallGraph, position: int) -> str | None:
    """Why `graph` cannot be cut before the call at `position`; None if it can."""
    after = graph.calls[position].unit
    before = {call.unit for call in graph.calls[:position]}
    for later in graph.calls[position:]:
        if later.unit in before and later.unit in graph.stateful:
            return (
                f"{later.unit!r} is called on both sides and changes its buffers (running statistics, say), which two "
                f"stages would change apart; all calls of it must be on one stage"
            )
    for buffer, writers in graph.buffer_writers.items():
        readers = {index for index in range(len(graph.calls) + 1) if buffer in graph.reads(index).buffers}
        for writer in sorted(writers):
            reader = next((i for i in sorted(readers | writers) if (i < position) != (writer < position)), None)
            if reader is not None:
                return (
                    f"{_name(graph, writer)} changes the buffer {buffer!r}, which {_name(graph, reader)} reads, too; "
                    f"two stages would have it differently, so both must be on one stage"
                )
    for index in range(position, len(graph.calls) + 1):
        for call in graph.reads(index).side_outputs:
            if call < position:
                return (
                    f"{graph.calls[call].unit!r} hands {_name(graph, index)} a tensor by another way than its return "
                    f"value (an attribute, an object, or a tensor changed in place), so both must be on one stage; "
                    f"return it instead"
                )
    rng_ops_before = frozenset().union(*(graph.reads(index).rng_ops for index in range(position)))
    for index in range(position, len(graph.calls) + 1):
        if graph.reads(index).rng_ops & rng_ops_before:
            return (
                f"{_name(graph, index)} and a module before {after!r} read the same random numbers (dropout in code "
                f"outside of any module, say), which two stages would draw apart; make it an nn.Dropout module"
            )
    crossing = graph.crossing(position)
    for leaf in crossing:
        if graph.calls[leaf[0]].unit in graph.hooked:
            return (
                f"{graph.calls[leaf[0]].unit!r}, whose output a cut before {after!r} would send, has a hook on its "
                f"backward, which does not see gradients that come from another stage; hook a module inside of it"
            )
        if leaf in graph.changed and leaf in graph.overwritten:
            return (
                f"the output of {graph.calls[leaf[0]].unit!r}, which a cut before {after!r} would send, is changed in "
                f"place by a later module and by code outside of modules, so that two stages would have it "
                f"differently; make one of the two return a new tensor"
            )
    if len(crossing) > _MOST_CROSSING:
        sources = sorted({graph.calls[leaf[0]].unit for leaf in crossing})
        return (
            f"a cut before {after!r} would send {len(crossing)} tensors, outputs of {', '.join(map(repr, sources[:3]))}"
            f" and others that are still needed; at most {_MOST_CROSSING} may cross. Name the modules that enclose "
            f"them as units (pp_units)"
        )
    return None


def _name(graph: CallGraph, index: int) -> str:
    return "the model's output" if index == len(graph.calls) else repr(graph.calls[index].unit)
