"""A laid-out model's weights, written by rank 0 for others to read."""

from pathlib import Path

import torch

from tensorshard.comm.decisions import decide_once
from tensorshard.plan.mesh import Mesh
from tensorshard.sharded.sharded_model import ShardedModel
from tensorshard.weights.files.adapters import AdapterExport, has_adapters
from tensorshard.weights.files.export import Export


def save_pretrained(
    sharded: ShardedModel, mesh: Mesh, path: Path, *, dtype: torch.dtype | None, max_shard_size: int | str
) -> None:
    """What :meth:`tensorshard.Engine.save_pretrained` does; errors of rank 0 are raised on every rank."""
    export: Export | AdapterExport | None = None

    def begin() -> None:
        nonlocal export
        layouts = sharded.full_layouts()
        if has_adapters(sharded.structure):
            export = AdapterExport(
                path,
                sharded.structure,
                layouts,
                sharded.aliases(),
                sharded.is_trained,
                dtype=dtype,
                max_shard_size=max_shard_size,
            )
            return
        export = Export(path, sharded.structure, layouts, dtype=dtype, max_shard_size=max_shard_size)

    decide_once(begin, mesh.world_group)
    failure: Exception | None = None
    sharded.finish_gather()
    for name, tensor in sharded.full_tensors(keep=export is not None):
        if export is not None and failure is None:  # the other ranks only send their parts
            try:
                export.add(name, tensor)
            except Exception as error:
                failure = error
        del tensor  # before the next one is gathered

    def finish() -> None:
        assert export is not None
        try:
            if failure is not None:
                raise failure
            export.finish()
        except BaseException:
            export.discard()
            raise

    decide_once(finish, mesh.world_group)
