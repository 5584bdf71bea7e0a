"""Other tools' estimates: torch's MemTracker runs one process; DeepSpeed and Accelerate have formulas."""

from typing import Any

import torch
from torch import nn

from benchmarks.harness.estimates import OPTIMIZER, Cell, batch_of, build, case_of
from tensorshard.model.fake_copies import make_fake_copy
from tensorshard.torch_private.fake_tensors import FakeTensorMode


def others_say(cell: Cell) -> dict[str, int]:
    """Bytes of one rank, by the tool's name. Tools that cannot estimate such a plan are left out."""
    model = build(case_of(cell))
    estimates: dict[str, int] = {"Accelerate": accelerate_says(model)}
    if "tp" not in cell.fields and "pp" not in cell.fields:
        deepspeed = deepspeed_says(model, int(cell.fields["zero"]), cell.world_size)
        if deepspeed is not None:
            estimates["DeepSpeed"] = deepspeed
    try:
        estimates["MemTracker"] = mem_tracker_says(cell)
    except Exception as error:  # it is a prototype, and does not run every model
        print(f"MemTracker of {cell.name}: {type(error).__name__}: {error}")
    return estimates


def accelerate_says(model: nn.Module) -> int:
    """What ``accelerate estimate-memory`` prints for training by Adam in fp32: four times the weights and buffers."""
    return 4 * sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])


def deepspeed_says(model: nn.Module, level: int, ranks: int) -> int | None:
    """Bytes on a device by the formulas of ``estimate_zero2_model_states_mem_needs`` and ``estimate_zero3_...`` of
    DeepSpeed without offload: fp16 weights and gradients, fp32 master weights and Adam's states. None below level 2."""
    parameters = sum(p.numel() for p in model.parameters())
    if level == 2:
        return 4 * parameters + 16 * parameters // ranks
    if level == 3:
        largest = max(sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())
        return 4 * largest + 18 * parameters // ranks
    return None


def mem_tracker_says(cell: Cell) -> int:
    """The peak of two steps of plain PyTorch in one process on fake tensors, for any plan."""
    from torch.distributed._tools.mem_tracker import MemTracker

    case = case_of(cell)
    real = build(case)  # constructors read values, which fake tensors do not have
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        model = make_fake_copy(real, fake, torch.device("cpu"))
        optimizer = OPTIMIZER(model.parameters())
        drawn = batch_of(case, cell)
        inputs, targets = _fakes(fake, drawn)
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            for step in range(2):
                loss = case.loss(_call(model, inputs), targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if not step:
                    tracker.reset_mod_stats()
        peak = tracker.get_tracker_snapshot("peak")
    return max(sum(n for key, n in device.items() if str(key) != "Total") for device in peak.values())


def _fakes(fake: Any, tree: Any) -> Any:
    from torch.utils._pytree import tree_map

    return tree_map(lambda t: fake.from_tensor(t) if isinstance(t, torch.Tensor) else t, tree)


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)
