"""Offload in an Engine: checks it before anything is allocated, and takes the place of the optimizer's own step."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from tensorshard.comm.collectives import all_reduce_
from tensorshard.comm.decisions import succeed_together
from tensorshard.comm.world import ranks_here, world
from tensorshard.engine.optimizer import OptimizerFactory, build_optimizer
from tensorshard.model.trains_itself import OwnRule
from tensorshard.offload.activations import OffloadedActivations
from tensorshard.offload.device_copies import DeviceCopies
from tensorshard.offload.offloaded_optimizer import OffloadedOptimizer
from tensorshard.offload.slots import Slots
from tensorshard.offload.state_probe import probe_states
from tensorshard.offload.updates import tile_update
from tensorshard.plan.mesh import Mesh
from tensorshard.plan.offload import Offload
from tensorshard.plan.plan import Plan
from tensorshard.sharded.sharded_model import ShardedModel
from tensorshard.torch_private.fake_tensors import unset_fake_temporarily

logger = logging.getLogger("tensorshard")


def open_tiers(plan: Plan, mesh: Mesh, device: torch.device, *, off_device: bool | None = None) -> Slots | None:
    """The places for what `plan` offloads; None if it offloads nothing. A collective of the mesh.

    Nothing is allocated yet, except pinned buffers for activations if the device has memory of its own.

    Args:
        off_device: whether the device has memory of its own, apart from the host's, where updates are made. None: as
            `device` says. (In an estimate, fake tensors of the CPU stand for a GPU's.)

    Raises:
        ValueError: the folder cannot hold a scratch file, or `device` cannot offload under this plan.
    """
    offload = plan.offloaded
    if offload is None:
        return None
    off_device = not is_host_memory(device) if off_device is None else off_device
    if off_device:
        offload = _off_device(plan, offload, say=mesh.rank == 0)

    def open_slots() -> Slots:
        slots = Slots(offload, ranks_here(), DeviceCopies(device) if off_device else None)
        if offload.activations is not None:
            slots.activations = OffloadedActivations(slots)
        return slots

    slots = succeed_together(open_slots, mesh.world_group, "parallelize")
    held = (offload.optimizer, offload.gradients, offload.parameters, offload.activations)
    if mesh.rank == 0 and "cpu" in held and not off_device:
        logger.warning("offload to host memory saves nothing on CPU ranks, which compute in host memory; 'disk' does")
    return slots


def is_host_memory(device: torch.device) -> bool:
    """Whether the memory of `device` is the host's, where updates of offloaded states are made."""
    return device.type == "cpu"


def _off_device(plan: Plan, offload: Offload, *, say: bool) -> Offload:
    """The offload of a device with memory of its own, with the fields set that the plan leaves open.

    Args:
        say: whether this rank logs what was set.

    Raises:
        ValueError: the plan asks for what such a device cannot do.
    """
    if offload.optimizer is not None and offload.gradients is None:
        raise ValueError(
            f"offload.gradients=None was given with offload.optimizer={offload.optimizer!r} on GPUs: the host updates "
            f"what is in its memory, and there it needs the gradients, too; set offload.gradients to 'cpu' or 'disk'"
        )
    if offload.optimizer is not None and offload.parameters is None and plan.shards_parameters:
        # The shards of ZeRO 3 are the master weights.
        offload = replace(offload, parameters=offload.optimizer)
        if say:
            logger.warning(
                "the shards of zero=3 are the master weights, which go with the optimizer's states: parameters are "
                "kept as with offload.parameters=%r, and go to the device a unit at a time",
                offload.optimizer,
            )
    return offload


def offload_states(
    optimizer: torch.optim.Optimizer,
    factory: OptimizerFactory,
    rules: Sequence[OwnRule],
    sharded: ShardedModel,
    trained: Mapping[str, nn.Parameter],
    mesh: Mesh,
    slots: Slots,
) -> OffloadedOptimizer:
    """Moves the states of `optimizer` to `slots`. A collective of the mesh.

    Args:
        factory: what made `optimizer`.
        rules: of parameters that are trained in groups of their own.
        trained: the master weights that it updates.

    Raises:
        ValueError: it does not update each parameter by itself; there is no space for its states.
    """

    def offload() -> OffloadedOptimizer:
        states: Mapping[str, Mapping[str, torch.dtype]] = {}
        if tile_update(optimizer) is None:
            with unset_fake_temporarily():
                states = probe_states(partial(build_optimizer, factory, rules=rules), trained)
        masters = {name: m for name, m in sharded.offloaded_masters().items() if name in trained}
        return OffloadedOptimizer(
            optimizer,
            trained,
            states,
            slots,
            offloaded=masters,
            agree=partial(_stop_together, mesh.world_group, slots, "the update of offloaded states"),
        )

    offloaded = succeed_together(offload, mesh.world_group, "parallelize")
    if offloaded.gradients is not None:
        sharded.watch_gradients(offloaded.gradients.take, offloaded.gradients.finish)
    if slots.offload.overlap:
        sharded.watch_updates(offloaded.behind)
    shown = mesh.rank == 0 and not world().is_simulated
    if shown and slots.offload.host_memory is not None:  # else the plan says it
        print(f"offloaded by rank 0:\n{slots.describe()}", flush=True)
    return offloaded


def check_transfers(
    slots: Slots | None, group: torch.distributed.ProcessGroup, optimizer: OffloadedOptimizer | None = None
) -> None:
    """Raises an error on all ranks, if moving parameters or activations, or an update in the background, failed on one.

    Called after forwards and backwards. A collective of `group`, unless nothing can have failed.

    Args:
        optimizer: whose update is waited for; None not to wait.

    Raises:
        OSError, ValueError: the disk failed, or is full. The gradients are not valid. Weights are as before the step,
            unless the update failed.
    """
    updated = optimizer is not None and optimizer.is_behind
    on_disk = slots is not None and slots.offload.uses_disk
    parameters = slots is not None and on_disk and slots.offload.parameters is not None
    may_fail = slots is not None and (on_disk or slots.copies is not None)
    activations = slots.activations if slots is not None and may_fail else None
    if slots is None or not (updated or parameters or activations is not None):
        return
    failures: list[Exception | None] = []
    if updated and optimizer is not None:
        failures.append(optimizer.take_failure())
    if parameters:
        failures.append(slots.take_failure())
    if activations is not None:
        failures.append(activations.take_failure())
    failure = next((failure for failure in failures if failure is not None), None)
    _stop_together(group, slots, "moving offloaded tensors", failure)


def _stop_together(group: torch.distributed.ProcessGroup, slots: Slots, what: str, failure: Exception | None) -> None:
    """If one rank has a `failure` in doing `what`, raises it on all ranks. A collective of `group`."""
    if group.size() > 1:
        # NCCL's groups take only tensors on GPUs.
        device = None if slots.copies is None else slots.copies.device
        failures = torch.tensor([float(failure is not None)], device=device)
        all_reduce_(failures, group, what="whether the scratch files could be read and written")
        if not any(world().known(failures, [0.0])):
            return
    elif failure is None:
        return

    def fail() -> None:
        if failure is not None:
            raise failure

    succeed_together(fail, group, what)
