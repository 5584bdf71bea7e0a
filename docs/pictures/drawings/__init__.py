"""The pictures of README and docs, one kind a module. `DRAWINGS` has each file's name and what draws it."""

from collections.abc import Callable
from functools import partial

from drawings.memory import draw_memory
from drawings.mesh import draw_mesh
from drawings.offload import draw_offload, offload_group
from drawings.planner import draw_planner, planner_models
from drawings.schedules import draw_schedules
from drawings.zero import draw_zero

DRAWINGS: dict[str, Callable[[], str]] = {
    "zero.svg": draw_zero,
    "mesh.svg": draw_mesh,
    "memory.svg": partial(
        draw_memory,
        "memory.json",
        "What a step holds on one of two ranks, as it was measured",
        "Memory over one step under five plans, each adding to the one before.",
    ),
    "schedules.svg": draw_schedules,
}
if (_group := offload_group()) is not None:
    DRAWINGS["offload.svg"] = partial(draw_offload, _group)
if _models := planner_models():
    DRAWINGS["planner.svg"] = partial(draw_planner, _models)
