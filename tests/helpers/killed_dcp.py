"""The program that runs that are killed are compared with: FSDP2, saved by torch's DCP again and again to one path."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from killed_runs import Net, Sums


class Dcp:
    """The model, data and optimizer of ``killed_runs.py`` under ``fully_shard``, with ``dcp.save``.

    It marks what it does in files. The undisturbed run also writes each state to a file of its own.
    """

    def prepare(self, output: Path, *, background: bool) -> Callable[[], object]:
        output.mkdir(exist_ok=True)
        for left in ("saving", "trains"):
            (output / left).unlink(missing_ok=True)
        return lambda: _train(output)

    def doing(self, output: Path, touched: str = "") -> str:
        if not (output / "trains").exists():
            return "start"
        return "save" if (output / "saving").exists() else "step"

    def find(self, output: Path) -> str:
        """Compares the checkpoint with those that the undisturbed run wrote."""
        from torch.distributed.checkpoint.api import CheckpointException  # which is no Exception

        if not (output / "saved").exists() and not (output / "checkpoint" / ".metadata").exists():
            return "nothing yet"
        try:
            found = _whole_state(output / "checkpoint")
            expected = torch.load(output.parent / "undisturbed" / f"step-{found['step']}.pt", weights_only=False)
        except (Exception, CheckpointException) as error:  # whatever it raises, the checkpoint cannot be read
            shutil.rmtree(output)
            return f"unreadable: {type(error).__name__}"
        if _values(found) == _values(expected):
            return "whole"
        shutil.rmtree(output)
        return "loads, and mixes two saves"

    def compare(self, undisturbed: Path, output: Path) -> list[str]:
        ends = [_values(_whole_state(path / "checkpoint")) for path in (undisturbed, output)]
        return ["the last checkpoint differs"] * (ends[0] != ends[1])


def _whole_state(checkpoint: Path) -> dict[str, Any]:
    """The state in a checkpoint of DCP, on one process."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with tempfile.TemporaryDirectory() as folder:
        dcp_to_torch_save(checkpoint, Path(folder) / "state.pt")
        return dict(torch.load(Path(folder) / "state.pt", weights_only=False))


def _values(state: Any, name: str = "") -> dict[str, Any]:
    if isinstance(state, dict):
        return {key: value for word, part in state.items() for key, value in _values(part, f"{name}.{word}").items()}
    return {name: state.tolist() if isinstance(state, torch.Tensor) else state}


def _train(output: Path) -> None:
    """One rank."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    rank, size, data = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Sums()
    store = dist.FileStore(os.environ["TENSORSHARD_STORE_FILE"], size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    torch.manual_seed(0)
    model = fully_shard(Net(), mesh=dist.init_device_mesh("cpu", (size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    begin = 0

    def state(step: int) -> dict[str, Any]:
        weights, states = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": states, "step": step}

    checkpoint = output / "checkpoint"
    if (checkpoint / ".metadata").exists():
        loaded = state(0)
        dcp.load(loaded, checkpoint_id=checkpoint)
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        begin = loaded["step"]
    dist.barrier()
    if rank == 0:
        (output / "trains").touch()
    for step in range(begin + 1, 41):
        torch.manual_seed(step * size + rank)  # for dropout
        samples = [data[(8 * step + i) % len(data)] for i in range(rank, 8, size)]
        inputs, targets = (torch.stack(parts) for parts in zip(*samples, strict=True))
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 0 or step == 40:
            if rank == 0:
                (output / "saving").touch()
            dcp.save(state(step), checkpoint_id=checkpoint)
            if rank == 0:
                (output / "saving").unlink()
                (output / "saved").touch()
                if output.name == "undisturbed":
                    torch.save(_whole_state(checkpoint), output / f"step-{step}.pt")
            dist.barrier()
    dist.destroy_process_group()
