"""Opens the storage that a plan asks for."""

import torch

from tensorshard.plan.mesh import Mesh
from tensorshard.plan.plan import Plan
from tensorshard.plan.storage import DeviceStorage, Storage


def open_storage(plan: Plan, mesh: Mesh, device: torch.device, *, off_device: bool | None = None) -> Storage:
    """Where this rank's states, parameters and activations go. A collective of the mesh, if the plan offloads.

    Args:
        off_device: whether offloaded values leave the device's memory for the host's; None to ask the device.

    Raises:
        ValueError: the folder cannot hold a scratch file, or `device` cannot offload under this plan.
    """
    if plan.offloaded is None:
        return DeviceStorage()
    from tensorshard.offload.tiered_storage import open_tiers

    return open_tiers(plan, plan.offloaded, mesh, device, off_device=off_device)
