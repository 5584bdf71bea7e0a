"""The pictures of README and docs, one kind a module. `DRAWINGS` has each file's name and what draws it."""

from collections.abc import Callable
from functools import partial

from drawings.bars import bar_groups, checkpoint_groups, draw_bars
from drawings.context import draw_context, draw_longest, longest_group
from drawings.diagrams import draw_imports, draw_step
from drawings.dropout import draw_dropout
from drawings.held import draw_held
from drawings.memory import draw_memory
from drawings.mesh import draw_experts, draw_mesh
from drawings.offload import draw_offload, offload_group
from drawings.overlap import draw_overlap
from drawings.planner import draw_planner, planner_models
from drawings.recording import draw_recording
from drawings.schedules import draw_schedules
from drawings.table import draw_table
from drawings.zero import draw_zero

DRAWINGS: dict[str, Callable[[], str]] = {
    "zero.svg": draw_zero,
    "mesh.svg": draw_mesh,
    "experts.svg": draw_experts,
    "context.svg": draw_context,
    "memory.svg": partial(
        draw_memory,
        "memory.json",
        "What a step holds on one of two ranks, as it was measured",
        "Memory over one step under five plans, each adding to the one before.",
    ),
    "recompute.svg": partial(
        draw_memory,
        "recompute.json",
        "What a step holds with and without recomputation, as estimated",
        "Memory over one step of a GPT of eight layers.",
        area=230,
    ),
    "held.svg": draw_held,
    "dropout.svg": draw_dropout,
    "schedules.svg": draw_schedules,
    "overlap.svg": draw_overlap,
    "table.svg": draw_table,
    "imports.svg": draw_imports,
    "step.svg": draw_step,
    "quickstart.svg": draw_recording,
}
if _groups := bar_groups():
    DRAWINGS["bars.svg"] = partial(
        draw_bars, _groups, ("",), "Step time and peak memory beside the best of the others", 245, 130
    )
if _groups := checkpoint_groups():
    DRAWINGS["checkpoints.svg"] = partial(
        draw_bars, _groups, ("training waits", "until it is whole", "load"), "Saving and loading beside the peers"
    )
if (_group := longest_group()) is not None:
    DRAWINGS["longest.svg"] = partial(draw_longest, _group)
if (_group := offload_group()) is not None:
    DRAWINGS["offload.svg"] = partial(draw_offload, _group)
if _models := planner_models():
    DRAWINGS["planner.svg"] = partial(draw_planner, _models)
